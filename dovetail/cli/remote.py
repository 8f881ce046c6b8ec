"""A client of an OpenAI-compatible server, for commands: its address, its events, and its errors as sentences."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from dovetail.core.errors import UserError

if TYPE_CHECKING:
    import httpx

DONE = object()  # the last event of a stream
NO_CONNECTION = "no connection"


class ServerError(Exception):
    """Report a server's error as a sentence, with a `kind` (a status, or a word) by which errors are counted."""

    def __init__(self, kind: str, sentence: str):
        super().__init__(sentence)
        self.kind = kind


def client_options(url: str, api_key: str, seconds: float) -> dict[str, Any]:
    """Return the options of httpx.Client or AsyncClient.

    Args:
        url: The server's address; it may end in /v1, as for other clients.
        api_key: The key, or "".
        seconds: The timeout without data: an engine that compiles its first step sends none for a while.
    """
    import httpx

    from dovetail.serve.config import is_loopback

    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise UserError(f"{url} is not a URL: {error}", param="--url") from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise UserError(f"`--url` must be a URL such as http://127.0.0.1:8000, got {url!r}", param="--url")
    if not (api_key.isascii() and api_key.isprintable()):
        raise UserError("`--api-key` must be printable ASCII, because it is sent in a header", param="--api-key")
    return dict(
        base_url=url.rstrip("/").removesuffix("/v1"),
        headers={"authorization": f"Bearer {api_key}"} if api_key else {},
        timeout=httpx.Timeout(seconds, connect=min(10.0, seconds), pool=None),
        # Open loop: a request never waits for a free connection.
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        trust_env=not is_loopback(parsed.host),  # a proxy cannot reach this machine's loopback
    )


@contextmanager
def explained(url: Any) -> Iterator[None]:
    """Turn errors of the connection into a ServerError."""
    import httpx

    try:
        yield
    except httpx.ConnectError as error:
        raise ServerError(
            NO_CONNECTION, f"no server answers at {url} ({error}): start one with `dovetail serve`"
        ) from None
    except httpx.TimeoutException as error:
        raise ServerError("timeout", f"{url} did not answer in time ({type(error).__name__})") from None
    except httpx.HTTPError as error:
        raise ServerError("connection lost", f"the connection to {url} broke: {_text(error)}") from None


def refusal(response: httpx.Response) -> ServerError:
    """Return the error of a 4xx or 5xx response, with the server's message. The body must have been read."""
    status = str(response.status_code)
    message = _message(response.text)
    if not message:
        where = f"{response.request.method} {response.url}"
        message = f"{where} answered {status} {response.reason_phrase}: is this an OpenAI-compatible server?"
    if response.status_code == 401:
        message += "; give the key with --api-key or DOVETAIL_API_KEY"
    return ServerError(status, f"the server refused ({status}): {message}")


def read_event(line: str) -> Any:
    """Parse a line of a stream: an event's object, DONE, or None for other lines; raise for an error event."""
    if not line.startswith("data:"):
        return None
    text = line[5:].strip()
    if text == "[DONE]":
        return DONE
    try:
        event = json.loads(text)
    except ValueError:
        raise ServerError("bad event", f"the server sent an event that is not JSON: {text[:80]}") from None
    if isinstance(event, dict) and event.get("error"):
        raise ServerError("error event", f"the server ended the answer: {_message(text) or text[:200]}")
    return event


def read_models(response: httpx.Response) -> list[dict[str, Any]]:
    """Return the models that /v1/models lists, at least one."""
    if response.is_error:
        raise refusal(response)
    try:
        models = response.json()["data"]
        assert models and all(isinstance(model["id"], str) for model in models)
    except (ValueError, KeyError, TypeError, AssertionError):
        raise ServerError("no model", f"{response.url} lists no model: is this an OpenAI-compatible server?") from None
    return models


def _message(body: str) -> str:
    """Return the message of OpenAI's error format, on one line; "" for another format."""
    try:
        error = json.loads(body)["error"]
        return " ".join(str(error if isinstance(error, str) else error["message"]).split())
    except (ValueError, KeyError, TypeError):
        return ""


def _text(error: Exception) -> str:
    return str(error) or type(error).__name__
