"""Files that this process executes in some form, so that no other user may have written them."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from dovetail.core.errors import FileError, NotPermittedError

OTHERS = stat.S_IWGRP | stat.S_IWOTH


def own_folder(path: Path) -> Path:
    """Make a folder that this user alone may open, or close the user's own. PermissionError where it is another's."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.mkdir(0o700)
    except FileExistsError:
        found = path.lstat()  # a link may lead to a folder that another user fills
        _require_own(path, found)
        if not stat.S_ISDIR(found.st_mode):
            raise FileError(f"{path} is not a folder") from None
        if stat.S_IMODE(found.st_mode) & 0o077:
            path.chmod(0o700)
    return path


def check_own_folder(path: Path) -> None:
    """PermissionError unless the folder is this user's, and no other may write it."""
    found = path.lstat()
    _require_own(path, found)
    if not stat.S_ISDIR(found.st_mode) or found.st_mode & OTHERS:
        raise NotPermittedError(f"{path} must be a folder that only its user may write")


def read_own(path: Path) -> bytes:
    """Read a file that this user owns and no other may write. PermissionError for any other file."""
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
        found = os.fstat(file.fileno())
        _require_own(path, found)
        if found.st_mode & OTHERS:
            raise NotPermittedError(f"{path} may be written by other users (mode {stat.S_IMODE(found.st_mode):04o})")
        return file.read()


def _require_own(path: Path, found: os.stat_result) -> None:
    if found.st_uid != os.getuid():
        raise NotPermittedError(f"{path} belongs to another user (uid {found.st_uid})")
