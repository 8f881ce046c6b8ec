"""The guard: refuse requests of other web pages, and limit what a browser may do with ours."""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Mapping
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

MAX_BODY = 9 * 2**20  # a picture of 6 MB in base64, and text
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    ),
    "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin", "Cross-Origin-Opener-Policy": "same-origin",
    "Permissions-Policy": "geolocation=(), microphone=()",
}  # fmt: skip


class Guard:
    """Wrap an application."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        if refused := _refusal(scope["method"], Headers(scope=scope)):
            await _answer(send_with_headers, *refused)
        else:
            await self._app(scope, receive, send_with_headers)


def _refusal(method: str, headers: Mapping[str, str]) -> tuple[int, str] | None:
    """Return the status and the reason for which a request is refused."""
    host = headers.get("host", "")
    if not _is_address(host):  # a name of someone else's that resolves to this machine (DNS rebinding)
        return 421, "Open the assistant by its IP address or as localhost."
    if method in ("GET", "HEAD"):
        return None
    same_site = headers.get("sec-fetch-site", "same-origin") == "same-origin"
    if headers.get("origin", f"http://{host}") != f"http://{host}" or not same_site:
        return 403, "Only the assistant's own page may change the diary."
    length = headers.get("content-length", "" if "transfer-encoding" in headers else "0")
    if not length.isdecimal():
        return 411, "The request must state its length."
    return (413, "The request is too large.") if int(length) > MAX_BODY else None


def _is_address(host: str) -> bool:
    """Return whether a Host header is localhost or an IP address."""
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
    try:
        return name == "localhost" or bool(ipaddress.ip_address(name.strip("[]")))
    except ValueError:
        return False


async def _answer(send: Any, status: int, reason: str) -> None:
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps({"error": reason}).encode()})
