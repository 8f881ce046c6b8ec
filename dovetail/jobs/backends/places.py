"""Where a backend has ever asked for something: projects and zones, or clusters. The orphan reaper looks in all.

A place is written down before the first request there, so that nothing can be held in a place that is not looked at.
"""

from __future__ import annotations

import os
from pathlib import Path

from dovetail.jobs import modes


class Places:
    """A file of lines, added to and never rewritten: several processes may share it."""

    def __init__(self, root: Path, backend: str) -> None:
        self._path = Path(root) / "places" / backend

    def add(self, *words: str) -> None:
        if words in self.all():
            return
        modes.make_folder(self._path.parent)
        line = "\t".join(words) + "\n"
        with open(self._path, "ab", buffering=0, opener=modes.opener) as file:
            file.write(line.encode())
            os.fsync(file.fileno())

    def all(self) -> list[tuple[str, ...]]:
        if not self._path.exists():
            return []
        return sorted({tuple(line.split("\t")) for line in self._path.read_text().splitlines() if line})
