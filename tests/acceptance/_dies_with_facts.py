"""A hub that is killed after the end of a job was written and before anybody was told of it.

Arguments: the URL of a store, the URL of a receiver. Prints the id of the job and kills itself.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys

from tests.hub._hub import hub_in_process
from tests.hub._watching import complete, lease, register

from comfyfleet.net.url_guard import AllowedHosts, UrlGuard


async def main(store_url: str, receiver: str) -> None:
    # Not on a port, so that nothing is sent: the hub takes the job and writes its facts, and that is all it comes to.
    async with hub_in_process(store_url=store_url, guard=UrlGuard(AllowedHosts(["127.0.0.1"]))) as rig:
        await register(rig)
        job_id = await rig.submit(webhook=receiver)
        await complete(rig, await lease(rig))
        print(job_id, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
