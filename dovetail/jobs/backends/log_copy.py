"""The copy here of what grows elsewhere: a supervisor and a person who follows it may bring the same part of a log."""

from __future__ import annotations

import fcntl
from pathlib import Path

from dovetail.jobs import modes


def append(path: Path, since: int, text: bytes) -> None:
    """Add what the log there has from byte `since` on; what is here already is passed over."""
    if not text:
        return
    modes.make_folder(path.parent)
    with open(path, "ab", opener=modes.opener) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        size = file.seek(0, 2)
        if size >= since:
            file.write(text[size - since :])


def merge(path: Path, text: str) -> None:
    """Add the lines that are not here yet: hosts, and attempts after each other, tell some of the same."""
    here = path.read_text().splitlines() if path.exists() else []
    new = [line for line in text.splitlines() if line and line not in here]
    if new:
        modes.make_folder(path.parent)
        modes.write_text(path, "\n".join([*here, *new]) + "\n")


def size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
