"""The caller of the request that is being answered, where API keys tell callers apart."""

from __future__ import annotations

import hashlib
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
