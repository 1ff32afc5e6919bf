"""The contract of connectors without faults: runs, reports, cancels, coming back, and what the server has."""

from __future__ import annotations

import asyncio
import tempfile
from functools import partial
from pathlib import Path

import msgspec
import pytest

from comfyfleet.model.fact import ProgressKind
from comfyfleet.model.failure import FailureKind, ServiceBusy, ServiceFailed
from comfyfleet.model.job import JobResult
from comfyfleet.ports import OutputSource
from comfyfleet.testing.contract.connector_scene import (
    ConnectorAbility,
    ConnectorAttempt,
    ConnectorBench,
    DeliveryPromise,
)

_A_MOMENT_S = 1.0
_STEPS = (ProgressKind.ACCEPTED, ProgressKind.STARTED, ProgressKind.PROGRESS)


class ConnectorRunContract:
    async def test_a_run_completes_with_an_output_made_from_its_payload(self, bench: ConnectorBench) -> None:
        attempt = bench.start()
        await bench.assert_made_from(await attempt.result(), attempt.job)
        assert bench.begun(attempt.job) == 1

    async def test_runs_after_one_another_do_not_mix_their_content(self, bench: ConnectorBench) -> None:
        jobs = [bench.job() for _ in range(3)]
        results = [await bench.start(job).result() for job in jobs]
        for job, result in zip(jobs, results, strict=True):
            await bench.assert_made_from(result, job)
        again = bench.job(bench.mark_of(jobs[0]))
        await bench.assert_made_from(await bench.start(again).result(), again)
        await bench.assert_made_from(results[0], jobs[0])

    async def test_runs_at_a_time_do_not_mix_their_content(self, bench: ConnectorBench) -> None:
        jobs = [bench.job() for _ in range(3)]
        attempts = [bench.start(job) for job in jobs]
        ends = [await attempt.end() for attempt in attempts]
        assert any(isinstance(end, JobResult) for end in ends), ends
        for job, end in zip(jobs, ends, strict=True):
            if isinstance(end, JobResult):
                await bench.assert_made_from(end, job)
            else:
                assert isinstance(end, ServiceBusy), f"a job beside others failed: {end.failure}"
                assert bench.begun(job) == 0

    async def test_outputs_are_saved_where_the_agent_says(
        self, bench: ConnectorBench, tmp_path: Path
    ) -> None:
        bench.needs(ConnectorAbility.MAKES_FILES)
        result = await bench.start().result()
        assert result.files, "a service that makes files returns them"
        assert isinstance(bench.connector, OutputSource), "a connector that makes files has `save`"
        folder = tmp_path / "saved"
        folder.mkdir()
        for number, file in enumerate(result.files):
            assert Path(file.filename).name == file.filename, "a file name has no folder in it"
            path = folder / str(number)
            saved, size = await bench.connector.save(file, path), path.stat().st_size
            assert saved == size > 0, f"`save` returns the size of the file, {size}, not {saved!r}"
        assert len(list(folder.iterdir())) == len(result.files)

    async def test_reports_have_the_shape_that_the_hub_expects(self, bench: ConnectorBench) -> None:
        attempt = bench.start()
        result = await attempt.result()
        count = len(attempt.reports)
        for report in attempt.reports:
            assert report.ref == attempt.job.ref
            assert report.kind in ProgressKind
            msgspec.json.encode(report.data)
            value, most = report.data.get("value"), report.data.get("max")
            if value is not None and most is not None:
                assert 0 <= value <= most, f"`value` is from 0 to `max`: {report.data}"
            assert 0 <= report.data.get("percentage", 0) <= 100, f"from 0 to 100: {report.data}"
            assert report.image != b"", "a preview without a picture"
        kinds = [report.kind for report in attempt.reports]
        firsts = [kinds.index(kind) for kind in _STEPS if kind in kinds]
        assert firsts == sorted(firsts), "accepted comes before started, and that before progress"
        percentages = [each.data["percentage"] for each in attempt.reports if "percentage" in each.data]
        assert percentages == sorted(percentages), "a percentage never decreases"
        msgspec.json.encode(result.outputs)
        await bench.connector.close()
        assert len(attempt.reports) == count, "nothing is reported after the end"

    async def test_a_run_reports_that_it_started(self, bench: ConnectorBench) -> None:
        """Without this the time in the service's queue counts as run time."""
        bench.needs(ConnectorAbility.TELLS_PROGRESS)
        attempt = await bench.running()
        await bench.eventually(lambda: attempt.has_heard(ProgressKind.STARTED), "it reports the start")
        await bench.scene.release()
        await attempt.result()
        assert [report.kind for report in attempt.reports].count(ProgressKind.STARTED) == 1

    async def test_a_close_may_be_repeated_and_leaves_no_task_and_no_file(
        self, bench: ConnectorBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        temporary = tmp_path / "temporary"
        temporary.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(temporary))
        await bench.connector.close()
        await bench.within(_A_MOMENT_S, lambda: len(asyncio.all_tasks()) == 1)
        before = asyncio.all_tasks()
        connector = bench.scene.connect()
        await connector.open()
        attempt = ConnectorAttempt(connector, bench.job())
        await attempt.result()
        await connector.inventory()
        await connector.close()
        await connector.close()
        # The server's own tasks for these connections end a moment later.
        gone = await bench.within(_A_MOMENT_S * 5, lambda: asyncio.all_tasks() <= before)
        assert gone, f"tasks are left: {asyncio.all_tasks() - before}"
        assert list(temporary.rglob("*")) == []

    async def test_it_opens_again_after_a_close(self, bench: ConnectorBench) -> None:
        await bench.connector.close()
        await bench.connector.open()
        attempt = bench.start()
        await bench.assert_made_from(await attempt.result(), attempt.job)


