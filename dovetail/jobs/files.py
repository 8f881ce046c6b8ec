"""The folder of jobs: where it is, and the permissions of the files in it.

It is $DOVETAIL_JOBS, else $DOVETAIL_HOME/jobs, else below the user's data directory:

    jobs.sqlite       the store
    snapshots/        code, by digest
    jobs/ID/          code/, run/ and attempts/N/rank0.log

A team shares a folder, `export DOVETAIL_JOBS=/shared/lab/jobs`, or a Postgres, `postgresql://jobs@lab.example/jobs`.
With Postgres the files are in $DOVETAIL_JOBS_FILES, or where they would be if DOVETAIL_JOBS were not set.

A folder is shared if its group may write it and it has the set-group-ID bit (`chmod 3770`). Everything made below it
gets its group, whatever the umask: the group may write the store and the queues, and may read, but not write, the
folder of a job. Elsewhere folders have mode 0700 and files 0600.
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

from dovetail.core.errors import NotPermittedError
from dovetail.core.files import write_atomic

# SQLite's write-ahead log needs memory that its readers share, so it does not work across machines.
NETWORK = ("nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "beegfs", "ceph", "glusterfs", "9p", "fuse")
SHARED = stat.S_ISGID | stat.S_IWGRP
EACH = 0o3770  # a shared folder in which users have folders of their own: only the owner may rename or remove one
OWN = 0o3750  # such a folder of one user, and everything below it: the group may read it
_OWN_BITS, _BITS = stat.S_ISGID | stat.S_ISVTX, stat.S_ISGID | stat.S_ISVTX | stat.S_IWGRP


# --- location ---------------------------------------------------------------------------------------------------------


def jobs_home() -> Path:
    """Return the folder of this user's jobs."""
    given = os.environ.get("DOVETAIL_JOBS_FILES" if database_url() else "DOVETAIL_JOBS", "")
    if given:
        return Path(given).expanduser()
    if os.environ.get("DOVETAIL_HOME"):
        return Path(os.environ["DOVETAIL_HOME"]).expanduser() / "jobs"
    data = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return Path(data).expanduser() / "dovetail" / "jobs"


def database_url() -> str:
    """Return the URL of the Postgres that holds the store; "" if a SQLite file does."""
    given = os.environ.get("DOVETAIL_JOBS", "")
    return given if given.startswith(("postgres:", "postgresql:")) else ""


def is_network_folder(folder: Path, mounts: Path = Path("/proc/mounts")) -> bool:
    """Return whether other machines may write the folder, judged by the type of its file system."""
    try:
        rows = [line.split() for line in mounts.read_text().splitlines()]
    except OSError:
        return False
    whole = str(folder.resolve()).rstrip("/") + "/"
    # /proc/mounts writes a space as \040. The longest mount point above the folder holds it.
    found = [(row[1].replace("\\040", " ").rstrip("/") + "/", row[2]) for row in rows if len(row) > 2]
    above = [(point, kind) for point, kind in found if whole.startswith(point)]
    kind = max(above, key=lambda one: len(one[0]), default=("", ""))[1]
    return kind.partition(".")[0] in NETWORK


# --- permissions ------------------------------------------------------------------------------------------------------


def has_group(folder: Path) -> bool:
    """Return whether a group shares the folder."""
    return folder.stat().st_mode & SHARED == SHARED


def folder_mode(path: Path, shared: int = 0o2770) -> int:
    """Return the mode that a folder gets from its parent; `shared` is the mode in a parent that a group shares."""
    parent = path.parent.stat().st_mode
    if parent & _BITS == _OWN_BITS:
        return OWN | (parent & 0o005)
    return shared | (parent & 0o005) if parent & SHARED == SHARED else 0o700


def file_mode(path: Path) -> int:
    """Return the mode that a file gets from its folder."""
    parent = path.parent.stat().st_mode
    if parent & _BITS == _OWN_BITS:
        return 0o640 | (parent & 0o004)
    if parent & SHARED != SHARED:
        return 0o600
    return (0o640 if path.name.startswith("supervisor") else 0o660) | (parent & 0o004)


def make_folder(path: Path, shared: int = 0o2770) -> None:
    """Make the folder and its parents if they do not exist; `shared` as for `folder_mode`."""
    if path.is_dir():
        return
    make_folder(path.parent)
    with contextlib.suppress(FileExistsError):
        path.mkdir(0o700)
        _set(path, folder_mode(path, shared))


def opener(path: str, flags: int) -> int:
    """Open a file for `open(..., opener=opener)`: a new one gets `file_mode`."""
    if flags & os.O_CREAT:
        with contextlib.suppress(FileExistsError):
            made = os.open(path, flags | os.O_EXCL, 0o600)
            _set(made, file_mode(Path(path)))
            return made
    return os.open(path, flags)


def touch(path: Path) -> None:
    """Create an empty file if there is none."""
    open(path, "ab", opener=opener).close()


def write_text(path: Path, text: str) -> None:
    """Write a file atomically, with `file_mode`."""
    write_atomic(path, text, opener=opener)


def create_file(path: Path, text: str = "") -> None:
    """Create the file with this text, unless it exists.

    An existing file is not even opened: closing a SQLite file would drop the locks that this process has on it.
    """
    if path.exists():
        return
    beside = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")
    with open(beside, "w", opener=opener) as file:
        file.write(text)
    try:
        os.link(beside, path)
        beside.unlink()
    except FileExistsError:  # another process was first
        beside.unlink()
    except OSError:  # a file system without links
        beside.rename(path)


def repair_modes(root: Path, names: Sequence[str]) -> None:
    """Give the files of this user among `names` in `root` their mode and group.

    They may have been made before the folder was shared.
    """
    for path in (root / name for name in names):
        if path.name == "jobs":  # files below it belong to the jobs
            _repaired(path, EACH)
        elif _repaired(path, OWN if path.name == "snapshots" else 0o2770) and path.is_dir():
            for below in path.rglob("*"):
                _repaired(below)


def _repaired(path: Path, shared: int = 0o2770) -> bool:
    """Return whether the mode or the group was wrong."""
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
    except OSError:  # the file is gone, or the file system has no modes
        pass
    return False


def check_access(root: Path, names: Sequence[str]) -> None:
    """Raise NotPermittedError if this user may not read and write `root`, or one of `names` in it."""
    for path in (root, *(root / name for name in names)):
        needed = os.R_OK | os.W_OK | (os.X_OK if os.path.isdir(path) else 0)
        if not os.access(path, needed) and os.path.lexists(path):
            whose = f"belongs to {owner(path)} (mode {stat.S_IMODE(path.stat().st_mode):04o})"
            raise NotPermittedError(
                f"{path} {whose}, and {user_name()} may not write it. {_how_to_share(root)}; to have jobs of your own, "
                "set DOVETAIL_JOBS to a folder of yours",
                param="DOVETAIL_JOBS",
            )


def _how_to_share(root: Path) -> str:
    if has_group(root):
        gid = root.stat().st_gid
        return f"The group {_group(gid)} shares {root}: ask to be added to it"
    how = f"chgrp GROUP {root} && chmod 3770 {root} && dovetail job list"
    return f"To share these jobs, {owner(root)} runs `{how}`, where GROUP has both of you"


def owner(path: Path) -> str:
    """Return the name of the file's owner."""
    return _name(path.stat().st_uid)


def user_name() -> str:
    """Return the user of this process, by its user id: after `su`, $USER may name another."""
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
    """Set the mode whatever the umask; some file systems have no modes."""
    with contextlib.suppress(OSError):
        os.chmod(path, mode)
