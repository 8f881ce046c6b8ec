"""A Slurm cluster, through its commands. The home of jobs must lie on a file system that its nodes share.

An attempt is a Slurm job whose name ends with the attempt's. Preempted, it saves, goes back into the queue and is
the same attempt when it starts again; where that is not allowed it ends, and the supervisor makes the next attempt.
Exit codes are read from files that the processes write: many clusters keep no accounts, and squeue forgets in minutes.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dovetail.core.errors import UserError
from dovetail.jobs import modes, script, secrets
from dovetail.jobs.attempt import Attempt, Resource
from dovetail.jobs.backends import slurm_script
from dovetail.jobs.backends.backend import LogPart, Observed, Refused, Unavailable, unasked
from dovetail.jobs.backends.log_file import read
from dovetail.jobs.backends.slurm_states import CANCELLED, FORMAT, WAITING, Seen, expand, observed, parse
from dovetail.jobs.outcome import deciding
from dovetail.jobs.sensitive import inherited
from dovetail.jobs.spec import Spec

TIMEOUT_S = 60.0
# What a controller that is away or busy says; anything else is about the request.
AWAY = (
    "unable to contact slurm controller", "socket timed out", "connection refused", "zero bytes were transmitted",
    "temporarily unable", "resource temporarily unavailable", "munge", "protocol authentication error",
    "slurm backup controller in standby", "too many", "slurmctld is busy",
)  # fmt: skip


class Slurm:
    """`root`: the home of jobs. `owner`: the store's label, in each job's comment."""

    def __init__(self, root: Path, owner: str = "") -> None:
        self.root, self.owner = Path(root), owner

    def check(self, spec: Spec) -> None:
        if spec.mounts:
            raise UserError("mounts are for machines in the cloud: name a folder that the nodes share in the command")
        if shutil.which("sbatch") is None:
            raise UserError("there is no sbatch here: run dovetail on a machine that submits to Slurm")
        for name in (spec.accelerator, *spec.others):
            slurm_script.gpus(replace(spec, accelerator=name))

    def create(self, attempt: Attempt) -> str:
        with unasked():
            self.check(attempt.spec)
            values = secrets.read(attempt.home, attempt.spec)
        if there := _rows("--name", f"{slurm_script.job_name(attempt)},{attempt.name}"):
            return there[-1].id
        folder = attempt.folder
        modes.make_folder(folder)
        modes.write_text(folder / "script.sh", script.script(attempt.spec, script.interpreter(attempt.spec)))
        modes.write_text(folder / "rank.sh", slurm_script.rank_script(attempt))
        modes.write_text(folder / "batch.sh", slurm_script.batch_script(attempt))
        for rank in range(attempt.spec.processes):  # which the nodes append to
            modes.touch(attempt.log(rank))
        options = slurm_script.options(attempt, f"dovetail:{self.owner}")
        # --export=ALL gives the nodes the environment that sbatch itself has
        environ = inherited(os.environ) | values
        made = _call(["sbatch", "--parsable", *options, str(folder / "batch.sh")], environ)
        return made.strip().partition(";")[0]

    def observe(self, attempt: Attempt) -> Observed:
        try:
            seen = self._seen(attempt)
            if seen is not None and seen.is_held_back:
                # Slurm lets a job that was put back wait for two minutes; its owner may say that it need not
                _call(["scontrol", "update", f"JobId={seen.id}", "StartTime=now"])
        except (Unavailable, ValueError) as error:
            return Observed("unknown", str(error))
        codes = _codes(attempt)
        if (seen is None or seen.is_over) and (attempt.folder / "deleted").exists():
            return Observed("absent")
        if seen is None:
            if (attempt.folder / slurm_script.CANCELLED).exists():
                return Observed("cancelled", CANCELLED)
            return _from_files(codes, attempt.spec.processes)
        return replace(observed(seen, attempt.spec, codes), restarts=_restarts(attempt, seen), zone=seen.partition)

    def _seen(self, attempt: Attempt) -> Seen | None:
        """The job as squeue has it; None once it is forgotten there."""
        by = ("--jobs", attempt.handle) if attempt.handle else ("--name", slurm_script.job_name(attempt))
        try:
            rows = [one for one in _rows(*by) if one.attempt == attempt.name]
        except ValueError as error:
            if "invalid job id" in str(error).lower():
                return None
            raise
        return rows[-1] if rows else None

    def stop(self, attempt: Attempt, grace: float) -> None:
        """Signal the steps, not the batch script, which waits for them. A job that waits in the queue just goes."""
        (attempt.folder / "stop").touch()
        seen = self._seen(attempt)
        if seen is None or seen.is_over:
            return
        if seen.state == "PENDING":
            _call(["scancel", seen.id])
        elif grace > 0:
            _call(["scancel", f"--signal={slurm_script.STOP}", seen.id])
        else:  # the one step alone: a SIGKILL for the whole job waits for Slurm's KillWait
            _call(["scancel", "--signal=KILL", f"{seen.id}.0"])

    def delete(self, resource: Resource) -> None:
        if resource.attempt is not None:
            job, number = resource.attempt
            folder = self.root / "jobs" / job / "attempts" / str(number)
            modes.make_folder(folder)
            (folder / "stop").touch()
            (folder / "deleted").touch()
        for row in _rows():  # by the end of the name: the job, whose name it begins with, may be unknown here
            if row.attempt == resource.name and not row.is_over:
                _call(["scancel", row.id])

    def list(self) -> Sequence[Resource]:
        rows = _rows("--user", modes.user_name())
        ours = [row for row in rows if row.comment == f"dovetail:{self.owner}" and row.attempt and not row.is_over]
        return [Resource(row.attempt, "", row.id) for row in ours]

    def logs(self, attempt: Attempt, rank: int, since: int = 0) -> LogPart:
        return read(attempt.log(rank), since)

    def command(self, attempt: Attempt, rank: int) -> list[str]:
        seen = self._seen(attempt)
        if seen is None or seen.state != "RUNNING":
            raise UserError(f"{attempt.name} does not run now: there is no node to open a shell on")
        node = expand(seen.nodes)[rank // attempt.spec.slurm.tasks_per_node]
        return ["srun", "--jobid", seen.id, "--overlap", "--nodelist", node, "--ntasks=1", "--pty", "sh", "-l"]


def _rows(*options: str) -> list[Seen]:
    """The jobs that Slurm knows, over or not."""
    return parse(_call(["squeue", "-h", "-t", "all", "-o", FORMAT, *options]))


def _restarts(attempt: Attempt, seen: Seen) -> int:
    """How often Slurm put it back, by what the batch script wrote when it last began."""
    path = attempt.folder / slurm_script.RESTARTS
    text = path.read_text().strip() if path.exists() else ""
    return int(text) + (seen.state in WAITING) if text.isdecimal() else 0


def _codes(attempt: Attempt) -> list[int | None]:
    """Each rank's exit code, where it has written one."""
    found: list[int | None] = []
    for rank in range(attempt.spec.processes):
        path = attempt.folder / f"exit.{rank}"
        text = path.read_text().strip() if path.exists() else ""
        found.append(int(text) if text.isdecimal() else None)
    return found


def _from_files(codes: Sequence[int | None], processes: int) -> Observed:
    """Forgotten by Slurm: what the processes wrote is all there is."""
    ended = [code for code in codes if code is not None]
    if len(ended) < processes and not any(ended):
        return Observed("absent", "Slurm does not know it, and its processes left no exit code")
    code, rank = deciding([code or 0 for code in codes])
    return Observed("succeeded", "", (), 0) if code == 0 else Observed("failed", "", (), code, rank)


def _call(command: list[str], environ: dict[str, str] | None = None) -> str:
    """Its output. Unavailable where the controller does not answer, ValueError where it refuses."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, stdin=subprocess.DEVNULL,
            env=environ,
        )  # fmt: skip
    except FileNotFoundError:
        raise Refused(f"there is no {command[0]} here: run dovetail on a machine that submits to Slurm") from None
    except subprocess.TimeoutExpired:
        raise Unavailable(f"{command[0]} did not answer in {TIMEOUT_S:g} s") from None
    if done.returncode == 0:
        return done.stdout
    why = " ".join((done.stderr or done.stdout).split())
    if any(word in why.lower() for word in AWAY):
        raise Unavailable(f"{command[0]}: {why}")
    raise UserError(f"{shlex.join(command[:2])}: {why}")
