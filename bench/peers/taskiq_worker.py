"""What taskiq's own worker imports: the broker on Redis streams, which acknowledges what was executed, and the task."""

from __future__ import annotations

from taskiq_redis import RedisStreamBroker

from bench.peers._told import Notes

notes = Notes()
broker = RedisStreamBroker(notes.url)


async def work(text: str, sent: float) -> None:
    assert text
    notes.note(sent)


task = broker.register_task(work, task_name="work")
