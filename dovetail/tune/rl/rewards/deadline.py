"""How long the reward that runs now may still take. A reward that asks can answer for the rows it has finished."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from contextvars import ContextVar

_END: ContextVar[float] = ContextVar("end of the call", default=math.inf)
SPARE = 0.1  # the share of the limit that is left for the answer


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    token = _END.set(time.monotonic() + seconds * (1 - SPARE))
    try:
        yield
    finally:
        _END.reset(token)


def seconds_left() -> float:
    """Infinite where nothing limits it."""
    return _END.get() - time.monotonic()
