"""The JSON of LangFlow's answers and events, as recorded from a real server."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from comfyfleet.testing.fake_langflow.flows import ComponentError, FakeComponent, FakeFlow, Passed


def iso_now() -> str:
    return datetime.now(UTC).isoformat()


def _properties(source: FakeComponent | None, color: str | None = None) -> dict[str, Any]:
    named: dict[str, str | None] = {"id": None, "display_name": None, "source": None}
    if source is not None:
        name = source.display_name
        named = {"id": source.component_id, "display_name": name, "source": name}
    return {
        "text_color": color,
        "background_color": color,
        "edited": False,
        "source": named,
        "icon": "error" if color else None,
        "allow_markdown": False,
        "positive_feedback": None,
        "state": "complete",
        "targets": [],
        "usage": None,
        "build_duration": None,
    }


def message(
    passed: Passed, *, run_id: str, flow: FakeFlow, session: str, source: FakeComponent | None, is_user: bool
) -> dict[str, Any]:
    sender, name = ("User", "User") if is_user else ("Machine", "AI")
    return _message(
        passed.text,
        list(passed.files),
        sender,
        name,
        _properties(source),
        run_id=run_id,
        flow=flow,
        session=session,
    )


def error_message(
    error: ComponentError, *, run_id: str, flow: FakeFlow, session: str, source: FakeComponent
) -> dict[str, Any]:
    words = str(error)
    detail = f"**Details: {words}**" if words else "**An unknown error occurred.**"
    trace = 'Traceback (most recent call last):\n  File "<string>", line 67, in work\n'
    content: dict[str, Any] = {
        "type": "error",
        "duration": None,
        "header": {},
        "component": source.display_name,
        "field": None,
        "reason": f"**{error.exception_type}**\n - {detail}\n",
        "solution": None,
        "code": None,
        "traceback": f"{trace}{error.exception_type}: {words}\n",
    }
    blocks = {"title": "Error", "allow_markdown": True, "media_url": None}
    made = _message(
        f"{words or 'An unknown error occurred.'}\n",
        [],
        source.display_name,
        source.display_name,
        _properties(source, "red"),
        run_id=run_id,
        flow=flow,
        session=session,
    )
    made["data"].update(category="error", context_id=None, content_blocks=[{"contents": [content], **blocks}])
    nested: dict[str, Any] = {**content, "id": None, "contents": []}
    group = {"type": "group", "id": None, "duration": None, "header": {}, "contents": [nested], **blocks}
    made.update(category="error", context_id=None, content_blocks=[group])
    return made


def refused_tweak(field: str, session: str | None) -> dict[str, Any]:
    words = (
        f"Refused tweak keys ['{field}']: The field is protected and keeps the value set by the flow author."
    )
    reason = f"**TweakRefusedError**\n - **Details: {words}**\n"
    return {
        "session_id": session,
        "sender": None,
        "properties": _properties(None, "red"),
        "category": "error",
        "error": True,
        "content_blocks": [
            {"type": "text", "id": None, "contents": [], "text": f"{words}\n"},
            {
                "type": "group",
                "id": None,
                "contents": [{"type": "error", "contents": [], "component": None, "reason": reason}],
            },
        ],
    }


def _message(
    text: str,
    files: list[str],
    sender: str,
    sender_name: str,
    properties: dict[str, Any],
    *,
    run_id: str,
    flow: FakeFlow,
    session: str,
) -> dict[str, Any]:
    common: dict[str, Any] = {
        "timestamp": datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S.%f UTC"),
        "sender": sender,
        "sender_name": sender_name,
        "session_id": session,
        "context_id": "",
        "text": text,
        "files": files,
        "error": False,
        "edit": False,
        "properties": properties,
        "category": "message",
        "content_blocks": [],
        "session_metadata": {"graph_run_id": run_id},
        "id": str(uuid.uuid4()),
        "flow_id": flow.flow_id,
        "run_id": run_id,
        "duration": None,
    }
    return {"text_key": "text", "data": dict(common), "default_value": "", **common}


def end_vertex(
    component: FakeComponent,
    following: FakeComponent | None,
    content: Mapping[str, Any],
    *,
    is_valid: bool,
    params: str,
) -> dict[str, Any]:
    names = [following.component_id] if following is not None and is_valid else []
    data = {
        "results": {},
        "outputs": {},
        "logs": {},
        "message": {},
        "artifacts": {},
        "timedelta": 0.01,
        "duration": "10 ms",
        "used_frozen_result": False,
        "token_usage": None,
        **content,
    }
    is_output = component.type == "ChatOutput"
    return {
        "build_data": {
            "id": component.component_id,
            "inactivated_vertices": [],
            "next_vertices_ids": names,
            "top_level_vertices": names,
            "valid": is_valid,
            "params": params,
            "data": data,
            "timestamp": iso_now(),
        },
        "output_meta": {
            "component_id": component.component_id,
            "display_name": component.display_name,
            "vertex_type": component.type,
            "is_output": is_output,
            "is_terminal": is_output,
            "output_types": ["Message"],
        },
    }


def chat_content(told: dict[str, Any]) -> dict[str, Any]:
    """What the end of a chat component contains."""
    text = told["text"]
    brief = {
        "message": text,
        "sender": told["sender"],
        "sender_name": told["sender_name"],
        "files": [{"path": path, "name": path.rpartition("/")[2]} for path in told["files"]],
        "type": "object",
    }
    return {
        "results": {"message": told},
        "outputs": {"message": {"message": text, "type": "text"}},
        "logs": {"message": []},
        "message": brief,
        "artifacts": brief,
    }


def plain_content(passed: Passed, logs: list[str]) -> dict[str, Any]:
    """What the end of another component contains."""
    shown = {"out": {"repr": passed.text, "raw": passed.text, "type": "text"}}
    return {
        "outputs": {"out": {"message": passed.text, "type": "text"}},
        "logs": {"out": [{"name": f"Log {n}", "message": m, "type": "text"} for n, m in enumerate(logs, 1)]},
        "message": shown,
        "artifacts": shown,
    }


def failed_content(words: str) -> dict[str, Any]:
    told = {"errorMessage": words, "stackTrace": f"Traceback (most recent call last):\n{words}\n"}
    return {"outputs": {"out": {"message": told, "type": "error"}}}


def output_event(component: FakeComponent, text: str) -> dict[str, Any]:
    return {
        "type": "message",
        "status": "completed",
        "display_name": component.display_name,
        "content": text,
        "metadata": {"component_type": component.type},
        "component_id": component.component_id,
    }


def streamed_result(
    session: str, input_value: str | None, told: dict[str, Any], component: FakeComponent
) -> dict[str, Any]:
    """The answer of `/api/v1/run`."""
    text = told["text"]
    row = {
        "message": text,
        "sender": told["sender"],
        "sender_name": told["sender_name"],
        "session_id": session,
        "stream_url": None,
        "component_id": component.component_id,
        "files": [],
        "type": "text",
    }
    output: dict[str, Any] = {
        "results": {"message": told},
        "artifacts": {**chat_content(told)["artifacts"]},
        "outputs": {"message": {"message": text, "type": "text"}},
        "logs": {"message": []},
        "messages": [row] if text else [],
        "timedelta": None,
        "duration": None,
        "component_display_name": component.display_name,
        "component_id": component.component_id,
        "used_frozen_result": False,
        "token_usage": None,
    }
    inputs = {} if input_value is None else {"input_value": input_value}
    return {"session_id": session, "outputs": [{"inputs": inputs, "outputs": [output]}]}
