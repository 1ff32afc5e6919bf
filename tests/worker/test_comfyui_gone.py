"""A server whose process is gone, told apart from one that does not answer."""

from __future__ import annotations

import asyncio

import pytest
from tests.worker._comfyui import Attempt, leased, picture, server_and_connector, slow, tuned

from comfyfleet.model.fact import ProgressKind
from comfyfleet.model.failure import ServiceBusy
from comfyfleet.model.job import Attachment


@pytest.mark.parametrize("attachments", [(), (Attachment("a.png", b"x", "1", "color"),)])
async def test_a_prompt_that_a_server_which_is_gone_never_got_is_given_back(
    attachments: tuple[Attachment, ...],
) -> None:
    """Nothing was sent, so nobody is to blame: others may take the job at once."""
    settings = tuned(listen_s=0.1, unreachable_s=3600.0, accept_s=3600.0, refused_s=0.1)
    async with server_and_connector(settings) as (fake, connector):
        await fake.crash()
        attempt = Attempt(connector, leased(picture(), attachments=attachments))
        with pytest.raises(ServiceBusy, match="refuses connections"):
            await attempt.task


async def test_a_server_that_does_not_answer_in_time_is_waited_for() -> None:
    """A timeout is no proof, unlike a connection that is refused."""
    async with server_and_connector(tuned(request_s=0.1, unresponsive_s=3600.0, refused_s=0.1)) as (
        fake,
        connector,
    ):
        attempt = Attempt(connector, leased(slow(steps=10)))
        await attempt.heard(ProgressKind.STARTED)
        fake.faults.slow_answer_s = 0.5
        await asyncio.sleep(1.0)
        fake.faults.slow_answer_s = 0.0
        assert (await attempt.result()).files
