"""The user's own command at the end of a job."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from dovetail.jobs import modes
from dovetail.jobs.job import Job
from dovetail.jobs.spec import Spec


def notify(job: Job, spec: Spec, home: Path) -> None:
    """Start it and go on: its output is in the job's folder, and what it does is its own affair."""
    modes.make_folder(home)
    told = {"DOVETAIL_JOB": job.id, "DOVETAIL_JOB_NAME": job.name, "DOVETAIL_JOB_STATUS": job.status}
    with open(home / "notify.log", "ab", opener=modes.opener) as log:
        # a shell that starts the command and ends: nobody has to wait for it
        subprocess.run(
            ["sh", "-c", f"({spec.notify}\n) &"], stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=home,
            env=os.environ | told, start_new_session=True, check=False,
        )  # fmt: skip
