"""One start of a job: what a backend is given to make, to look at and to remove."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dovetail.jobs.spec import Spec

PREFIX = "dt"
CALL = "call"  # in the job's folder: a remote function and what it returns (jobs/remote.py)


@dataclass(frozen=True)
class Resource:
    """What a backend holds under one name: all that it takes to remove it, its job known or not."""

    name: str
    zone: str = ""
    handle: str = ""  # the backend's own id (Slurm's job number), where it has one

    @property
    def attempt(self) -> tuple[str, int] | None:
        """(job, number), where the name is one that Attempt made."""
        match = re.fullmatch(rf"{PREFIX}-([a-z0-9]+)-(\d+)", self.name)
        return (match[1], int(match[2])) if match else None


@dataclass(frozen=True)
class Attempt:
    """The name is made of the job and the number alone, so that a create that is made twice makes one."""

    job: str  # its id: lower-case letters and digits, begins with a letter
    number: int  # from 1
    spec: Spec  # with the accelerator of this attempt
    home: Path  # the job's folder here: code.tar.gz, code/, run/ and attempts/N
    owner: str = ""  # of the store: the label by which a backend tells ours from others' (lower-case letters, digits)
    zone: str = ""
    handle: str = ""  # what create returned; "" before
    exclude: tuple[str, ...] = ()  # hosts in quarantine
    snapshot: str = ""  # the code's digest, of home/code.tar.gz; "": none

    @property
    def name(self) -> str:
        return f"{PREFIX}-{self.job}-{self.number}"

    @property
    def folder(self) -> Path:
        """Its own: logs, and what the backend keeps."""
        return self.home / "attempts" / str(self.number)

    @property
    def is_call(self) -> bool:
        """Whether it is a remote function."""
        return (self.home / CALL).is_dir()

    @property
    def resource(self) -> Resource:
        return Resource(self.name, self.zone, self.handle)

    def log(self, rank: int) -> Path:
        """Where a backend that writes (or fetches) logs on this machine has them."""
        return self.folder / f"rank{rank}.log"

    @property
    def variables(self) -> dict[str, str]:
        """What every process is told, beside who it is. DOVETAIL_JOB_DIR is the backend's to say."""
        return {
            "DOVETAIL_JOB": self.job,
            "DOVETAIL_JOB_NAME": self.spec.name,
            "DOVETAIL_ATTEMPT": str(self.number),
        }
