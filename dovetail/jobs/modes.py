"""Permissions of the files of jobs: one user's alone, unless a group shares the folder.

A folder is shared on purpose when its group may write it and it has the set-group-ID bit (`chmod 3770`). What is made
below it then has its group, whatever the umask says: the store and the queues can be written by the group, a job's own
folder can be read by the group and written by its user alone. Elsewhere folders are 0700 and files 0600.
"""

from __future__ import annotations

import contextlib
import grp
import os
import pwd
import secrets
import stat
from collections.abc import Sequence
from pathlib import Path

from dovetail.core.errors import UserError
from dovetail.core.files import write_atomic

SHARED = stat.S_ISGID | stat.S_IWGRP
EACH = 0o3770  # of a shared folder in which each user has folders: only that user can rename and remove them
OWN = 0o3750  # of such a folder, and all below it: the group may read it
_OWN_BITS, _BITS = stat.S_ISGID | stat.S_ISVTX, stat.S_ISGID | stat.S_ISVTX | stat.S_IWGRP


def has_group(folder: Path) -> bool:
    """Whether a group shares it on purpose."""
    return folder.stat().st_mode & SHARED == SHARED


def folder_mode(path: Path, shared: int = 0o2770) -> int:
    """Return the mode that a folder is to have, by its parent's; `shared`: in a parent that a group shares."""
    parent = path.parent.stat().st_mode
    if parent & _BITS == _OWN_BITS:
        return OWN | (parent & 0o005)
    return shared | (parent & 0o005) if parent & SHARED == SHARED else 0o700


def file_mode(path: Path) -> int:
    """Return the mode that a file is to have, by its folder's."""
    parent = path.parent.stat().st_mode
    if parent & _BITS == _OWN_BITS:
        return 0o640 | (parent & 0o004)
    if parent & SHARED != SHARED:
        return 0o600
    return (0o640 if path.name.startswith("supervisor") else 0o660) | (parent & 0o004)


def make_folder(path: Path, shared: int = 0o2770) -> None:
    """Make it and its parents, where they do not exist; `shared` as for `folder_mode`."""
    if path.is_dir():
        return
    make_folder(path.parent)
    with contextlib.suppress(FileExistsError):
        path.mkdir(0o700)
        _set(path, folder_mode(path, shared))


def opener(path: str, flags: int) -> int:
    """For open(): a file that it creates has the mode of its folder's files."""
    if flags & os.O_CREAT:
        with contextlib.suppress(FileExistsError):
            made = os.open(path, flags | os.O_EXCL, 0o600)
            _set(made, file_mode(Path(path)))
            return made
    return os.open(path, flags)


def touch(path: Path) -> None:
    """Create an empty file, where there is none."""
    open(path, "ab", opener=opener).close()


def write_text(path: Path, text: str) -> None:
    """Replace the file atomically; it has the mode of its folder's files."""
    write_atomic(path, text, opener=opener)


def create(path: Path, text: str = "") -> None:
    """Create the file with this text, unless it exists. Never opens the one that exists: to close a SQLite file would
    drop the locks that this process has on it."""
    if path.exists():
        return
    beside = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")
    with open(beside, "w", opener=opener) as file:
        file.write(text)
    try:
        os.link(beside, path)
        beside.unlink()
    except FileExistsError:  # another was first
        beside.unlink()
    except OSError:  # a file system without links
        beside.rename(path)


def repair(root: Path, names: Sequence[str]) -> None:
    """Give what this user owns of `names`, in `root`, its mode and group: it may have been made before the folder was
    shared, or by a version that did not care."""
    for path in (root / name for name in names):
        if path.name == "jobs":  # what jobs wrote is theirs
            _repaired(path, EACH)
        elif _repaired(path, OWN if path.name == "snapshots" else 0o2770) and path.is_dir():
            for below in path.rglob("*"):
                _repaired(below)


def _repaired(path: Path, shared: int = 0o2770) -> bool:
    """Whether it needed it."""
    try:
        found, group = path.lstat(), path.parent.stat().st_gid
        wanted = folder_mode(path, shared) if stat.S_ISDIR(found.st_mode) else file_mode(path)
        wrong_group = has_group(path.parent) and found.st_gid != group
        if found.st_uid != os.getuid() or stat.S_ISLNK(found.st_mode):
            return False
        if wrong_group:
            os.chown(path, -1, group)
        if wrong_group or stat.S_IMODE(found.st_mode) != wanted:
            os.chmod(path, wanted)
            return True
    except OSError:  # it is gone, or the file system has no modes
        pass
    return False


def check(root: Path, names: Sequence[str]) -> None:
    """Refuse a home of jobs which this user may not read and write, or not what is in it under `names`."""
    for path in (root, *(root / name for name in names)):
        needed = os.R_OK | os.W_OK | (os.X_OK if os.path.isdir(path) else 0)
        if not os.access(path, needed) and os.path.lexists(path):
            whose = f"belongs to {owner(path)} (mode {stat.S_IMODE(path.stat().st_mode):04o})"
            raise UserError(
                f"{path} {whose}, and {user_name()} may not write it. {_share(root)}; to have jobs of your own, set "
                "DOVETAIL_JOBS to a folder of yours"
            )


def _share(root: Path) -> str:
    if has_group(root):
        gid = root.stat().st_gid
        return f"{root} is shared by the group {_group(gid)}: have yourself added to it"
    how = f"chgrp GROUP {root} && chmod 3770 {root} && dovetail job list"
    return f"To share these jobs, {owner(root)} runs `{how}`, where GROUP has both of you"


def owner(path: Path) -> str:
    """Its owner's name."""
    return _name(path.stat().st_uid)


def user_name() -> str:
    """Who runs this, by the process's own user id: variables such as $USER may be another's after `su`."""
    return _name(os.getuid())


def _name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:  # a container whose user has no name
        return str(uid)


def _group(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


def _set(path: Path | int, mode: int) -> None:
    """Beyond the umask. Some file systems have no modes."""
    with contextlib.suppress(OSError):
        os.chmod(path, mode)
