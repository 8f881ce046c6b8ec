"""Landlock: the kernel opens only what lies below the folders it is told, for root too. Linux 5.13; no rights needed.

It knows nothing of a file's mode, owner and times, which `seccomp.py` forbids to change, nor of `stat`: a program can
still learn that a path exists.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
from collections.abc import Iterable

from .libc import PR_SET_NO_NEW_PRIVS, prctl, syscall

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # the same numbers on every architecture
ASK_VERSION, PATH_BENEATH = 1, 1
WRITE_FILE, READ_FILE, READ_DIR, TRUNCATE, IOCTL_DEV = 1 << 1, 1 << 2, 1 << 3, 1 << 14, 1 << 15
OF_A_FILE = WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV  # a rule about one file may name no right of a folder
TCP = 0b11  # bind, connect
SCOPES = 0b11  # abstract sockets and signals stay among those that are restricted alike


def version() -> int:
    """Of the kernel's Landlock; OSError where it has none."""
    return syscall(CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(ASK_VERSION))


def restrict(readable: Iterable[str], folder: str) -> None:
    """From here on this process reads what lies below `readable` and does as it likes below `folder`: no other file."""
    found = version()
    handled = _rights(found)
    words = [handled, TCP, SCOPES][: 1 + (found >= 4) + (found >= 6)]
    attributes = struct.pack(f"{len(words)}Q", *words)
    rules = syscall(CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint32(0))
    for path in readable:
        # What this user cannot open is not readable for the program either: the other paths still are.
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
            _allow(rules, path, (READ_FILE | READ_DIR) & handled)
    _allow(rules, folder, handled & ~IOCTL_DEV)
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    syscall(RESTRICT_SELF, ctypes.c_int(rules), ctypes.c_uint32(0))
    os.close(rules)


def _rights(found: int) -> int:
    """Every right over files that this version can withhold: 13 at first, then REFER, TRUNCATE and IOCTL_DEV."""
    return (1 << (13 + (found >= 2) + (found >= 3) + (found >= 5))) - 1


def _allow(rules: int, path: str, rights: int) -> None:
    at = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if not os.path.isdir(path):
            rights &= OF_A_FILE
        rule = struct.pack("=Qi", rights, at)
        syscall(ADD_RULE, ctypes.c_int(rules), ctypes.c_int(PATH_BENEATH), rule, ctypes.c_uint32(0))
    finally:
        os.close(at)
