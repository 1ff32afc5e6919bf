"""The operators' handlers of what was found between the store and tenants' databases."""

from __future__ import annotations

from comfyfleet.hub.door import Call, Handler, Reply
from comfyfleet.tenancy.reconciler import Reconciler
from comfyfleet.wire.reconciling import finding_list, finding_view


class ReconcileHandlers:
    def __init__(self, reconciler: Reconciler) -> None:
        self._reconciler = reconciler

    def bound(self) -> dict[str, Handler]:
        return {"look_for_differences": self.look, "reconcile": self.reconcile}

    async def look(self, call: Call[None]) -> Reply:
        return await self._found(is_dry=True)

    async def reconcile(self, call: Call[None]) -> Reply:
        return await self._found(is_dry=False)

    async def _found(self, *, is_dry: bool) -> Reply:
        views = (
            finding_view(each.kind.value, each.tenant, each.message, each.kind.mends_itself, each.hold_id)
            for each in await self._reconciler.reconcile(is_dry=is_dry)
        )
        return Reply(200, finding_list(views, is_mended=not is_dry))
