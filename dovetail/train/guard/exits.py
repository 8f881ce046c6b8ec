"""Define the exit codes of a training process for the job runner, and a handler for SIGABRT.

The codes are above 2 (a user's error) and below 128 (signals).
"""

from __future__ import annotations

import ctypes
import signal
from collections.abc import Callable
from typing import Any

PREEMPTED = 85
QUARANTINE = 86
HUNG = 87
TROUBLE = 88
LOST = 89
ABORTED = 134  # as a shell shows SIGABRT

MEANING = {
    PREEMPTED: "stopped by a signal and saved: start it again",
    QUARANTINE: "this host's hardware is faulty: start again without it",
    HUNG: "no step ended in time, and every thread's stack was written: start it again",
    TROUBLE: "the health budget is used up: look at health.jsonl before starting again",
    LOST: "another process of the run was lost: start it again",
    ABORTED: "XLA ended the process",
}

_HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_int)
_installed: list[Any] = []  # keeps the handlers alive: C calls them


def meaning(code: int) -> str:
    """Return one line for a message: 'exit 87: ...'."""
    return f"exit {code}: {MEANING.get(code, 'done' if code == 0 else 'failed')}"


def on_abort(handler: Callable[[], object]) -> None:
    """Call `handler` when C code aborts the process, in place of an earlier handler.

    XLA aborts without a message when another process of the run is gone. `handler` runs on the aborting thread and may
    end the process; otherwise the abort does. Python's own signal handlers run between bytecodes, so they never run
    here: abort() does not return to Python.
    """
    wrapped = _HANDLER(lambda number: (handler(), None)[1])
    _installed[:] = [*_installed[-1:], wrapped]
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = [ctypes.c_int, _HANDLER], ctypes.c_void_p
    libc.signal(int(signal.SIGABRT), wrapped)
