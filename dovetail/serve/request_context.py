"""Context of the HTTP request that a task answers: its id, its caller, and how its errors are written to the log."""

from __future__ import annotations

import hashlib
import traceback
import uuid
from contextvars import ContextVar

# Context variables are inherited by the tasks and threads that answer a request, so no function has to pass them on.
_CALLER: ContextVar[str | None] = ContextVar("caller", default=None)
_REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="-")

MAX_ENTRY, MAX_TRACEBACK = 500, 8000  # characters of one frame or message, and of a whole traceback in the log


def begin_request() -> None:
    """Give this task a new request id."""
    _REQUEST_ID.set(uuid.uuid4().hex[:16])


def request_id() -> str:
    """Return the id of the request that this task answers, or `-` outside of a request."""
    return _REQUEST_ID.get()


def set_caller(key: str | None) -> None:
    """Set the caller of this task by its API key, or to None if prefixes are shared between keys."""
    _CALLER.set(None if key is None else hashlib.sha256(key.encode()).hexdigest()[:32])


def salted(cache_salt: str | None) -> str | None:
    """Return the prefix cache salt of a request: its own `cache_salt`, made distinct for each caller."""
    caller = _CALLER.get()
    return cache_salt if caller is None else f"{caller}:{cache_salt or ''}"


def traceback_text(error: BaseException) -> str:
    """Return the traceback for the log, cut to a bounded length: error messages may repeat what a user sent."""
    entries = (_cut(entry, MAX_ENTRY) for entry in traceback.format_exception(error))
    return _cut("".join(entries).rstrip(), MAX_TRACEBACK)


def _cut(text: str, size: int) -> str:
    return text if len(text) <= size else f"{text[:size]} ... ({len(text) - size:,} more characters)\n"
