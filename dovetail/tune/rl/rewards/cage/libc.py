"""The C library's calls that Python has no name for. Linux only."""

from __future__ import annotations

import ctypes
import os
from typing import Any

PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 22, 38


def library() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def syscall(number: int, *arguments: Any) -> int:
    """The call's answer; OSError where it fails."""
    found = library().syscall(ctypes.c_long(number), *arguments)
    if found < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return found


def prctl(option: int, *arguments: Any) -> None:
    words = [a if isinstance(a, ctypes._SimpleCData) else ctypes.c_ulong(a) for a in arguments]
    words += [ctypes.c_ulong(0)] * (4 - len(words))
    if library().prctl(option, *words) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
