"""Whether an object that somebody made can be a store: its methods and parts are there and take what an engine gives
them. What the methods do, the contract of stores says (`comfyfleet.contract`)."""

from __future__ import annotations

import inspect
from typing import Any

from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.ports import Cabinet, ForeignWorkers, Records, Relay, Shares, Store

_PARTS: dict[str, type] = {"records": Records, "cabinet": Cabinet, "shares": Shares}
_OPTIONAL: dict[str, type] = {"foreign": ForeignWorkers, "relay": Relay}
_VALUES: dict[str, type] = {"epoch": int, "is_shared": bool}
_NEXT = (
    "Give a URL, such as sqlite:///fleet.db, or an object that passes the contract of stores (docs/stores.md)"
)


def checked_store(store: Store) -> Store:
    """Refuses what cannot be a store, and names what it lacks: better now than at the first job."""
    if isinstance(store, type):
        raise Refusal(
            RefusalCode.INVALID_REQUEST,
            f"{store.__name__} is a class and no store: make one of it, as in {store.__name__}(clock)",
        )
    lacking, wrong = _faults(store, Store, "")
    if lacking or wrong:
        told = ([f"it lacks {', '.join(lacking)}"] if lacking else []) + wrong
        raise Refusal(
            RefusalCode.INVALID_REQUEST, f"a {type(store).__name__} is no store: {'; '.join(told)}. {_NEXT}"
        )
    return store


def _faults(given: object, port: type, inside: str) -> tuple[list[str], list[str]]:
    lacking: list[str] = []
    wrong: list[str] = []
    for name in sorted(name for name in dir(port) if not name.startswith("_")):
        shown = inside + name
        try:
            found = getattr(given, name)
        except AttributeError:
            lacking.append(shown)
            continue
        except Exception as error:
            wrong.append(f"{shown} raises {type(error).__name__} ({error})")
            continue
        part = _PARTS.get(name, _OPTIONAL.get(name)) if port is Store else None
        if port is Store and name in _VALUES:
            if not isinstance(found, _VALUES[name]):
                wrong.append(f"{shown} is a {type(found).__name__} and not a {_VALUES[name].__name__}")
        elif part is None:
            wrong += _faults_of_method(found, getattr(port, name), shown)
        elif found is not None or name in _PARTS:
            inner_lacking, inner_wrong = _faults(found, part, f"{shown}.")
            lacking += inner_lacking
            wrong += inner_wrong
    return lacking, wrong


def _faults_of_method(found: Any, wanted: Any, shown: str) -> list[str]:
    if not callable(found):
        return [f"{shown} is no method"]
    parameters = list(inspect.signature(wanted).parameters.values())[1:]
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError):
        # Not every callable of C tells what it takes.
        return []
    given = [each for each in parameters if each.kind is not inspect.Parameter.KEYWORD_ONLY]
    named = {each.name: each for each in parameters if each.kind is inspect.Parameter.KEYWORD_ONLY}
    try:
        signature.bind(*given, **named)
    except TypeError:
        names = ", ".join(each.name for each in parameters)
        return [f"{shown} does not take ({names})"]
    return []
