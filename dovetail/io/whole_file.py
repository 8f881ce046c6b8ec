"""Files that are written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, content: str | bytes) -> None:
    """Written beside its place, then moved there: a process that is killed meanwhile leaves the old file, and the next
    write removes what it left. One process at a time writes a file, so no other takes the name beside it."""
    beside = path.with_name(f".{path.name}.part")
    with open(beside, "wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)
