"""Runs a fake Comfy Cloud account until Ctrl-C: `python -m comfyfleet.testing.fake_comfy_cloud`."""

from __future__ import annotations

import argparse
import asyncio
import sys
from contextlib import suppress

from comfyfleet.testing.fake_comfy_cloud.server import FakeComfyCloud
from comfyfleet.testing.fake_comfy_cloud.settings import PLANS, FakeCloudSettings


async def _serve(settings: FakeCloudSettings, port: int) -> None:
    fake = FakeComfyCloud(settings)
    try:
        await fake.start(port=port)
        sys.stdout.write(
            f"{fake.url}  fake Comfy Cloud, plan {settings.plan}, {settings.credits:g} credits, key {settings.key}\n"
            "Ctrl-C stops.\n"
        )
        sys.stdout.flush()
        await asyncio.Event().wait()
    finally:
        await fake.stop()
        stats = fake.stats
        sys.stdout.write(f"{len(stats.jobs_made)} jobs, {stats.charged:g} credits charged\n")


def main() -> None:
    parser = argparse.ArgumentParser(prog="comfyfleet.testing.fake_comfy_cloud", description=__doc__)
    parser.add_argument("--port", type=int, default=8400, help="default: 8400; 0 takes a free one")
    parser.add_argument("--plan", choices=sorted(PLANS), default="creator")
    parser.add_argument("--credits", type=float, default=1000.0)
    given = parser.parse_args()
    with suppress(KeyboardInterrupt):
        asyncio.run(_serve(FakeCloudSettings(plan=given.plan, credits=given.credits), given.port))


if __name__ == "__main__":
    main()
