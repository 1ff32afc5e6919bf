"""Two stages at a hub: a picture from a text, then made larger by a second job that takes what the first left.

comfyfleet up --fake 2 --open               # in another terminal; with real servers leave out --fake 2
python examples/hub_two_stages.py [PICTURE] # with a picture of your own, that one is made larger

Both jobs are submitted at once. The second waits for the first, may run on another worker, and gets its picture from
the hub. Where and with which key: COMFYFLEET_HUB (http://127.0.0.1:3001) and COMFYFLEET_KEY (none).
"""

import os
import sys
from pathlib import Path

from comfyfleet import Fault, Refusal, SyncFleetClient

WORKFLOWS = Path(__file__).parent / "workflows"


def main(pictures: list[str]) -> int:
    hub = os.environ.get("COMFYFLEET_HUB", "http://127.0.0.1:3001")
    with SyncFleetClient(hub, os.environ.get("COMFYFLEET_KEY")) as client:
        if pictures:
            last = client.submit(WORKFLOWS / "upscale.json", attach={"10.image": pictures[0]})
        else:
            first = client.submit(WORKFLOWS / "text_to_image.json")
            taken = {"job": first.id, "output": "9", "node": "10", "input": "image"}
            last = client.submit(WORKFLOWS / "upscale.json", inputs=[taken])
            print(f"job {last.id} waits for {first.id}")
        ended = client.wait(last.id, timeout=600)
        if ended.result is None:
            print(ended.error.message if ended.error else ended.status, file=sys.stderr)
            return 1
        for file in ended.result.files:
            # Its server chose the name: a folder in it is not for us to follow.
            name = Path(file.filename).name
            Path(name).write_bytes(client.fetch(file))
            print(f"saved {name}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except Refusal as refusal:
        sys.exit(f"refused: {refusal}")
    except Fault as fault:
        sys.exit(str(fault))
