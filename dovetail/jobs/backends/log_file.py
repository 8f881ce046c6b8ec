"""Logs as files on this machine: read part by part, and copied from machines of the cloud."""

from __future__ import annotations

import fcntl
from pathlib import Path

from dovetail.jobs import files
from dovetail.jobs.backends.backend import LogPart

MAX_PART = 1 << 20  # bytes


def read(path: Path, since: int = 0) -> LogPart:
    """Return the part of a log from byte `since` on, whole characters only."""
    if not path.exists():
        return LogPart("", since)
    with path.open("rb") as file:
        file.seek(since)
        data = file.read(MAX_PART)
    cut = _incomplete(data)
    return LogPart(data[: len(data) - cut].decode(errors="replace"), since + len(data) - cut)


def _incomplete(data: bytes) -> int:
    """Return the number of bytes at the end that begin an incomplete UTF-8 character."""
    for back in range(1, min(4, len(data) + 1)):
        byte = data[-back]
        if byte >= 0xC0:
            length = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return back if back < length else 0
        if byte < 0x80:
            return 0
    return 0


def append(path: Path, since: int, text: bytes) -> None:
    """Add the bytes of a remote log from `since` on, without those that the copy already has.

    The supervisor and a person who follows the log may fetch the same part.
    """
    if not text:
        return
    files.make_folder(path.parent)
    with open(path, "ab", opener=files.opener) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        length = file.seek(0, 2)
        if length >= since:
            file.write(text[length - since :])


def merge(path: Path, text: str) -> None:
    """Add the lines that the copy does not have: hosts and attempts may report the same lines."""
    here = path.read_text().splitlines() if path.exists() else []
    new = [line for line in text.splitlines() if line and line not in here]
    if new:
        files.make_folder(path.parent)
        files.write_text(path, "\n".join([*here, *new]) + "\n")


def size(path: Path) -> int:
    """Return the length of the copy in bytes; 0 if it does not exist."""
    return path.stat().st_size if path.exists() else 0
