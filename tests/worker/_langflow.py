"""Helpers for the tests of the LangFlow connector: quick settings, leased jobs, attempts."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from comfyfleet.model.calls import LeasedJob
from comfyfleet.model.dispatch import LeaseRef
from comfyfleet.model.failure import Failure, ServiceFailed
from comfyfleet.model.file import FetchedFile
from comfyfleet.model.ids import JobId, LeaseToken, WorkerId, WorkflowHash
from comfyfleet.model.job import Attachment, Timeouts
from comfyfleet.testing.contract.connector_scene import ConnectorAttempt
from comfyfleet.testing.fake_langflow import FakeLangFlow, FakeLangFlowSettings
from comfyfleet.worker.connectors.langflow import LangFlow, LangFlowSettings

TRACES = Path(__file__).parents[1] / "data" / "langflow_traces"

QUICK = LangFlowSettings(
    key="sk-fake",
    connect_s=2.0,
    request_s=2.0,
    accept_s=3.0,
    start_s=10.0,
    queued_s=5.0,
    poll_s=0.1,
    settle_s=0.5,
    refused_s=0.3,
    unresponsive_s=1.0,
    health_s=2.0,
    health_wait_s=0.5,
    reconnect_s=0.05,
    cancel_s=3.0,
    cancel_interval_s=0.03,
    probe_s=0.3,
    close_s=1.0,
)

_numbers = itertools.count(1)


def tuned(**changes: Any) -> LangFlowSettings:
    return msgspec.structs.replace(QUICK, **changes)


def leased(
    payload: dict[str, Any],
    *,
    timeouts: Timeouts | None = None,
    include: tuple[str, ...] = (),
    attachments: tuple[Attachment, ...] = (),
    fetched: tuple[FetchedFile, ...] = (),
) -> LeasedJob:
    return LeasedJob(
        ref=LeaseRef(JobId(f"job-{next(_numbers)}"), 1, 1, 1, LeaseToken("token")),
        worker_id=WorkerId("w"),
        ttl_s=60.0,
        acknowledge_s=10.0,
        workflow=payload,
        workflow_hash=WorkflowHash("hash"),
        service="langflow",
        timeouts=timeouts or Timeouts(),
        include_outputs=include,
        attachments=attachments,
        fetched=fetched,
    )


@asynccontextmanager
async def connected(
    settings: LangFlowSettings = QUICK, fake: FakeLangFlowSettings | None = None
) -> AsyncIterator[tuple[LangFlow, FakeLangFlow]]:
    async with FakeLangFlow(fake) as server, LangFlow(server.url, settings) as connector:
        yield connector, server


async def content_of(connector: LangFlow, payload: dict[str, Any]) -> Any:
    """What the flow's output says."""
    result = await ConnectorAttempt(connector, leased(payload)).result()
    return result.outputs["ChatOutput-z"]["content"]


async def failure_of(connector: LangFlow, payload: dict[str, Any], **options: Any) -> Failure:
    return await ConnectorAttempt(connector, leased(payload, **options)).failure()


async def refusal_of(connector: LangFlow, payload: dict[str, Any]) -> ServiceFailed:
    end = await ConnectorAttempt(connector, leased(payload)).end()
    assert isinstance(end, ServiceFailed), end
    return end
