"""Moves failure texts from the central store to the tenant database.

Workers that cannot reach tenant databases leave the texts in a collection of the central store. Two hubs may
move the same text at once.
"""

from __future__ import annotations

import logging
from collections.abc import Collection

from comfyfleet.model.errors import Fault
from comfyfleet.model.failure import FailureText
from comfyfleet.paginator import documents_in
from comfyfleet.ports import Store
from comfyfleet.stores.failure_texts import COLLECTION, PendingFailureText, left_in
from comfyfleet.tenancy.tenants import TenantDirectory

_LOG = logging.getLogger(__name__)


class PendingFailureTexts:
    def __init__(self, central: Store, directory: TenantDirectory) -> None:
        self._central = central
        self._homes = directory

    async def get_many(self, attempt_ids: Collection[str]) -> dict[str, FailureText]:
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
        if not self._central.is_shared:
            return
        async for document in documents_in(self._central.documents, COLLECTION):
            attempt_id, left = document.name, left_in(document.body)
            if left is None:
                _LOG.info("the failure text of attempt %s is unreadable", attempt_id)
                continue
            try:
                tenant = await self._homes.tenants.get(left.tenant)
                if tenant is None or not self._homes.databases.is_unreachable(tenant.database):
                    await self._take(attempt_id, left)
            except Fault as fault:
                _LOG.info("cannot move the failure text of attempt %s, will retry: %s", attempt_id, fault)

    async def _take(self, attempt_id: str, left: PendingFailureText) -> None:
        home = await self._homes.locate(left.tenant) or await self._homes.locate_uncached(left.tenant)
        if home is not None and not await home.database.save_failure(
            left.hold_id, attempt_id, left.text, left.at
        ):
            newest = await self._homes.tenants.get_uncached(left.tenant)
            if newest is not None and newest.database != home.tenant.database:
                return  # The tenant has just moved: the next run finds it there.
            _LOG.info("the failure text of attempt %s is dropped: its round has ended", attempt_id)
        await self._central.documents.remove(COLLECTION, attempt_id)
