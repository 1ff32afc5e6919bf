"""The fake Comfy Cloud account: starts and stops its two origins, and plays other users of the account."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

from aiohttp import web

from comfyfleet.testing.fake_comfy_cloud.jobs import CloudJob, CloudJobs
from comfyfleet.testing.fake_comfy_cloud.routes import CloudRoutes
from comfyfleet.testing.fake_comfy_cloud.settings import CloudFaults, CloudStats, FakeCloudSettings
from comfyfleet.testing.fake_comfyui.faults import Faults
from comfyfleet.testing.fake_comfyui.pictures import require_pillow


class FakeComfyCloud:
    """Use it as an async context manager. `faults` may change at any time; `stats` counts jobs and credits."""

    def __init__(
        self, settings: FakeCloudSettings | None = None, *, faults: CloudFaults | None = None
    ) -> None:
        self.settings = settings if settings is not None else FakeCloudSettings()
        self.faults = faults if faults is not None else CloudFaults()
        self.stats = CloudStats()
        self._host = "127.0.0.1"
        self._port = 0
        self._jobs: CloudJobs | None = None
        self._runners: list[web.AppRunner] = []

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop()

    @property
    def url(self) -> str:
        return f"http://{self._host}:{self._port}"

    @property
    def jobs(self) -> dict[str, CloudJob]:
        """All jobs of the account, the oldest first."""
        return self._account.jobs

    @property
    def credits(self) -> float:
        return self._account.credits

    @property
    def card_faults(self) -> Faults:
        """Faults of the cards that run the graphs, as of the fake ComfyUI."""
        return self._account.card_faults

    @property
    def port(self) -> int:
        return self._port

    @property
    def _account(self) -> CloudJobs:
        if self._jobs is None:
            raise RuntimeError(
                "the fake Comfy Cloud has no account before it was started: await start() first"
            )
        return self._jobs

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> None:
        """Starts to listen; port 0 takes a free one. Does nothing if it already listens."""
        if self._runners:
            return
        require_pillow()
        self._host = host
        self._jobs = CloudJobs(self.settings, self.faults, self.stats)
        routes = CloudRoutes(self.settings, self.faults, self.stats, self._jobs)
        storage_port = await self._listen(routes.storage(), 0)
        routes.storage_url = f"http://{host}:{storage_port}"
        self._jobs.start()
        self._port = await self._listen(routes.app(), port)

    async def _listen(self, app: web.Application, port: int) -> int:
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.01)
        await runner.setup()
        self._runners.append(runner)
        await web.TCPSite(runner, self._host, port, reuse_address=True).start()
        number: int = runner.addresses[0][1]
        return number

    async def stop(self) -> None:
        """May be called twice."""
        runners, self._runners = self._runners, []
        for runner in runners:
            await runner.cleanup()
        if self._jobs is not None:
            await self._jobs.stop()

    def give_credits(self, amount: float) -> None:
        self._account.credits += amount

    def submit_as_other(self, graph: dict[str, Any]) -> CloudJob:
        """A job of another user or program of the same account."""
        return self._account.submit(graph, is_ours=False)

    def cancel_as_other(self, job_id: str) -> None:
        self._account.cancel(self._account.jobs[job_id])

    def let_start(self) -> None:
        """Starts waiting jobs after `never_starts` was switched off."""
        self.faults.never_starts = False
        self._account.dispatch()
