"""A user, a network and an IPC namespace of the process's own, and no capabilities: where the machine permits."""

from __future__ import annotations

import ctypes
import os
import struct

from .libc import library

NEW_IPC, NEW_USER, NEW_NET = 0x08000000, 0x10000000, 0x40000000
CAPABILITIES_VERSION = 0x20080522


def enter() -> None:
    """OSError where it is not permitted: many containers forbid it, and some distributions."""
    user, group = os.getuid(), os.getgid()
    if library().unshare(NEW_USER | NEW_NET | NEW_IPC) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def drop_capabilities() -> None:
    """Root's, or those that come with a namespace: with them a program could lift its limits again."""
    head = struct.pack("Ii", CAPABILITIES_VERSION, 0)
    if library().capset(head, struct.pack("6I", *[0] * 6)) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
