"""What the owner of a job asked for, in a file of the owner's own.

Colleagues who share a store can write its tables: a Postgres knows no Unix users, and a shared SQLite file is one file.
So a supervisor starts a job only where the spec in the table is the one in this file, which lies in a folder that only
its user can write. What others may ask for through the table is to stop a job, or to run it again as it is.
"""

from __future__ import annotations

from pathlib import Path

from dovetail.core.errors import UserError
from dovetail.core.files import check_own_folder, read_own
from dovetail.jobs import modes

FILE = "asked.yaml"  # in the job's folder


def make_home(home: Path) -> None:
    """Make a job's folder, which in a shared home only its user may write."""
    modes.make_folder(home.parent, modes.EACH)
    modes.make_folder(home, modes.OWN)


def keep(home: Path, spec: str, snapshot: str) -> None:
    """Write it, for the user who runs this."""
    make_home(home)
    modes.write_text(home / FILE, _whole(spec, snapshot))


def check(home: Path, spec: str, snapshot: str) -> None:
    """Raise ValueError unless this user asked for this spec and this code."""
    try:
        check_own_folder(home)
        found = read_own(home / FILE).decode()
    except OSError as error:
        raise UserError(
            f"there is no file {FILE} of {modes.user_name()} that asks for this job ({error}), so it may be another "
            "user's: it is not run; create it again if it is yours"
        ) from None
    if found != _whole(spec, snapshot):
        raise UserError(
            f"the spec in the table of jobs is not the one that {modes.user_name()} asked for in {home / FILE}: it is "
            "not run; create the job again"
        )


def _whole(spec: str, snapshot: str) -> str:
    return f"# code: {snapshot or 'none'}\n{spec}"
