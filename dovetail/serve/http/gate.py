"""Gate: the middleware that every request passes before a route.

It checks the key and the body's size and time, and turns every exception into an answer.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import re
from collections.abc import Iterable
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dovetail.core.errors import RequestError
from dovetail.serve.api.controls import CONTROL_ROUTES, PROFILE_ROUTES
from dovetail.serve.api.delivery import while_connected
from dovetail.serve.config import ServerConfig, is_loopback
from dovetail.serve.errors import ApiError, as_api_error, from_validation
from dovetail.serve.http.long_bodies import LONG, LongBodies
from dovetail.serve.request_context import begin_request, set_caller

OPEN = {"/health", "/ping", "/ready"}  # a load balancer has no key
OPEN_BYTES = 4096  # of a body without a key: none of these routes reads one
METRICS = "/metrics"  # Prometheus often has no key; it shows counts and times of all requests and the model's name
_HALF_PAIR = re.compile(rb"\\u[dD][89abAB-F]")


class Gate:
    """Check each request, read its body, and answer every exception with an error."""

    def __init__(self, app: ASGIApp, config: ServerConfig, long: LongBodies, max_body: int):
        self._app, self._config, self._long, self._max_body = app, config, long, max_body
        # Without a key, a web page could reach this server through a host name of its own (DNS rebinding).
        self._any_host = bool(config.api_keys) or not is_loopback(config.host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begin_request()
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            body = await self._body(scope, receive, self._check(scope))
            if isinstance(body, Response):
                await body(scope, receive, watched)
            else:
                await self._app(scope, _replay(body, receive), watched)
        except Exception as error:
            api_error = as_api_error(error)
            if not started:
                await api_error.response(scope["path"])(scope, receive, send)

    def _check(self, scope: Scope) -> int:
        """Check the request's host and key; return the maximum size of its body."""
        headers, path = Headers(scope=scope), scope["path"]
        if not self._any_host and not _is_local(headers.get("host", "")):
            raise ApiError(403, "this server has no key, so it answers to localhost and IP addresses only")
        is_open = path in OPEN or (path == METRICS and not self._config.protect_metrics)
        if is_open or scope["method"] == "OPTIONS":
            return min(OPEN_BYTES, self._max_body)
        if path in CONTROL_ROUTES or path in PROFILE_ROUTES:
            keys: Iterable[str] = (self._config.admin_key,) if self._config.admin_key else ()
        else:
            keys = self._config.api_keys
        key = _key(headers)
        if keys and not _is_one_of(key, keys):
            raise ApiError(401, "a valid key is required: Authorization: Bearer KEY", code="invalid_api_key")
        set_caller(key if self._config.separates_callers else None)
        return self._max_body

    async def _body(self, scope: Scope, receive: Receive, most: int) -> bytes | Response:
        """Return the whole body, so that its size and time are bounded in one place; or the answer to a long one."""
        headers, body = Headers(scope=scope), bytearray()
        length = headers.get("content-length", "0")
        if length.isdigit() and int(length) > most:
            raise _too_large(most)
        ended = await self._read(receive, body, min(LONG, most), most)
        if len(body) <= LONG:
            _check_type(body, headers.get("content-type", ""))
            check_text(body)
            return bytes(body)
        async with self._long.place():
            if not ended:
                await self._read(receive, body, most, most)
            _check_type(body, headers.get("content-type", ""))
            answer = await while_connected(receive, self._long.answer(scope, body))
        if answer is None:
            raise RequestError("the client disconnected while its request was read")
        return answer

    async def _read(self, receive: Receive, body: bytearray, upto: int, most: int) -> bool:
        """Append what arrives to `body` until it is complete (True) or longer than `upto` (False).

        Raises:
            ApiError: The body is longer than `most` bytes (413) or takes too long (408).
        """
        seconds = self._config.limits.body_timeout
        try:
            ended = await asyncio.wait_for(_read(receive, body, upto), seconds)
        except TimeoutError:
            raise ApiError(408, f"the body did not arrive within {seconds:g} s") from None
        if len(body) > most:
            raise _too_large(most)
        return ended


async def _read(receive: Receive, body: bytearray, upto: int) -> bool:
    while len(body) <= upto:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise RequestError("the client disconnected while it sent the body")
        body += message.get("body", b"")
        if not message.get("more_body", False):
            return True
    return False


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives the body, then what follows it."""
    rest: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return rest.pop() if rest else await receive()

    return replay


def _check_type(body: bytes | bytearray, given: str) -> None:
    """Require a JSON content type: browsers send other types across origins without asking first (CORS)."""
    kind = given.partition(";")[0].strip().lower()
    if body and kind != "application/json" and not re.fullmatch(r"application/[^/]+\+json", kind):
        got = repr(given[:80]) if given else "none"
        message = f"`Content-Type` must be application/json, got {got}"
        raise ApiError(415, message, param="Content-Type", code="content_type")


def check_text(body: bytes | bytearray) -> None:
    """Refuse half of a surrogate pair: JSON can hold it, but it can be neither tokenized nor sent back."""
    if _HALF_PAIR.search(body):
        try:
            json.dumps(json.loads(body), ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise RequestError("the body holds half of a surrogate pair, which is not valid Unicode") from None
        except (ValueError, RecursionError):
            pass  # not JSON: the route says so


def _too_large(most: int) -> ApiError:
    return ApiError(413, f"the body must have at most {most} bytes on this server", code="too_large")


def _key(headers: Headers) -> str:
    """Return the key: OpenAI's clients send a bearer token, Anthropic's x-api-key."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")


def _is_one_of(key: str, keys: Iterable[str]) -> bool:
    """Compare the key with all keys in constant time."""
    given = key.encode()
    return sum([hmac.compare_digest(given, each.encode()) for each in keys]) > 0


def _is_local(host: str) -> bool:
    name = host.rpartition(":")[0] if re.search(r":\d+$", host) else host
    name = name.strip("[]").lower()
    return (
        name in ("", "localhost")
        or name.endswith(".localhost")
        or re.fullmatch(r"[0-9.]+|[0-9a-f:]+", name) is not None
    )


def handle_errors(app: FastAPI) -> None:
    """Answer pydantic's and Starlette's errors in the server's format; all others reach the gate."""

    async def invalid(request: Request, error: Any):
        return as_api_error(from_validation(error.errors())).response(request.url.path)

    async def http_error(request: Request, error: Any):
        path = request.url.path
        what = {404: f"there is no route {path[:200]}", 405: f"{path[:200]} does not take {request.method}"}
        answer = ApiError(error.status_code, what.get(error.status_code, str(error.detail))).response(path)
        answer.headers.update(error.headers or {})  # Allow
        return answer

    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http_error)
