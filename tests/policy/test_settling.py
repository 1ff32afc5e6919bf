"""What the end of a round comes to for its tenant's book."""

from __future__ import annotations

import pytest

from comfyfleet.model.dispatch import Dispatch, Phase
from comfyfleet.model.ids import ClassKey, JobId, TenantId, WorkflowHash
from comfyfleet.model.job import Job, Submission
from comfyfleet.model.ledger import FlatPrice, Hold, HoldId, Outcome, Price, ServicePrice
from comfyfleet.policy.accounting import settled

ACME, JOB, HASH = TenantId("acme"), JobId("job"), WorkflowHash("hash")


@pytest.mark.parametrize("price", [FlatPrice(7), ServicePrice({"a1111": 7}), ServicePrice({"a1111": 7}, 3)])
def test_what_was_agreed_at_submit_is_charged_though_the_payload_cannot_be_read_any_more(
    price: Price,
) -> None:
    """An unreadable job has an empty payload, and with it the service of every job that names none."""
    dispatch = Dispatch(JOB, ClassKey("class"), HASH, 0, tenant=ACME, phase=Phase.COMPLETED)
    unreadable = Job(JOB, ACME, HASH, 1.0, Submission({}), unreadable="its key was destroyed")
    hold = Hold(HoldId(JOB, 1), ACME, 7, 1.0)
    verdict = settled(dispatch, unreadable, [], hold, price, unreadable, None, None, 2.0)
    assert (verdict.settlement.outcome, verdict.settlement.consumed) == (Outcome.CONSUMED, 7)
    assert (verdict.posting.balance, verdict.posting.held) == (-7, -7)