class ConnectorCancelContract:
    async def test_a_cancelled_run_stops_and_a_strangers_goes_on(self, bench: ConnectorBench) -> None:
        bench.needs(ConnectorAbility.CANCEL_RUNNING)
        attempt = await bench.running()
        stranger = None
        if ConnectorAbility.STRANGERS not in bench.scene.cannot:
            stranger = bench.new_mark()
            await bench.scene.start_stranger(stranger)
        await self._is_cancelled(bench, attempt)
        states = bench.scene.runs(bench.mark_of(attempt.job))
        assert list(states) == ["stopped"], f"the cancel returned, and the run is {states}"
        failure = await attempt.failure()
        assert failure.kind is FailureKind.INTERRUPTED, f"a cancelled run is INTERRUPTED, not {failure}"
        await self._completes(bench, stranger)

    async def test_a_cancelled_job_that_waits_never_runs_and_the_running_one_goes_on(
        self, bench: ConnectorBench
    ) -> None:
        bench.needs(ConnectorAbility.STRANGERS, ConnectorAbility.WAITING, ConnectorAbility.CANCEL_WAITING)
        stranger = await self._held_stranger(bench)
        attempt = bench.start()
        mark = bench.mark_of(attempt.job)
        await bench.eventually(
            lambda: attempt.task.done() or "waiting" in bench.scene.runs(mark), "the job waits at the service"
        )
        await self._is_cancelled(bench, attempt)
        assert "waiting" not in bench.scene.runs(mark), "the cancel returned, and the job still waits"
        end = await attempt.end()
        assert isinstance(end, ServiceFailed)
        assert isinstance(end, ServiceBusy) or end.failure.kind is FailureKind.INTERRUPTED, (
            f"a cancelled job that waits is INTERRUPTED, not {end.failure}"
        )
        await self._completes(bench, stranger)
        assert bench.begun(mark) == 0

    async def test_a_cancel_at_once_leaves_nothing_that_runs(self, bench: ConnectorBench) -> None:
        bench.needs(ConnectorAbility.CANCEL_RUNNING)
        await bench.scene.hold()
        for steps in (0, 1, 3, 10):
            attempt = bench.start()
            for _ in range(steps):
                await asyncio.sleep(0)
            await self._is_cancelled(bench, attempt)
            mark = bench.mark_of(attempt.job)
            end = await bench.ends_in_time(attempt.end(), "the cancelled attempt")
            assert isinstance(end, ServiceFailed), f"it is held and completed: {end!r}"
            assert end.failure.kind is FailureKind.INTERRUPTED, (
                f"a cancelled attempt is INTERRUPTED, not {end.failure}"
            )
            await bench.eventually(
                partial(self._is_over, bench, mark), "nothing of a cancelled job is left at the service"
            )

    async def test_a_cancel_of_what_is_over_or_unknown_touches_nobody(self, bench: ConnectorBench) -> None:
        done = bench.start()
        await done.result()
        stranger = None
        if ConnectorAbility.STRANGERS not in bench.scene.cannot:
            stranger = await self._held_stranger(bench)
        # Another agent may ask: only the attempt id of the job must be set.
        for job in (done.job, bench.job()):
            bare = msgspec.structs.replace(job, workflow={}, timeouts=type(job.timeouts)())
            end = await bench.ends_in_time(bench.connector.cancel_job(bare), "the cancel")
            assert end is None or isinstance(end, ServiceFailed), repr(end)
        assert list(bench.scene.runs(bench.mark_of(done.job))) == ["completed"]
        await self._completes(bench, stranger)

    async def _is_cancelled(self, bench: ConnectorBench, attempt: ConnectorAttempt) -> None:
        end = await bench.ends_in_time(bench.connector.cancel_job(attempt.job), "the cancel")
        assert end is None, f"the cancel of an attempt that can be stopped ends with {end!r}"

    def _is_over(self, bench: ConnectorBench, mark: int) -> bool:
        return not {"waiting", "running"} & set(bench.scene.runs(mark))

    async def _held_stranger(self, bench: ConnectorBench) -> int:
        await bench.scene.hold()
        mark = bench.new_mark()
        await bench.scene.start_stranger(mark)
        await bench.eventually(lambda: "running" in bench.scene.runs(mark), "the stranger's run begins")
        return mark

    async def _completes(self, bench: ConnectorBench, stranger: int | None) -> None:
        await bench.scene.release()
        if stranger is None:
            return
        await bench.within(bench.scene.patience_s, partial(self._is_over, bench, stranger))
        states = list(bench.scene.runs(stranger))
        assert states == ["completed"], f"the run of a stranger is {states}"


