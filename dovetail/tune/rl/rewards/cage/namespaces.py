"""Namespaces of the process's own (users, network, IPC, mounts), and no capabilities: where the machine permits."""

from __future__ import annotations

import ctypes
import os
import struct

from .libc import library

NEW_MOUNTS, NEW_IPC, NEW_USER, NEW_NET = 0x00020000, 0x08000000, 0x10000000, 0x40000000
NO_SUID, NO_DEVICES, RECURSIVE, PRIVATE = 0x2, 0x4, 0x4000, 0x40000
FILES = 4096  # that it may create
CAPABILITIES_VERSION = 0x20080522


def enter() -> None:
    """OSError where it is not permitted: many containers forbid it, and some distributions."""
    user, group = os.getuid(), os.getgid()
    if library().unshare(NEW_USER | NEW_NET | NEW_IPC | NEW_MOUNTS) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def bound_folder(folder: str, size: int) -> None:
    """Mount a file system in memory over `folder`, visible to this process alone: it holds `size` bytes and no more."""
    _mount(b"none", b"/", None, RECURSIVE | PRIVATE, None)
    options = f"size={size},nr_inodes={FILES},mode=700"
    _mount(b"tmpfs", os.fsencode(folder), b"tmpfs", NO_SUID | NO_DEVICES, options.encode())


def _mount(*arguments: bytes | int | None) -> None:
    source, target, kind, flags, options = arguments
    if library().mount(source, target, kind, ctypes.c_ulong(flags), options) != 0:  # type: ignore[arg-type]
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def drop_capabilities() -> None:
    """Root's, or those that come with a namespace: with them a program could lift its limits again."""
    head = struct.pack("Ii", CAPABILITIES_VERSION, 0)
    if library().capset(head, struct.pack("6I", *[0] * 6)) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
