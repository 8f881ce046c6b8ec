"""A file of a run, written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Beside its place, then moved there: who is killed meanwhile leaves what was there before. One process writes a
    run's folder, so the name beside it is taken by nobody else; the next write clears what a kill left."""
    beside = path.with_name(f".{path.name}.part")
    with open(beside, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)
