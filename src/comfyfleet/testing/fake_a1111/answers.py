"""The error bodies of the A1111 family, which differ from flavour to flavour."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from comfyfleet.testing.fake_a1111.settings import A1111Flavour


def http_error(flavour: A1111Flavour, status: int, detail: str) -> web.Response:
    """What the server answers to a request that it refuses itself."""
    if flavour == "forge":
        return web.json_response({"detail": detail}, status=status)
    body: dict[str, Any] = {"error": "HTTPException", "detail": detail, "body": "", "errors": ""}
    if flavour == "sdnext":
        body["code"] = status
    return web.json_response(body, status=status)


def run_error(flavour: A1111Flavour, name: str, text: str) -> web.Response:
    """An exception inside a run."""
    body: dict[str, Any] = {"error": name, "detail": "", "body": ""}
    body["message" if flavour == "forge" else "errors"] = text
    if flavour == "sdnext":
        body["code"] = 500
    return web.json_response(body, status=500)
