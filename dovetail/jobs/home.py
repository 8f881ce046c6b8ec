"""Where jobs are kept: $DOVETAIL_JOBS, else $DOVETAIL_HOME/jobs, else the user's data directory.

    jobs.sqlite       the store
    snapshots/        code, by digest
    jobs/ID/          code/, run/ and attempts/N/rank0.log

A team shares a folder (modes.py), `export DOVETAIL_JOBS=/shared/lab/jobs`, or a Postgres, `postgresql://jobs@lab.example/jobs`:
the store is then there, and the rest in $DOVETAIL_JOBS_FILES, or as if DOVETAIL_JOBS were not set.
"""

from __future__ import annotations

import os
from pathlib import Path

# SQLite's write-ahead log needs memory that all its readers share, which machines do not.
NETWORK = ("nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "beegfs", "ceph", "glusterfs", "9p", "fuse")


def jobs_home() -> Path:
    given = os.environ.get("DOVETAIL_JOBS_FILES" if database_url() else "DOVETAIL_JOBS", "")
    if given:
        return Path(given).expanduser()
    if os.environ.get("DOVETAIL_HOME"):
        return Path(os.environ["DOVETAIL_HOME"]).expanduser() / "jobs"
    data = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return Path(data).expanduser() / "dovetail" / "jobs"


def database_url() -> str:
    """Of the Postgres that holds the store; "" where a file does."""
    given = os.environ.get("DOVETAIL_JOBS", "")
    return given if given.startswith(("postgres:", "postgresql:")) else ""


def is_shared(folder: Path, mounts: Path = Path("/proc/mounts")) -> bool:
    """Whether other machines may write there: by the type of its file system."""
    try:
        rows = [line.split() for line in mounts.read_text().splitlines()]
    except OSError:
        return False
    whole = str(folder.resolve()).rstrip("/") + "/"
    # /proc/mounts writes a space as \040; the longest mount point above the folder holds it
    found = [(row[1].replace("\\040", " ").rstrip("/") + "/", row[2]) for row in rows if len(row) > 2]
    above = [(point, kind) for point, kind in found if whole.startswith(point)]
    kind = max(above, key=lambda one: len(one[0]), default=("", ""))[1]
    return kind.partition(".")[0] in NETWORK
