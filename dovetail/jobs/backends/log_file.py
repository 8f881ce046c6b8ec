"""A rank's log as a file that grows: read from where one left off."""

from __future__ import annotations

from pathlib import Path

from dovetail.jobs.backends.backend import LogPart

MOST = 1 << 20  # bytes of one part


def read(path: Path, since: int = 0) -> LogPart:
    """Whole characters only: what is cut at the end is left for the next part."""
    if not path.exists():
        return LogPart("", since)
    with path.open("rb") as file:
        file.seek(since)
        data = file.read(MOST)
    cut = _cut(data)
    return LogPart(data[: len(data) - cut].decode(errors="replace"), since + len(data) - cut)


def _cut(data: bytes) -> int:
    """How many bytes at the end begin a character of UTF-8 that is not whole yet."""
    for back in range(1, min(4, len(data) + 1)):
        byte = data[-back]
        if byte >= 0xC0:
            length = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return back if back < length else 0
        if byte < 0x80:
            return 0
    return 0
