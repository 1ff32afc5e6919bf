"""What workers without a way to tenants' databases reported of failures: a hub takes it from the central store's drawer
to where it belongs. Two hubs may do the same at once."""

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
        """Those that are still in the drawer."""
        found: dict[str, FailureText] = {}
        for each in attempt_ids:
            document = await self._central.documents.get(COLLECTION, each)
            if document is not None and (left := left_in(document.body)) is not None:
                found[each] = left.text
        return found

    async def take(self, attempt_ids: Collection[str]) -> None:
        """Before their round ends: afterwards its tenant's database takes nothing more of it."""
        for each in attempt_ids:
            document = await self._central.documents.get(COLLECTION, each)
            if document is not None and (left := left_in(document.body)) is not None:
                await self._take(document.name, left)

    async def take_all(self) -> None:
        """Those of tenants whose database is away stay where they are, and those that cannot be read."""
        after = ""
        while self._central.is_shared:
            page = await self._central.documents.listing(COLLECTION, after, _TEXTS_PAGE)
            for document in page:
                after = document.name
                left = left_in(document.body)
                if left is None:
                    _LOG.info("what was said of %s cannot be read", after)
                    continue
                try:
                    tenant = await self._homes.tenants.get(left.tenant)
                    if tenant is None or not self._homes.pools.is_away(tenant.pool):
                        await self._take(after, left)
                except Fault as fault:
                    _LOG.info("what was said of %s goes to its tenant's database later: %s", after, fault)
            if len(page) < _TEXTS_PAGE:
                return

    async def _take(self, attempt_id: str, left: PendingFailureText) -> None:
        home = await self._homes.of(left.tenant) or await self._homes.newest(left.tenant)
        if home is not None and not await home.database.keep_failure(
            left.hold_id, attempt_id, left.text, left.at
        ):
            newest = await self._homes.tenants.newest(left.tenant)
            if newest is not None and newest.pool != home.tenant.pool:
                return  # It has just moved: the next look finds it there.
            _LOG.info("what was said of %s is not kept: its round is over", attempt_id)
        # Of a tenant that was deleted nothing is kept.
        await self._central.documents.remove(COLLECTION, attempt_id)
