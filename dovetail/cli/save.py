"""A file written whole or not at all."""

import os
import tempfile
from pathlib import Path

from dovetail.core.errors import FileError, MissingFileError


def save(path: str | Path, text: str) -> Path:
    """Beside its place first and moved there when it is complete: a process killed meanwhile leaves the old file."""
    from dovetail.io.umask import umask

    path = Path(path).expanduser()
    if not path.parent.is_dir():
        raise MissingFileError(f"cannot write {path}: there is no folder {path.parent}")
    if path.is_dir():
        raise FileError(f"cannot write {path}: it is a folder; name a file in it")
    handle, part = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(part, path.stat().st_mode if path.exists() else 0o666 & ~umask())  # mkstemp's is 0600
        os.replace(part, path)
    except BaseException:
        os.unlink(part)
        raise
    return path
