"""An engine process: an `Engine` on the store of the run, with both its doors on a socket."""

from __future__ import annotations

from chaos.bridge import BridgeServer
from chaos.logs import Log
from chaos.setting import Setting, opened_engine, play


def engine_process(setting: Setting, who: str, number: int) -> None:
    play(setting, who, _serve(setting, who, number))


async def _serve(setting: Setting, who: str, number: int) -> None:
    log = Log(setting.logs, who)
    async with opened_engine(setting) as engine:
        log.write("ready", role="engine")
        await BridgeServer(engine, setting.socket(number)).serve()
