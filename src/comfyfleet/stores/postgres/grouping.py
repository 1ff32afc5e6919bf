"""Calls of one kind that come while others are being answered are answered together, in one transaction.

Nobody waits for company: a call that comes alone goes alone. What a group does is the caller's; all of it happens or
nothing does. A caller that goes away before its group has begun is left out; after that its change may take place.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import Generic, TypeVar

from comfyfleet.model.errors import Refusal

Question = TypeVar("Question")
Answer = TypeVar("Answer")

MAX_GROUP = 64


class Groups(Generic[Question, Answer]):
    def __init__(self, answer: Callable[[Sequence[Question]], Awaitable[Sequence[Answer]]]) -> None:
        self._answer = answer
        self._waiting: dict[Hashable, list[tuple[Question, asyncio.Future[Answer]]]] = {}
        """By kind; a kind is here exactly while a task works for it."""
        self._tasks: set[asyncio.Task[None]] = set()

    async def ask(self, kind: Hashable, question: Question) -> Answer:
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        waiting = self._waiting.get(kind)
        if waiting is None:
            self._waiting[kind] = [(question, answer)]
            task = asyncio.create_task(self._work(kind), name="comfyfleet-postgres-group")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        else:
            waiting.append((question, answer))
        return await answer

    async def _work(self, kind: Hashable) -> None:
        try:
            while waiting := self._waiting[kind]:
                group = [each for each in waiting[:MAX_GROUP] if not each[1].done()]
                self._waiting[kind] = waiting[MAX_GROUP:]
                if group:
                    await self._answer_group(group)
        finally:
            for _, answer in self._waiting.pop(kind):
                answer.cancel()

    async def _answer_group(self, group: Sequence[tuple[Question, asyncio.Future[Answer]]]) -> None:
        try:
            answers = await self._answer([question for question, _ in group])
        # Whatever it was, it is the callers' to hear of.
        except Exception as error:
            if isinstance(error, Refusal) and len(group) > 1:
                # Somebody asked for what cannot be: only he is refused, and the others are answered one by one.
                for each in group:
                    await self._answer_group([each])
                return
            for _, waiter in group:
                if not waiter.done():
                    waiter.set_exception(error)
            return
        except asyncio.CancelledError:
            for _, waiter in group:
                waiter.cancel()
            raise
        for (_, waiter), answer in zip(group, answers, strict=True):
            if not waiter.done():
                waiter.set_result(answer)

    async def close(self) -> None:
        """What was begun is finished."""
        await asyncio.gather(*self._tasks)