class ConnectorReturnContract:
    async def test_an_attempt_that_the_server_has_is_continued_by_the_next_agent(
        self, bench: ConnectorBench
    ) -> None:
        bench.needs(ConnectorAbility.CONTINUES)
        former = bench.scene.connect()
        await former.open()
        await bench.scene.hold()
        job = bench.job()
        mark = bench.mark_of(job)
        first = ConnectorAttempt(former, job)
        await bench.eventually(lambda: "running" in bench.scene.runs(mark), "the run begins")
        first.task.cancel()
        await asyncio.wait({first.task})
        await former.close()
        second = bench.start(job)
        await bench.scene.release()
        await bench.assert_made_from(await second.result(), job)
        assert bench.begun(job) == 1, "it ran again instead of being continued"

    async def test_an_attempt_that_has_ended_is_not_run_again(self, bench: ConnectorBench) -> None:
        bench.needs(ConnectorAbility.CONTINUES)
        job = bench.job()
        await bench.start(job).result()
        connector = bench.scene.connect()
        await connector.open()
        try:
            result = await ConnectorAttempt(connector, job).result()
            await bench.assert_made_from(result, job)
        finally:
            await connector.close()
        assert bench.begun(job) == 1, "it ran again, although the server has its result"

    async def test_a_cancelled_agent_returns_at_once_and_nothing_runs_twice(
        self, bench: ConnectorBench
    ) -> None:
        attempt = await bench.running()
        mark = bench.mark_of(attempt.job)
        attempt.task.cancel()
        done, _ = await asyncio.wait({attempt.task}, timeout=bench.scene.patience_s)
        assert done, "process_job does not end when its task is cancelled"
        assert attempt.task.cancelled(), f"a cancelled task ended with {attempt.task}"
        if ConnectorAbility.SURVIVES_AGENT not in bench.scene.cannot:
            assert list(bench.scene.runs(mark)) == ["running"], "the run ended with the agent's task"
        await bench.scene.release()
        if ConnectorAbility.SURVIVES_AGENT not in bench.scene.cannot:
            await bench.eventually(
                lambda: list(bench.scene.runs(mark)) == ["completed"], "the run goes on to its end"
            )
        assert bench.begun(mark) == 1

    async def test_a_run_goes_on_without_its_agent(self, bench: ConnectorBench) -> None:
        bench.needs(ConnectorAbility.SURVIVES_AGENT)
        attempt = await bench.running()
        attempt.task.cancel()
        await asyncio.wait({attempt.task})
        await bench.connector.close()
        mark = bench.mark_of(attempt.job)
        await bench.scene.release()
        await bench.eventually(lambda: "completed" in bench.scene.runs(mark), "the run goes on to its end")
        await bench.connector.open()

    async def test_the_state_of_an_attempt_is_told(self, bench: ConnectorBench) -> None:
        unknown = await bench.connector.reconcile(bench.job())
        assert (unknown.state, unknown.result) == ("unknown", None), (
            f"a job that the server does not know is 'unknown', not {unknown}"
        )
        attempt = await bench.running()
        running = (await bench.connector.reconcile(attempt.job)).state
        assert running == "running", f"`reconcile` tells a run as 'running', not {running!r}"
        await bench.scene.release()
        result = await attempt.result()
        found = await bench.connector.reconcile(attempt.job)
        assert found.state not in ("waiting", "running"), f"it has completed and counts as {found.state}"
        if ConnectorAbility.KEEPS_RESULTS not in bench.scene.cannot:
            assert found.state == "completed" and found.result is not None, (
                f"`reconcile` tells a run that completed as 'completed' with its result, not {found}"
            )
            assert {file.filename for file in found.result.files} == {file.filename for file in result.files}
        if found.result is not None:
            await bench.assert_made_from(found.result, attempt.job)

    async def test_a_result_is_found_by_an_agent_that_comes_back(self, bench: ConnectorBench) -> None:
        bench.needs(ConnectorAbility.KEEPS_RESULTS)
        job = bench.job()
        await bench.start(job).result()
        other = bench.scene.connect()
        await other.open()
        try:
            found = await other.reconcile(job)
            assert found.result is not None, f"the result is lost: {found.state}"
            await bench.assert_made_from(found.result, job)
        finally:
            await other.close()

    async def test_a_job_that_waits_is_told_as_waiting(self, bench: ConnectorBench) -> None:
        bench.needs(ConnectorAbility.STRANGERS, ConnectorAbility.WAITING)
        await bench.scene.hold()
        stranger = bench.new_mark()
        await bench.scene.start_stranger(stranger)
        await bench.eventually(lambda: "running" in bench.scene.runs(stranger), "the stranger's run begins")
        attempt = bench.start()
        mark = bench.mark_of(attempt.job)
        await bench.eventually(
            lambda: attempt.task.done() or "waiting" in bench.scene.runs(mark), "the job waits at the service"
        )
        if not attempt.task.done():
            waiting = (await bench.connector.reconcile(attempt.job)).state
            assert waiting == "waiting", f"`reconcile` tells a job that waits as 'waiting', not {waiting!r}"
            assert not attempt.has_heard(ProgressKind.STARTED), "a job that waits has not started"
        await bench.scene.release()
        end = await attempt.end()
        if isinstance(end, JobResult):
            await bench.assert_made_from(end, attempt.job)
        else:
            assert isinstance(end, ServiceBusy), f"a job that waited failed: {end.failure}"
            assert bench.begun(mark) == 0

    async def test_a_cancelled_run_counts_neither_as_running_nor_as_completed(
        self, bench: ConnectorBench
    ) -> None:
        bench.needs(ConnectorAbility.CANCEL_RUNNING)
        attempt = await bench.running()
        await bench.connector.cancel_job(attempt.job)
        await attempt.failure()
        found = await bench.connector.reconcile(attempt.job)
        assert found.state not in ("waiting", "running", "completed") and found.result is None, found

    def test_the_promise_and_the_abilities_agree(self, bench: ConnectorBench) -> None:
        if bench.scene.promise is DeliveryPromise.EXACTLY_ONCE:
            missing = {ConnectorAbility.CONTINUES, ConnectorAbility.KEEPS_RESULTS} & bench.scene.cannot.keys()
            assert not missing, f"exactly once cannot be promised without {sorted(missing)}"


