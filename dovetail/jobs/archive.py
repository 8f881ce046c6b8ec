"""Extract tar archives safely on every Python 3.11: `tarfile`'s own filters came with 3.11.4."""

from __future__ import annotations

import shutil
import tarfile
from pathlib import Path, PurePosixPath


def extract(packed: tarfile.TarFile, member: tarfile.TarInfo, folder: Path) -> None:
    """Write one file or folder below `folder`. Links, devices and paths that lead out of it are a tarfile.TarError.

    Of the mode only the owner's executable bit is kept; owner and times are not.
    """
    target = _target(member.name, folder)
    if member.isdir():
        target.mkdir(parents=True, exist_ok=True)
        return
    held = packed.extractfile(member) if member.isreg() else None
    if held is None:
        raise tarfile.ExtractError(f"{member.name!r} in the archive is neither a file nor a folder")
    target.parent.mkdir(parents=True, exist_ok=True)
    with held, target.open("wb") as file:
        shutil.copyfileobj(held, file)
    if member.mode & 0o100:
        target.chmod(target.stat().st_mode | 0o111)


def _target(name: str, folder: Path) -> Path:
    path = PurePosixPath(name)
    target = folder / path
    if path.is_absolute() or ".." in path.parts or not target.resolve().is_relative_to(folder.resolve()):
        raise tarfile.ExtractError(f"{name!r} in the archive leads out of its folder")
    return target
