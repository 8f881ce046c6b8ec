"""The caller of the request that is being answered, where API keys tell callers apart.

Errors as the log holds them: bounded, because an error's message may repeat what a user sent."""

from __future__ import annotations

import hashlib
import traceback
from contextvars import ContextVar

# A context variable: tasks and threads that answer a request inherit it, and no function in between has to pass it on.
_CALLER: ContextVar[str | None] = ContextVar("caller", default=None)


def set_caller(key: str | None) -> None:
    """Set the caller of this task by its key; None: callers are not told apart."""
    _CALLER.set(None if key is None else hashlib.sha256(key.encode()).hexdigest()[:32])


def salted(cache_salt: str | None) -> str | None:
    """Return the salt of a request's prefixes: that of the request, apart for each caller."""
    caller = _CALLER.get()
    return cache_salt if caller is None else f"{caller}:{cache_salt or ''}"


LONGEST_ENTRY, LONGEST = 500, 8000  # characters of a frame or a message, and of the whole


def traceback_text(error: BaseException) -> str:
    """Return the traceback, each frame and message and the whole of it cut to a bounded length."""
    return cut("".join(cut(entry, LONGEST_ENTRY) for entry in traceback.format_exception(error)).rstrip(), LONGEST)


def cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]} ... ({len(text) - most:,} more characters)\n"
