"""TextMill: rewrites texts, one at a time. It stands for any service with an HTTP API.

python -m textmill.service --port 9000

GET    /info        {"version", "boot", "styles"}
PUT    /jobs/ID     {"style", "text"} starts a job. A repeated PUT of the same ID starts nothing.
GET    /jobs/ID     {"state": waiting | running | done | failed | stopped, "progress", "text", "error"}
DELETE /jobs/ID     stops that job and answers as GET does when it is over
"""

from __future__ import annotations

import argparse
import asyncio
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from aiohttp import web

STYLES: dict[str, Callable[[str], str]] = {
    "shout": str.upper,
    "whisper": str.lower,
    "mirror": lambda it: it[::-1],
}
STEPS = 4


@dataclass
class Job:
    style: str
    text: str
    state: str = "waiting"
    done: float = 0.0
    result: str = ""
    error: str = ""
    over: asyncio.Event = field(default_factory=asyncio.Event)

    def end(self, state: str) -> None:
        self.state = state
        self.over.set()

    def answer(self) -> web.Response:
        told = {"state": self.state, "progress": self.done, "text": self.result, "error": self.error}
        return web.json_response(told)


class TextMill:
    def __init__(self, step_seconds: float = 0.25) -> None:
        self.boot = uuid.uuid4().hex
        self.styles = dict(STYLES)
        self.jobs: dict[str, Job] = {}
        # Tests clear these: no job starts, or a running one waits half-way.
        self.may_start, self.may_run = asyncio.Event(), asyncio.Event()
        self.may_start.set()
        self.may_run.set()
        self._step_seconds = step_seconds
        self._queue: asyncio.Queue[Job] = asyncio.Queue()

    def app(self) -> web.Application:
        app = web.Application()
        app.add_routes(
            [
                web.get("/info", self.get_info),
                web.put("/jobs/{id}", self.put_job),
                web.get("/jobs/{id}", self.get_job),
                web.delete("/jobs/{id}", self.delete_job),
                web.delete("/running", self.delete_running),
            ]
        )
        app.cleanup_ctx.append(self._working)
        return app

    async def get_info(self, _request: web.Request) -> web.Response:
        return web.json_response({"version": "1.2", "boot": self.boot, "styles": sorted(self.styles)})

    async def put_job(self, request: web.Request) -> web.Response:
        name = request.match_info["id"]
        if name not in self.jobs:
            body = await request.json()
            if body["style"] not in self.styles:
                return web.json_response({"error": f"there is no style {body['style']!r}"}, status=422)
            self.jobs[name] = Job(body["style"], body["text"])
            self._queue.put_nowait(self.jobs[name])
        return self.jobs[name].answer()

    async def get_job(self, request: web.Request) -> web.Response:
        job = self.jobs.get(request.match_info["id"])
        return web.json_response({"error": "unknown job"}, status=404) if job is None else job.answer()

    async def delete_job(self, request: web.Request) -> web.Response:
        job = self.jobs.get(request.match_info["id"])
        if job is None:
            return web.json_response({"error": "unknown job"}, status=404)
        if not job.over.is_set():
            job.end("stopped")
        return job.answer()

    async def delete_running(self, _request: web.Request) -> web.Response:
        for job in self.jobs.values():
            if job.state == "running":
                job.end("stopped")
        return web.json_response({})

    async def _working(self, _app: web.Application) -> AsyncIterator[None]:
        worker = asyncio.create_task(self._work())
        yield
        worker.cancel()

    async def _work(self) -> None:
        while True:
            job = await self._queue.get()
            await self.may_start.wait()
            if job.over.is_set():
                continue
            job.state = "running"
            run = asyncio.create_task(self._run(job))
            stopped = asyncio.create_task(job.over.wait())
            await asyncio.wait({run, stopped}, return_when=asyncio.FIRST_COMPLETED)
            run.cancel()
            stopped.cancel()

    async def _run(self, job: Job) -> None:
        for step in range(1, STEPS + 1):
            await asyncio.sleep(self._step_seconds)
            job.done = step / STEPS
            if step == STEPS // 2:
                await self.may_run.wait()
        try:
            job.result = self.styles[job.style](job.text)
            job.end("done")
        except Exception as error:
            job.error = f"{type(error).__name__}: {error}"
            job.end("failed")


def main() -> None:
    parser = argparse.ArgumentParser(description="A small text service.")
    parser.add_argument("--port", type=int, default=9000)

    async def made() -> web.Application:
        return TextMill().app()

    web.run_app(made(), host="127.0.0.1", port=parser.parse_args().port)


if __name__ == "__main__":
    main()
