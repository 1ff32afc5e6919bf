"""Moves failure texts from the central store to the tenant database.

Workers that cannot reach tenant databases leave the texts in a collection of the central store. Two hubs may
move the same text at once.
"""

from __future__ import annotations

import logging
from collections.abc import Collection

from comfyfleet.model.errors import Fault
from comfyfleet.model.failure import FailureText
from comfyfleet.ports import Store
from comfyfleet.stores.failure_texts import COLLECTION, PendingFailureText, left_in
from comfyfleet.tenancy.tenants import TenantDirectory

_LOG = logging.getLogger(__name__)
_TEXTS_PAGE = 100


class PendingFailureTexts:
    def __init__(self, central: Store, homes: TenantDirectory) -> None:
        self._central = central
        self._homes = homes

    async def of(self, attempt_ids: Collection[str]) -> dict[str, FailureText]:
        """The texts that are still in the central store."""
        found: dict[str, FailureText] = {}
        for each in attempt_ids:
            document = await self._central.documents.get(COLLECTION, each)
            if document is not None and (left := left_in(document.body)) is not None:
                found[each] = left.text
        return found

    async def take(self, attempt_ids: Collection[str]) -> None:
        """Call this before the round ends: afterwards the tenant database accepts no more texts for it."""
        for each in attempt_ids:
            document = await self._central.documents.get(COLLECTION, each)
            if document is not None and (left := left_in(document.body)) is not None:
                await self._take(document.name, left)

    async def take_all(self) -> None:
        """Leaves texts that are unreadable or whose tenant database is unreachable."""
        after = ""
        while self._central.is_shared:
            page = await self._central.documents.listing(COLLECTION, after, _TEXTS_PAGE)
            for document in page:
                after = document.name
                left = left_in(document.body)
                if left is None:
                    _LOG.info("the failure text of attempt %s is unreadable", after)
                    continue
                try:
                    tenant = await self._homes.tenants.get(left.tenant)
                    if tenant is None or not self._homes.pools.is_away(tenant.pool):
                        await self._take(after, left)
                except Fault as fault:
                    _LOG.info("cannot move the failure text of attempt %s, will retry: %s", after, fault)
            if len(page) < _TEXTS_PAGE:
                return

    async def _take(self, attempt_id: str, left: PendingFailureText) -> None:
        home = await self._homes.of(left.tenant) or await self._homes.newest(left.tenant)
        if home is not None and not await home.database.keep_failure(
            left.hold_id, attempt_id, left.text, left.at
        ):
            newest = await self._homes.tenants.newest(left.tenant)
            if newest is not None and newest.pool != home.tenant.pool:
                return  # The tenant has just moved: the next run finds it there.
            _LOG.info("the failure text of attempt %s is dropped: its round has ended", attempt_id)
        await self._central.documents.remove(COLLECTION, attempt_id)
