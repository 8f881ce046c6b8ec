"""Where a backend has ever asked for something: projects and zones, or clusters. The orphan reaper looks in all.

A place is written down before the first request there, so that nothing can be held in a place that is not looked at.
"""

from __future__ import annotations

import os
from pathlib import Path


class Places:
    """A file of lines, added to and never rewritten: several processes may share it."""

    def __init__(self, root: Path, backend: str) -> None:
        self._path = Path(root) / "places" / backend

    def add(self, *words: str) -> None:
        if words in self.all():
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        line = "\t".join(words) + "\n"
        file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(file, line.encode())
            os.fsync(file)
        finally:
            os.close(file)

    def all(self) -> list[tuple[str, ...]]:
        if not self._path.exists():
            return []
        return sorted({tuple(line.split("\t")) for line in self._path.read_text().splitlines() if line})
