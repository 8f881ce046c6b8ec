"""Restrict this process by the Linux kernel, without root: namespaces, no capabilities, and Landlock.

- Namespaces give the process its own users, network, IPC and mounts, where the machine permits it.
- Landlock (Linux 5.13) opens only the files below the given folders, for root too. It does not cover a file's mode,
  owner and times, which `seccomp.py` forbids to change, nor `stat`: a program can still learn that a path exists.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
from collections.abc import Iterable
from typing import Any

# --- calls of the C library -------------------------------------------------------------------------------------------

PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 22, 38


def prctl(option: int, *arguments: Any) -> None:
    """Call prctl with up to four arguments; raise OSError where it fails."""
    words = [a if isinstance(a, ctypes._SimpleCData) else ctypes.c_ulong(a) for a in arguments]
    words += [ctypes.c_ulong(0)] * (4 - len(words))
    _require_success(_libc().prctl(option, *words))


def _syscall(number: int, *arguments: Any) -> int:
    result = _libc().syscall(ctypes.c_long(number), *arguments)
    if result < 0:
        raise _last_error()
    return result


def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def _require_success(result: int) -> None:
    if result != 0:
        raise _last_error()


def _last_error() -> OSError:
    return OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


# --- namespaces and capabilities --------------------------------------------------------------------------------------

NEW_MOUNTS, NEW_IPC, NEW_USER, NEW_NET = 0x00020000, 0x08000000, 0x10000000, 0x40000000
NO_SUID, NO_DEVICES, RECURSIVE, PRIVATE = 0x2, 0x4, 0x4000, 0x40000
MAX_FILES = 4096  # that the process may create
CAPABILITIES_VERSION = 0x20080522


def enter_namespaces() -> None:
    """Enter new namespaces; raise OSError where that is not permitted, as in many containers."""
    user, group = os.getuid(), os.getgid()
    _require_success(_libc().unshare(NEW_USER | NEW_NET | NEW_IPC | NEW_MOUNTS))
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def mount_bounded_folder(folder: str, size: int) -> None:
    """Mount a file system of `size` bytes in memory over `folder`, visible to this process alone."""
    _mount(b"none", b"/", None, RECURSIVE | PRIVATE, None)
    options = f"size={size},nr_inodes={MAX_FILES},mode=700"
    _mount(b"tmpfs", os.fsencode(folder), b"tmpfs", NO_SUID | NO_DEVICES, options.encode())


def _mount(source: bytes, target: bytes, kind: bytes | None, flags: int, options: bytes | None) -> None:
    _require_success(_libc().mount(source, target, kind, ctypes.c_ulong(flags), options))


def drop_capabilities() -> None:
    """Drop the capabilities of root or of a new namespace, with which a program could lift its limits."""
    head = struct.pack("Ii", CAPABILITIES_VERSION, 0)
    _require_success(_libc().capset(head, struct.pack("6I", *[0] * 6)))


# --- Landlock ---------------------------------------------------------------------------------------------------------

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # the same numbers on every architecture
ASK_VERSION, PATH_BENEATH = 1, 1
WRITE_FILE, READ_FILE, READ_DIR, TRUNCATE, IOCTL_DEV = 1 << 1, 1 << 2, 1 << 3, 1 << 14, 1 << 15
FILE_RIGHTS = WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV  # a rule for a file must not name a right of folders
TCP = 0b11  # bind, connect
SCOPES = 0b11  # abstract sockets and signals reach only processes in the same Landlock domain


def restrict_files(readable: Iterable[str], folder: str) -> None:
    """Allow this process to read below `readable` and to use `folder` freely, and to open no other file.

    Raises:
        OSError: The kernel has no Landlock.
    """
    version = _syscall(CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(ASK_VERSION))
    handled = _handled_rights(version)
    words = [handled, TCP, SCOPES][: 1 + (version >= 4) + (version >= 6)]
    attributes = struct.pack(f"{len(words)}Q", *words)
    ruleset = _syscall(CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint32(0))
    for path in readable:
        # A path that this user cannot open is not readable for the program either: the other paths still are.
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
            _allow(ruleset, path, (READ_FILE | READ_DIR) & handled)
    _allow(ruleset, folder, handled & ~IOCTL_DEV)
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    _syscall(RESTRICT_SELF, ctypes.c_int(ruleset), ctypes.c_uint32(0))
    os.close(ruleset)


def _handled_rights(version: int) -> int:
    """Return every right over files that this version can withhold: 13, then REFER, TRUNCATE and IOCTL_DEV."""
    return (1 << (13 + (version >= 2) + (version >= 3) + (version >= 5))) - 1


def _allow(ruleset: int, path: str, rights: int) -> None:
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if not os.path.isdir(path):
            rights &= FILE_RIGHTS
        rule = struct.pack("=Qi", rights, fd)
        _syscall(ADD_RULE, ctypes.c_int(ruleset), ctypes.c_int(PATH_BENEATH), rule, ctypes.c_uint32(0))
    finally:
        os.close(fd)
