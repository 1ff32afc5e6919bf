"""How many deliveries of each tenant wait to be sent, as they were counted a moment ago.

Whoever has too many waiting brings no more: its receivers are away, and what waits is kept for days. The count is made
from what is due, so it needs nothing written, and is allowed a small share of the time. What is too many is policy's.
"""

from __future__ import annotations

import asyncio
from collections import Counter

from comfyfleet.model.ids import TenantId
from comfyfleet.policy.delivering import check_pending
from comfyfleet.tenancy.deliveries import Deliveries

_EVERY_S = 5.0
_SHARE = 20
"""After a count that took long, so many times as long until the next."""
_PAGE = 1_000


class Pending:
    def __init__(self, book: Deliveries, most: int) -> None:
        self._book = book
        self._most = most
        self._by_owner: Counter[str] = Counter()
        self._count_at = float("-inf")

    def check(self, tenant: TenantId) -> None:
        check_pending(self._by_owner[tenant], self._most)

    async def count(self) -> None:
        """If it is time."""
        loop = asyncio.get_running_loop()
        began_at = loop.time()
        if began_at < self._count_at:
            return
        found: Counter[str] = Counter()
        after = ""
        while True:
            page = await self._book.due(after, _PAGE)
            found.update(entry.owner for entry in page)
            if len(page) < _PAGE:
                break
            after = page[-1].name
        self._by_owner = found
        ended_at = loop.time()
        self._count_at = ended_at + max(_EVERY_S, _SHARE * (ended_at - began_at))
