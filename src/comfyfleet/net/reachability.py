"""Explains why an HTTP request failed: the cause, and what to check next.

The client, the workers and the ComfyUI connector use it. The explanation contains no URL, so it can be shown
to people who must not know it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import ssl
from collections.abc import Mapping
from typing import Any

import aiohttp
import msgspec

from comfyfleet.model.errors import Fault

_REFUSED = "connection refused. Is {what} running there, and is the port right?"
_UNKNOWN_NAME = "the host name is unknown ({why}). Is it spelled right?"
_NO_CONNECTION = "no connection in time. Is the machine on, and does a firewall let this one through?"
_PLAIN_THERE = "TLS fails ({why}). Is it http:// there?"
_TLS_THERE = "the connection was closed without an answer. Is it https:// there?"
_NO_TRUST = "its certificate is not trusted ({why}). Name one to trust{option}"

_PROBLEM = "urn:comfyfleet:problem:"
_POLL_S = 3.0
_LOOK_BYTES = 1 << 20


def cause_of(error: Exception, url: str, what: str, trust_option: str = "") -> str:
    """Explains an error of aiohttp or the system during a request to `url`, where `what` should answer."""
    match error:
        case aiohttp.ClientConnectorCertificateError():
            return _NO_TRUST.format(why=_certificate_text(error.certificate_error), option=trust_option)
        case aiohttp.ClientConnectorError():
            return _system_cause(error.os_error, what, trust_option)
        case aiohttp.ConnectionTimeoutError():
            return _NO_CONNECTION
        case TimeoutError():
            return f"no answer in time. Is {what} there, and not too busy?"
        case aiohttp.ServerDisconnectedError() | ConnectionResetError() if url.startswith("http://"):
            # A TLS port answers plain HTTP like this.
            return _TLS_THERE
        case aiohttp.ClientResponseError():
            # The full text would show the request with its credentials.
            return f"what answers does not speak HTTP ({error.message})"
        case aiohttp.ClientOSError() | OSError():
            return f"the connection was lost ({_system_text(error)})"
        case _:
            return f"the connection was lost ({str(error) or type(error).__name__})"


def _system_cause(error: OSError, what: str, trust_option: str) -> str:
    match error:
        case ssl.SSLCertVerificationError():
            return _NO_TRUST.format(why=error.verify_message, option=trust_option)
        case ssl.SSLError():
            return _PLAIN_THERE.format(why=error.reason)
        case socket.gaierror():
            return _UNKNOWN_NAME.format(why=error.strerror)
        case _ if error.errno == errno.ECONNREFUSED or isinstance(error, ConnectionRefusedError):
            return _REFUSED.format(what=what)
        case _ if error.errno == errno.ETIMEDOUT:
            return _NO_CONNECTION
        case _ if error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH):
            return f"no route to the host ({_system_text(error)}). Is the machine on, and in this network?"
        case _:
            return _system_text(error)


def _system_text(error: Exception) -> str:
    """Only for system errors: TLS and name resolution have other error numbers."""
    number = getattr(error, "errno", None)
    return str(error) or type(error).__name__ if number is None else os.strerror(number)


def _certificate_text(error: Exception) -> str:
    return error.verify_message if isinstance(error, ssl.SSLCertVerificationError) else str(error)


def is_hubs(body: Any) -> bool:
    """Whether an answer is a problem document of a hub."""
    return isinstance(body, Mapping) and str(body.get("type", "")).startswith(_PROBLEM)


class WrongAddress(Fault):
    """Something else than a hub answers there; trying again does not help."""


async def not_a_hub(session: aiohttp.ClientSession, url: str, status: int) -> Fault:
    """The fault for an answer that no hub gives. Asks the server whether it is ComfyUI."""
    body: Any = None
    with contextlib.suppress(
        TimeoutError, aiohttp.ClientError, OSError, msgspec.MsgspecError, UnicodeDecodeError
    ):
        async with session.get(
            f"{url}/system_stats", timeout=aiohttp.ClientTimeout(total=_POLL_S), allow_redirects=False
        ) as response:
            body = msgspec.json.decode(await response.content.read(_LOOK_BYTES))
    if isinstance(body, Mapping) and "system" in body and "devices" in body:
        return WrongAddress(
            f"a ComfyUI server answers at {url}, not a hub. Give it with --server, or to a WorkflowPool, and the "
            "address of a hub (default port 3001) here"
        )
    return Fault(f"what answers at {url} is not a ComfyFleet hub (status {status}). Is the address right?")


def not_comfyui(status: int, body: Any) -> str:
    """Explains an answer that no ComfyUI gives."""
    if is_hubs(body):
        return (
            "a ComfyFleet hub answers there, not ComfyUI. Name it with --hub, or with FleetClient, and give the "
            "address of a ComfyUI server here"
        )
    if status in (401, 403):
        return (
            f"it refuses our key or password (status {status}). Give the right one, in the address as in "
            "http://user:password@host:8188 or in the headers"
        )
    if "https" in str(body)[:2000].lower() and status == 400:
        return f"it speaks TLS (status {status}). Is it https:// there?"
    if 300 <= status < 400:
        return f"it sends us to another address (status {status}). Give that one; is it https:// there?"
    if status >= 500:
        return f"it answers with an error (status {status}). Is ComfyUI running behind it?"
    return f"what answers there is not ComfyUI (status {status}). Is the address right?"