class ConnectorInventoryContract:
    async def test_the_inventory_names_the_service_its_version_and_what_a_payload_needs(
        self, bench: ConnectorBench
    ) -> None:
        scene = bench.scene
        assert bench.connector.service_name == scene.service
        found = await bench.ends_in_time(bench.connector.inventory(), "the inventory")
        (service,) = (each for each in found.capabilities.services if each.name == scene.service)
        if ConnectorAbility.TELLS_VERSION not in scene.cannot:
            assert service.version, "the inventory tells no `Service.version`"
        msgspec.json.encode(found.capabilities)
        assert isinstance(found.boot, str)
        bench.assert_says_no_secret(found.capabilities, found.live, found.boot)
        if scene.payload_format is not None:
            assert scene.payload_format.service == scene.service
            reading = scene.payload_format.read(scene.payload(1001))
            assert service.models is not None or not reading.models, (
                "a payload needs models, and none are listed"
            )
            assert service.node_classes is not None or not reading.node_classes
            # Names with other separators would match no worker.
            assert reading.models <= (service.models or frozenset()), (
                f"models have the inventory's spelling, and {sorted(reading.models)} are not in it"
            )
            assert reading.node_classes <= (service.node_classes or frozenset())

    async def test_a_server_that_was_not_restarted_keeps_its_boot(self, bench: ConnectorBench) -> None:
        before = (await bench.connector.inventory()).boot
        await bench.start().result()
        assert (await bench.connector.inventory()).boot == before

    async def test_a_healthy_server_is_healthy_also_while_it_runs(self, bench: ConnectorBench) -> None:
        assert await bench.ends_in_time(bench.connector.check_health(), "the health check") is True
        attempt = await bench.running()
        assert await bench.ends_in_time(bench.connector.check_health(), "the health check") is True
        await bench.scene.release()
        await attempt.result()
