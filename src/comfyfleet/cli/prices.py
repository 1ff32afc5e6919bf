"""What is said of a tenant on the command line: its price in short or as JSON, and the other terms."""

from __future__ import annotations

from typing import Any

import click

_SHORT = (
    'flat:5, output:EACH:MOST, gpu_second:EACH:MOST, none, or JSON such as \'{"by": "flat", "credits": 5}\''
)


NO_PRICE = "none"


class PriceType(click.ParamType[Any]):
    """`NO_PRICE` stands for none, None for one that was not given."""

    name = "price"

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> Any:
        import msgspec

        from comfyfleet.model.ledger import Price

        try:
            return NO_PRICE if value == NO_PRICE else msgspec.convert(_spoken(value), Price)
        except (msgspec.MsgspecError, ValueError) as error:
            self.fail(f"{value!r} is no price ({error}): write {_SHORT}", parameter, context)


def _spoken(text: str) -> Any:
    import msgspec

    if text.lstrip().startswith("{"):
        return msgspec.json.decode(text)
    kind, *numbers = text.split(":")
    if not all(each.isdecimal() for each in numbers):
        raise ValueError("credits are whole numbers, 0 or more")
    amounts = [int(each) for each in numbers]
    match kind, amounts:
        case "flat", [amount]:
            return {"by": kind, "credits": amount}
        case "output", [each, most]:
            return {"by": kind, "credits_each": each, "most_outputs": most}
        case "gpu_second", [each, most]:
            return {"by": kind, "credits_per_second": each, "most_seconds": most}
    raise ValueError("there is no such kind, or it takes other numbers")


def price_text(price: Any) -> str:
    """As it may be given again."""
    import msgspec

    from comfyfleet.model.ledger import FlatPrice, GpuPrice, OutputPrice

    match price:
        case None:
            return NO_PRICE
        case FlatPrice(credits=amount):
            return f"flat:{amount}"
        case OutputPrice(credits_each=each, most_outputs=most, base=0):
            return f"output:{each}:{most}"
        case GpuPrice(credits_per_second=each, most_seconds=most, base=0):
            return f"gpu_second:{each}:{most}"
    return msgspec.json.encode(price).decode()
