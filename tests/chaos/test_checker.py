"""The checker finds what it is there to find: in logs made by hand, each with one thing wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from chaos.checker import Finding, check
from chaos.logs import Line, Log, Tail, What, read_logs
from chaos.setting import LEASE_S, SLACK_S


class Story:
    """Lines at whole seconds."""

    def __init__(self) -> None:
        self.lines: list[Line] = []

    def tell(self, at: float, who: str, what: What, **values: Any) -> Story:
        self.lines.append(Line(at, who, what, **values))
        return self

    def submit(self, at: float = 0) -> Story:
        self.tell(at, "caller.0", "submitting", reference="r", made="own")
        return self.tell(at, "caller.0", "acknowledged", reference="r", job="j")

    def begin(self, at: float, who: str, lease: int, **values: Any) -> Story:
        self.tell(at, who, "granted", job="j", lease=lease, made="own")
        return self.tell(at, who, "began", job="j", lease=lease, execution=f"e{lease}", **values)

    def report(
        self, at: float, who: str, lease: int, answer: What = "accepted", report: str = "complete"
    ) -> Story:
        of = {"job": "j", "lease": lease, "report": report, "execution": f"e{lease}"}
        self.tell(at, who, "reporting", **of)
        return self.tell(at, who, answer, **of)

    def see(self, at: float, value: str, what: What = "seen", made: str | None = "own") -> Story:
        return self.tell(at, "caller.0", what, reference="r", job="j", value=value, made=made)

    def kill(self, at: float, role: Any, value: str) -> Story:
        return self.tell(at, "conductor", "killing", role=role, value=value)

    def check(self) -> Finding:
        return check(self.lines)


def a_good_day() -> Story:
    return Story().submit().begin(1, "worker-0.0", 1).report(2, "worker-0.0", 1).see(3, "e1")


def test_a_day_on_which_nothing_happened_is_clean() -> None:
    finding = a_good_day().see(9, "e1", "read_again").check()
    assert finding == Finding(submitted=1, acknowledged=1, executions=1, compared=2)
    assert finding.is_clean


def test_an_acknowledged_job_that_was_never_seen_completed_is_lost() -> None:
    finding = Story().submit().begin(1, "worker-0.0", 1).check()
    assert finding.lost == 1
    assert not finding.is_clean


def test_a_submit_that_was_never_acknowledged_is_not_lost() -> None:
    finding = Story().tell(0, "caller.0", "submitting", reference="r").check()
    assert (finding.submitted, finding.acknowledged, finding.lost) == (1, 0, 0)


@pytest.mark.parametrize("value", ["not completed: failed", "refused: not_found", "e7"])
def test_a_job_that_ended_otherwise_or_with_a_result_nobody_made_is_lost(value: str) -> None:
    assert Story().submit().begin(1, "worker-0.0", 1).see(3, value).check().lost == 1


def test_a_job_that_is_gone_when_it_is_read_again_is_lost() -> None:
    assert a_good_day().see(9, "refused: not_found", "read_again").check().lost == 1


def test_a_reference_that_became_two_jobs_is_lost() -> None:
    story = a_good_day().tell(5, "caller.0", "acknowledged", reference="r", job="k")
    assert story.check().lost == 1


@pytest.mark.parametrize("what", ["seen", "read_again"])
@pytest.mark.parametrize("made", ["another's", None])
def test_a_result_that_was_not_made_from_what_its_caller_submitted_is_mixed(
    what: What, made: str | None
) -> None:
    finding = a_good_day().see(9, "e1", what, made).check()
    assert (finding.mixed, finding.lost, finding.completed_twice) == (1, 0, 0)
    assert not finding.is_clean


def test_a_lease_with_another_payload_is_mixed_whatever_became_of_it() -> None:
    story = Story().submit().tell(0.5, "worker-1.0", "granted", job="j", lease=1, made="another's")
    finding = story.begin(1, "worker-0.0", 2).report(2, "worker-0.0", 2).see(3, "e2").check()
    assert finding.mixed == 1
    assert not finding.is_clean


def test_a_caller_that_does_not_say_what_must_be_made_proves_nothing() -> None:
    story = Story().tell(0, "caller.0", "submitting", reference="r")
    story.tell(0, "caller.0", "acknowledged", reference="r", job="j")
    finding = story.begin(1, "worker-0.0", 1).report(2, "worker-0.0", 1).see(3, "e1", made=None).check()
    assert finding.mixed == 1


def test_two_accepted_completions_are_found() -> None:
    story = a_good_day().kill(2.5, "worker", "worker-0.0")
    finding = story.begin(4, "worker-1.0", 2).report(5, "worker-1.0", 2).check()
    assert finding.completed_twice == 1
    assert not finding.is_clean


def test_a_result_that_changed_between_two_looks_is_found() -> None:
    story = Story().submit().begin(1, "worker-0.0", 1).kill(2, "worker", "worker-0.0")
    finding = story.begin(4, "worker-1.0", 2).see(5, "e1").see(9, "e2", "read_again").check()
    assert finding.completed_twice == 1


def test_the_same_report_answered_twice_is_no_second_completion() -> None:
    assert a_good_day().report(2.5, "worker-0.0", 1).check().is_clean


def a_zombie(answer: What, report: str = "complete") -> Finding:
    story = Story().submit().begin(1, "worker-0.0", 1)
    story.tell(1.5, "conductor", "stopping", role="worker", value="worker-0.0")
    story.begin(4, "worker-1.0", 2)
    story.tell(5, "conductor", "continued", role="worker", value="worker-0.0")
    story.report(5, "worker-0.0", 1, answer, report)
    return story.report(6, "worker-1.0", 2).see(7, "e2").check()


@pytest.mark.parametrize("report", ["complete", "fail", "release", "heartbeat"])
def test_a_stale_report_that_was_accepted_is_found(report: str) -> None:
    finding = a_zombie("accepted", report)
    assert finding.stale_accepted == 1
    assert not finding.is_clean


def test_a_stale_report_that_was_refused_is_counted_as_such() -> None:
    finding = a_zombie("refused")
    assert (finding.stale_accepted, finding.stale_refused) == (0, 1)
    assert finding.explained == {"worker stopped": 1}
    assert finding.is_clean


def test_a_completion_followed_by_another_lease_is_stale_whatever_the_clocks_say() -> None:
    story = a_good_day().kill(2.5, "worker", "worker-0.0").begin(4, "worker-1.0", 2)
    assert story.check().stale_accepted == 1


def test_a_job_given_back_may_be_leased_again() -> None:
    story = Story().submit().begin(1, "worker-0.0", 1).report(2, "worker-0.0", 1, report="release")
    story.kill(2.5, "worker", "worker-0.0")
    assert story.begin(4, "worker-1.0", 2).report(5, "worker-1.0", 2).see(6, "e2").check().is_clean


def twice(**values: Any) -> Story:
    """A job that two workers ran one after the other."""
    story = Story().submit().begin(10, "worker-0.0", 1, **values).begin(20, "worker-1.0", 2)
    return story.report(21, "worker-1.0", 2).see(22, "e2")


def test_a_second_execution_without_a_reason_is_found() -> None:
    finding = twice().check()
    assert (finding.duplicate_executions, finding.unexplained) == (1, 1)
    assert not finding.is_clean


def test_a_second_execution_is_explained_by_the_end_of_the_first_worker() -> None:
    finding = twice().kill(11, "worker", "worker-0.0").check()
    assert finding.explained == {"worker killed": 1}
    assert finding.is_clean


@pytest.mark.parametrize(
    ("at", "role", "value"),
    [
        (11, "worker", "worker-2.0"),
        (11, "worker", "worker-0.1"),
        (21, "worker", "worker-0.0"),
        (11, "engine", "engine-0.0"),
        (21, "server", "server"),
    ],
)
def test_the_end_of_somebody_else_or_at_another_time_explains_nothing(
    at: float, role: str, value: str
) -> None:
    assert twice().kill(at, role, value).check().unexplained == 1


def test_an_engine_explains_what_happened_to_workers_that_speak_to_it() -> None:
    assert twice(is_bridged=True).kill(11, "engine", "engine-0.0").check().explained == {"engine killed": 1}


@pytest.mark.parametrize(("gap", "is_explained"), [(1.0, True), (LEASE_S + SLACK_S + 1, False)])
def test_a_server_that_was_away_is_felt_for_a_lease_and_a_little_more(gap: float, is_explained: bool) -> None:
    story = twice().kill(3, "server", "server").tell(10 - gap, "conductor", "up", value="server")
    assert story.check().explained == ({"server killed": 1} if is_explained else {})


def test_a_process_that_the_machine_did_not_let_run_is_told_apart() -> None:
    story = twice().tell(14, "worker-0.0", "stalled", since=11.0)
    assert story.check().explained == {"machine stalled": 1}


def test_a_worker_that_begins_an_old_lease_late_is_explained_by_its_own_stop() -> None:
    story = Story().submit().tell(1, "conductor", "stopping", role="worker", value="worker-0.0")
    story.begin(4, "worker-1.0", 2).report(4.5, "worker-1.0", 2)
    story.tell(5, "conductor", "continued", role="worker", value="worker-0.0")
    story.begin(5.1, "worker-0.0", 1).report(6, "worker-0.0", 1, "refused").see(7, "e2")
    finding = story.check()
    assert finding.explained == {"worker stopped": 1}
    assert finding.is_clean


@pytest.mark.parametrize(("asleep_until", "is_explained"), [(9.9, True), (10 - LEASE_S - 0.1, False)])
def test_a_lease_granted_to_a_sleeping_worker_is_explained_by_that_sleep(
    asleep_until: float, is_explained: bool
) -> None:
    story = Story().submit().tell(1, "conductor", "stopping", role="worker", value="worker-0.0")
    story.tell(asleep_until, "conductor", "continued", value="worker-0.0")
    story.begin(10, "worker-0.0", 1).begin(11.5, "worker-1.0", 2).report(12, "worker-1.0", 2).see(13, "e2")
    assert story.check().is_clean == is_explained


def test_logs_are_read_back_in_the_order_of_time_without_a_line_that_was_cut_off(tmp_path: Path) -> None:
    first, second = Log(tmp_path, "a.0"), Log(tmp_path, "b.0")
    first.write("submitting", reference="r")
    second.write("granted", job="j", lease=3)
    first.write("acknowledged", reference="r", job="j")
    first.close()
    second.close()
    with (tmp_path / "b.0.jsonl").open("ab") as file:
        file.write(b'{"at":1,"who":"b.0","wha')
    assert [line.what for line in read_logs(tmp_path)] == ["submitting", "granted", "acknowledged"]


def test_a_tail_counts_each_line_once(tmp_path: Path) -> None:
    tail = Tail(tmp_path / "a.0.jsonl", '"what":"seen"')
    assert tail.look() == 0
    log = Log(tmp_path, "a.0")
    log.write("seen", job="j")
    log.write("submitting", reference="r")
    assert tail.look() == 1
    log.write("seen", job="k")
    assert tail.look() == 2
    assert tail.look() == 2
    log.close()
