"""How a fake LangFlow words its answers."""

from __future__ import annotations

from typing import Any

from aiohttp import web


def answer_json(body: Any, status: int = 200) -> web.Response:
    return web.json_response(body, status=status)


def detail(status: int, error: str, code: str, message: str, **more: Any) -> web.Response:
    content = {"error": error, "code": code, "message": message, **more}
    return answer_json({"detail": content}, status)


def invalid(kind: str, where: list[str | int], message: str) -> web.Response:
    """A refusal of FastAPI."""
    return answer_json({"detail": [{"type": kind, "loc": where, "msg": message}]}, 422)
