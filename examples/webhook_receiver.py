"""A receiver of webhooks with nothing but the standard library: verifies each delivery, drops repeats, prints the rest.

    comfyfleet webhook secret                                  # whsec_…, shown once
    WEBHOOK_SECRET=whsec_… python examples/webhook_receiver.py --port 9000
    comfyfleet submit workflow.json --webhook http://127.0.0.1:9000/

A hub calls private addresses only where its operator allows it: `comfyfleet up --webhook-allow 127.0.0.1`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections import OrderedDict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from comfyfleet import Refusal, verify_webhook

MAX_BODY_BYTES = 1024 * 1024
REMEMBERED = 10_000

secret = os.environ.get("WEBHOOK_SECRET", "")
seen: OrderedDict[str, None] = OrderedDict()
"""Ids of deliveries that were dealt with. A real receiver keeps them with what it does, in one transaction."""


class Receiver(BaseHTTPRequestHandler):
    timeout = 10
    """In seconds: whoever sends no more is not waited for."""

    def do_POST(self) -> None:
        length = self.headers.get("content-length", "")
        size = int(length) if length.isdecimal() and len(length) < 10 else -1
        if not 0 <= size <= MAX_BODY_BYTES:
            # Anybody can send anything here: less than nothing would be read as everything.
            self.answer(413)
            return
        # Exactly the bytes that came: a body that was parsed and written again has another signature.
        body = self.rfile.read(size)
        try:
            event = verify_webhook(body, dict(self.headers.items()), secret)
        except Refusal as refusal:
            print(f"refused: {refusal.message}", flush=True)
            self.answer(401)
            return
        if event.id in seen:
            print(f"again: {event.id}", flush=True)
        else:
            seen[event.id] = None
            if len(seen) > REMEMBERED:
                seen.popitem(last=False)
            print(f"{event.type} {event.data['id']}", flush=True)
        # At once: whoever has much to do puts it into a queue of its own first, or it is sent again.
        self.answer(204)

    def answer(self, status: int) -> None:
        self.send_response(status)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Every delivery has its line already."""


def main() -> None:
    arguments = argparse.ArgumentParser(description="Prints the webhooks of a ComfyFleet hub.")
    arguments.add_argument("--host", default="127.0.0.1")
    arguments.add_argument("--port", type=int, default=9000, help="0 takes a free one")
    given = arguments.parse_args()
    if not secret:
        sys.exit("WEBHOOK_SECRET is not set: make a secret with `comfyfleet webhook secret`")
    with ThreadingHTTPServer((given.host, given.port), Receiver) as server:
        print(f"listening at http://{given.host}:{server.server_address[1]}/", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()


if __name__ == "__main__":
    main()
