"""What things cost, and a book that is right whatever is entered: properties, and books that are wrong on purpose."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from comfyfleet.model.dispatch import Phase
from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.model.ids import JobId, TenantId
from comfyfleet.model.ledger import (
    MAX_CREDITS,
    Account,
    FlatPrice,
    GpuPrice,
    Hold,
    HoldId,
    Ledger,
    Outcome,
    OutputPrice,
    Posting,
    Price,
    ServicePrice,
    Settlement,
    Usage,
)
from comfyfleet.policy import accounting

ACME = TenantId("acme")
FINAL = [phase for phase in Phase if phase.is_final]

small = st.integers(0, 1000)
prices: st.SearchStrategy[Price] = st.one_of(
    st.builds(FlatPrice, small),
    st.builds(ServicePrice, st.just({"comfyui": 7, "a1111": 3}), small),
    st.builds(OutputPrice, small, st.integers(0, 50), small),
    st.builds(GpuPrice, small, st.integers(0, 7200), small),
)
usages = st.builds(
    Usage,
    st.sampled_from(["comfyui", "a1111", "langflow"]),
    st.integers(-1, 10_000),
    st.integers(-1, 10**9),
)


@given(prices, usages)
def test_what_a_run_costs_never_exceeds_what_was_held_for_it(price: Price, usage: Usage) -> None:
    assert 0 <= accounting.cost(price, usage) <= accounting.ceiling(price, usage.service)


@given(prices, usages, small, small)
def test_using_more_never_costs_less(price: Price, usage: Usage, outputs: int, milliseconds: int) -> None:
    more = Usage(usage.service, usage.outputs + outputs, usage.gpu_milliseconds + milliseconds)
    assert accounting.cost(price, usage) <= accounting.cost(price, more)


@pytest.mark.parametrize(
    ("price", "usage", "held", "charged"),
    [
        (FlatPrice(5), Usage("comfyui"), 5, 5),
        (ServicePrice({"comfyui": 4}, 9), Usage("comfyui"), 4, 4),
        (ServicePrice({"comfyui": 4}, 9), Usage("a1111"), 9, 9),
        (OutputPrice(3, 4), Usage("comfyui", outputs=2), 12, 6),
        (OutputPrice(3, 4, base=1), Usage("comfyui", outputs=9), 13, 13),
        (GpuPrice(2, 60), Usage("comfyui", gpu_milliseconds=10_000), 120, 20),
        (GpuPrice(2, 60), Usage("comfyui", gpu_milliseconds=10_001), 120, 21),
        (GpuPrice(2, 60, base=5), Usage("comfyui", gpu_milliseconds=90_000), 125, 125),
    ],
)
def test_each_kind_of_price_holds_its_ceiling_and_charges_what_was_used(
    price: Price, usage: Usage, held: int, charged: int
) -> None:
    assert accounting.ceiling(price, usage.service) == held
    assert accounting.cost(price, usage) == charged


def test_prices_are_written_as_rules_and_read_back() -> None:
    written = b'{"by":"gpu_second","credits_per_second":2,"most_seconds":60,"base":1}'
    assert msgspec.json.decode(written, type=Price) == GpuPrice(2, 60, 1)
    for wrong in (b'{"by":"flat","credits":2,"credit":3}', b'{"by":"flat","credits":-2}', b'{"by":"moon"}'):
        with pytest.raises(msgspec.ValidationError):
            msgspec.json.decode(wrong, type=Price)


def test_a_service_without_a_price_is_refused_by_name() -> None:
    with pytest.raises(Refusal, match="the service 'langflow' has no price") as refused:
        accounting.ceiling(ServicePrice({"comfyui": 1}), "langflow")
    assert refused.value.code is RefusalCode.NOT_ALLOWED


@pytest.mark.parametrize("amount", [-1, MAX_CREDITS + 1])
def test_amounts_outside_the_bounds_are_refused(amount: int) -> None:
    for enter in (
        lambda: accounting.reserve(HoldId(JobId("a"), 1), ACME, amount, 0.0),
        lambda: accounting.grant("g", ACME, amount, 0.0),
        lambda: accounting.ceiling(FlatPrice(amount), "comfyui"),
    ):
        with pytest.raises(Refusal) as refused:
            enter()
        assert refused.value.code is RefusalCode.INVALID_REQUEST


@given(small, small, st.sampled_from(FINAL))
def test_a_round_that_completed_is_consumed_and_any_other_refunded_whole(
    amount: int, used: int, phase: Phase
) -> None:
    hold = accounting.reserve(HoldId(JobId("a"), 1), ACME, amount, 1.0)
    settlement = accounting.settle(hold, phase, used, 2.0)
    assert (settlement.outcome is Outcome.CONSUMED) == (phase is Phase.COMPLETED)
    assert settlement.consumed == (min(used, amount) if phase is Phase.COMPLETED else 0)
    account = accounting.total(
        ACME, [accounting.posting_of(hold), accounting.settling_posting(hold, settlement)]
    )
    assert account == Account(ACME, -settlement.consumed, 0), "the rest is available again"


entries = st.lists(
    st.one_of(
        st.tuples(st.just("grant"), st.integers(1, 300), st.booleans()),
        st.tuples(st.just("reserve"), small, st.just(0)),
        st.tuples(st.just("settle"), small, st.sampled_from(FINAL)),
        st.tuples(st.just("adjust"), st.integers(1, 50), st.booleans()),
    ),
    max_size=40,
)


def kept(steps: list[tuple[str, int, object]]) -> Ledger:
    """A book kept as a database would: a hold or a correction only if the account covers it."""
    postings: list[Posting] = []
    grants, holds, settlements, endings = [], [], [], {}
    waiting: list[Hold] = []
    for number, (step, amount, choice) in enumerate(steps):
        available = accounting.total(ACME, postings).available
        match step:
            case "grant":
                made = accounting.grant(f"g{number}", ACME, amount, 0.0, is_pending=bool(choice))
                grants.append(made)
                if not choice:
                    postings.append(accounting.posting_of(made))
            case "reserve" if amount <= available:
                hold = accounting.reserve(HoldId(JobId(f"job-{number}"), 1), ACME, amount, 0.0)
                holds.append(hold)
                waiting.append(hold)
                postings.append(accounting.posting_of(hold))
            case "settle" if waiting:
                assert isinstance(choice, Phase)
                hold = waiting.pop(0)
                settlements.append(accounting.settle(hold, choice, amount, 1.0))
                endings[hold.hold_id] = choice.value
                postings.append(accounting.settling_posting(hold, settlements[-1]))
            case "adjust" if choice or amount <= available:
                change = amount if choice else -amount
                postings.append(
                    accounting.posting_of(accounting.adjust(f"a{number}", ACME, change, 0.0, "why"))
                )
    pending = sum(each.amount for each in grants if each.state == "pending")
    account = msgspec.structs.replace(accounting.total(ACME, postings), pending=pending)
    return Ledger(account, tuple(postings), tuple(holds), tuple(settlements), tuple(grants), endings)


@given(entries)
def test_a_book_kept_by_these_rules_has_no_problems(steps: list[tuple[str, int, object]]) -> None:
    ledger = kept(steps)
    assert accounting.problems(ledger) == []
    assert ledger.account.available >= 0


SOUND = kept(
    [
        ("grant", 100, False),
        ("grant", 50, True),
        ("reserve", 30, 0),
        ("reserve", 20, 0),
        ("reserve", 10, 0),
        ("settle", 25, Phase.COMPLETED),
        ("settle", 0, Phase.FAILED),
    ]
)
_SETTLED = SOUND.settlements[0]
_OPEN = SOUND.holds[2].hold_id


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"account": Account(ACME, 76, 10, 50)}, "postings add up to 75"),
        ({"account": Account(ACME, 75, 9, 50)}, "open holds add up to 10"),
        ({"account": Account(ACME, 75, 10, 0)}, "pending grants add up to 50"),
        ({"account": Account(ACME, 75, 80, 50)}, "the holds exceed the balance by 5"),
        ({"postings": SOUND.postings[:-1]}, "refund of job-3/1 is not in the ledger"),
        ({"postings": (*SOUND.postings, SOUND.postings[-1])}, "refund of job-3/1 has no cause"),
        ({"settlements": (*SOUND.settlements, _SETTLED)}, "settled 2 times"),
        (
            {
                "settlements": (
                    *SOUND.settlements,
                    Settlement(HoldId(JobId("x"), 1), Outcome.REFUNDED, 0, 1.0),
                )
            },
            "is settled without a hold",
        ),
        ({"endings": {}}, "is open and its hold is consumed"),
        (
            {"endings": SOUND.endings | {_SETTLED.hold_id: "cancelled"}},
            "is cancelled and its hold is consumed",
        ),
        ({"endings": SOUND.endings | {_OPEN: "failed"}}, "is failed and its hold is open"),
    ],
)
def test_a_book_that_is_wrong_says_what_is_wrong(changes: dict[str, object], said: str) -> None:
    assert accounting.problems(SOUND) == []
    found = accounting.problems(msgspec.structs.replace(SOUND, **changes))
    assert any(said in each for each in found), found


def test_a_refusal_for_want_of_credits_says_what_there_is() -> None:
    refusal = accounting.credits_short(ACME, 80, Account(ACME, 100, 80, 500))
    assert refusal.code is RefusalCode.CREDITS_SHORT
    assert refusal.details == {"needed": 80, "available": 20}
    assert "80 are held" in refusal.message and "500 more are granted but not confirmed" in refusal.message
