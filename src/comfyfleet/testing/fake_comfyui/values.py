"""The values on the links of a simulated graph.

They stand in for tensors and models: they have a size and a look, but no pixels. `pictures` draws them.
"""

from __future__ import annotations

import msgspec


class FakeImage(msgspec.Struct, frozen=True, kw_only=True):
    """A batch of pictures: plain colour, or a pattern that depends on `seed`, or the bytes of a file."""

    width: int
    height: int
    batch: int = 1
    color: int = 0
    seed: int | None = None
    source: bytes | None = None
    is_inverted: bool = False

    def __str__(self) -> str:
        red, green, blue = ((self.color >> shift & 255) / 255 for shift in (16, 8, 0))
        size = f"({self.batch}, {self.height}, {self.width}, 3)"
        return f"tensor([[[[{red:.4f}, {green:.4f}, {blue:.4f}], ..., size={size}]]]])"


class FakeLatent(msgspec.Struct, frozen=True, kw_only=True):
    """A batch of latent images, measured in the pixels they will decode to."""

    width: int
    height: int
    batch: int = 1
    seed: int = 0

    @property
    def megapixels(self) -> float:
        return self.width * self.height * self.batch / 1_000_000

    def __str__(self) -> str:
        return f"{{'samples': tensor([..., size=({self.batch}, 4, {self.height // 8}, {self.width // 8})])}}"


class FakeModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model file, with the LoRA files applied to it."""

    folder: str
    name: str
    size_gb: float
    loras: tuple[tuple[str, float], ...] = ()

    @property
    def key(self) -> str:
        return f"{self.folder}/{self.name}"

    def parts(self) -> dict[str, float]:
        """Every file that has to be on the card, with its size."""
        return {self.key: self.size_gb, **{f"loras/{name}": size for name, size in self.loras}}


class FakeConditioning(msgspec.Struct, frozen=True):
    """An encoded text."""

    text: str


class FakeAudio(msgspec.Struct, frozen=True, kw_only=True):
    """Silence."""

    seconds: float
    sample_rate: int
    channels: int


class FakeVideo(msgspec.Struct, frozen=True, kw_only=True):
    """A sequence of pictures."""

    images: FakeImage
    frame_rate: float


class Anything(msgspec.Struct, frozen=True):
    """The output of a class the fake knows only by its declaration."""

    type: str


class Blocker(msgspec.Struct, frozen=True):
    """Stops every node that it reaches. With a message, the client gets it once."""

    message: str | None
