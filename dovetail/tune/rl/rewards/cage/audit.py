"""An audit hook that refuses files, sockets and processes where the kernel cannot be asked to.

It stops a program that does not know of it. It is no security boundary: code that means to can reach past any hook that
lives in its own interpreter. `sandbox.py` uses it only where it was told that this is enough.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import Any

REFUSED = (
    "socket.", "subprocess.", "os.fork", "os.exec", "os.posix_spawn", "os.spawn", "os.system", "os.kill", "os.chmod",
    "os.chown", "os.utime", "ctypes.", "pty.", "signal.pthread_kill",
)  # fmt: skip
ALLOWED = ("socket.__new__",)  # asyncio's own pair of sockets; to connect, bind or send is refused
OF_PATHS = ("open", "os.listdir", "os.scandir", "os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link",
            "os.symlink", "os.truncate", "shutil.")  # fmt: skip
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def restrict(readable: Iterable[str], folder: str) -> None:
    mine = os.path.realpath(folder) + os.sep
    theirs = tuple(os.path.realpath(path) + os.sep for path in readable)
    # Kept by name here: the program may replace them where they are found.
    real, text, fits = os.path.realpath, (str, bytes), str.startswith

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if fits(event, REFUSED) and not fits(event, ALLOWED):
            raise PermissionError(f"{event} is not permitted here")
        if not fits(event, OF_PATHS):
            return
        reads = event in ("os.listdir", "os.scandir") or (event == "open" and not (arguments[2] or 0) & WRITES)
        for path in arguments[:2] if event != "open" else arguments[:1]:
            if isinstance(path, text):
                where = real(os.fsdecode(path)) + os.sep
                if not fits(where, mine) and not (reads and fits(where, theirs)):
                    raise PermissionError(f"{event} of {path!r} is not permitted here")

    sys.addaudithook(hook)
