"""A fake server of the A1111 family that behaves like a real one on the wire and needs no torch.

`FakeA1111` speaks the API of stable-diffusion-webui and its relatives: the lock, the task ids, the flags of the whole
server and their traps. Its pictures are drawn from the request. It needs Pillow: `pip install 'comfyfleet[fake]'`.
"""

from comfyfleet.testing.fake_a1111.faults import A1111Faults
from comfyfleet.testing.fake_a1111.pictures import FakeSubject, drawn_pixels, pixels_of
from comfyfleet.testing.fake_a1111.server import FakeA1111
from comfyfleet.testing.fake_a1111.settings import FakeA1111Settings, FakeCheckpoint
from comfyfleet.testing.fake_a1111.tasks import FakeA1111Run

__all__ = [
    "A1111Faults",
    "FakeA1111",
    "FakeA1111Run",
    "FakeA1111Settings",
    "FakeCheckpoint",
    "FakeSubject",
    "drawn_pixels",
    "pixels_of",
]
