"""A word before C code aborts the process: XLA does so when a process of the run is gone, with no sentence."""

from __future__ import annotations

import ctypes
import signal
from collections.abc import Callable
from typing import Any

_HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_int)
_installed: list[Any] = []  # C calls it, and ctypes would drop it


def on_abort(then: Callable[[], object]) -> None:
    """Call `then` on the thread that aborts; it ends the process, or the abort does. In place of an earlier one.

    Python's own handlers run between bytecodes, and so never: abort() does not return to Python.
    """
    handler = _HANDLER(lambda number: (then(), None)[1])
    _installed[:] = [*_installed[-1:], handler]
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = [ctypes.c_int, _HANDLER], ctypes.c_void_p
    libc.signal(int(signal.SIGABRT), handler)
