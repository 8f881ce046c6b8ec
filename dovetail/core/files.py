"""Write files atomically, lock them, and read files that only their owner may write."""

from __future__ import annotations

import contextlib
import os
import platform
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, TextIO

from dovetail.core.errors import FileError, MissingFileError, NotPermittedError

OTHERS = stat.S_IWGRP | stat.S_IWOTH
Opener = Callable[[str, int], int]

# --- atomic writes ----------------------------------------------------------------------------------------------------


def write_atomic(path: str | Path, content: str | bytes, *, opener: Opener | None = None) -> Path:
    """Replace the file at `path` by `content`, and return its path. A killed process leaves the old file.

    Args:
        path: The file; its folder must exist. A `~` is expanded.
        content: Text is written as UTF-8.
        opener: Passed to `open`, for the mode of the new file. By default it has the mode of the old one.

    Raises:
        FileError: `path` is a folder, or its folder is missing.
    """
    path, data = Path(path).expanduser(), content.encode() if isinstance(content, str) else content
    with open_atomic(path, opener=opener) as file:
        file.write(data)
    return path


@contextmanager
def open_atomic(path: Path, *, opener: Opener | None = None) -> Iterator[BinaryIO]:
    """Open a new file for writing that replaces `path` when the block ends without an error."""
    if not path.parent.is_dir():
        raise MissingFileError(f"cannot write {path}: there is no folder {path.parent}")
    if path.is_dir():
        raise FileError(f"cannot write {path}: it is a folder; name a file in it")
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with open(part, "wb", opener=opener) as file:
            if opener is None:
                with contextlib.suppress(OSError):  # no such file yet, or a file system without modes
                    os.fchmod(file.fileno(), stat.S_IMODE(path.stat().st_mode))
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def umask() -> int:
    """Return the process's umask, for files that a library creates with mode 0600."""
    mask = os.umask(0o077)  # it can only be read by setting it
    os.umask(mask)
    return mask


# --- locks ------------------------------------------------------------------------------------------------------------


@contextmanager
def locked(path: Path, busy: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock file `path`; the operating system releases it when the process ends.

    If another process holds it, call `busy` with its description ("pid 12 on node3, since ..."), then wait unless
    `busy` raised. The file is never removed: a process that waits on a removed file would lock alone.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as file:
        _lock(file, busy)
        file.seek(0)
        file.truncate()
        file.write(f"pid {os.getpid()} on {platform.node()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}")
        file.flush()
        yield


def _lock(file: TextIO, busy: Callable[[str], None]) -> None:
    try:
        import fcntl
    except ImportError:  # Windows has no such locks: two processes at once go unnoticed
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        busy(file.read().strip() or "a process that has not yet written its pid")
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError:  # a file system without locks (some network and FUSE mounts)
        return


# --- files that this process executes in some way: no other user may have written them --------------------------------


def own_folder(path: Path) -> Path:
    """Create a folder that only this user may open, or restrict an existing one of this user.

    Raises:
        NotPermittedError: The folder belongs to another user.
    """
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
    """Raise NotPermittedError unless the folder is this user's and no other user may write it."""
    found = path.lstat()
    _require_own(path, found)
    if not stat.S_ISDIR(found.st_mode) or found.st_mode & OTHERS:
        raise NotPermittedError(f"{path} must be a folder that only its user may write")


def read_own(path: Path) -> bytes:
    """Read a file that this user owns and no other user may write; raise NotPermittedError for any other file."""
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
        found = os.fstat(file.fileno())
        _require_own(path, found)
        if found.st_mode & OTHERS:
            raise NotPermittedError(f"{path} may be written by other users (mode {stat.S_IMODE(found.st_mode):04o})")
        return file.read()


def _require_own(path: Path, found: os.stat_result) -> None:
    if found.st_uid != os.getuid():
        raise NotPermittedError(f"{path} belongs to another user (uid {found.st_uid})")
