"""A Slurm cluster, through its commands. The folder of jobs must be on a file system that its nodes share.

An attempt is a Slurm job whose name ends with the attempt's. A preempted job saves, is requeued, and continues the same
attempt when it starts again. If requeueing is not allowed it ends, and the supervisor makes the next attempt. Exit
codes are read from files that the processes write: many clusters keep no accounting, and squeue forgets jobs within
minutes.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dovetail.core.errors import UnsupportedError, UserError
from dovetail.jobs import files, script, secrets
from dovetail.jobs.backends import slurm_script
from dovetail.jobs.backends.backend import (
    LogPart,
    Observed,
    RefusedJobError,
    UnavailableError,
    before_request,
    read_log,
)
from dovetail.jobs.job import PREFIX, Attempt, Resource
from dovetail.jobs.outcome import deciding
from dovetail.jobs.spec import Spec

TIMEOUT_S = 60.0
NO_SLURM = "run dovetail on a machine that submits to Slurm"
# Messages of a controller that is away or busy; other messages are about the request.
AWAY = (
    "unable to contact slurm controller", "socket timed out", "connection refused", "zero bytes were transmitted",
    "temporarily unable", "resource temporarily unavailable", "munge", "protocol authentication error",
    "slurm backup controller in standby", "too many", "slurmctld is busy",
)  # fmt: skip
WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESIZING", "SPECIAL_EXIT", "SUSPENDED")
RUNNING = ("RUNNING", "COMPLETING", "SIGNALING", "STAGE_OUT", "STOPPED")
# A time limit counts as a preemption: the next attempt continues.
TAKEN = {"PREEMPTED": "preempted", "TIMEOUT": "it reached Slurm's time limit", "DEADLINE": "past its deadline"}
CANCELLED = "cancelled in Slurm (scancel)"
OUT_OF_MEMORY = 137
FORMAT = "%i|%j|%T|%r|%N|%P|%k"
# Reasons of a pending job that do not go away with time.
STUCK = {
    "PartitionConfig": "the partition cannot satisfy the request: change hosts or slurm.partition",
    "PartitionNodeLimit": "it asks for more nodes than the partition allows: change hosts or slurm.partition",
    "PartitionTimeLimit": "it asks for more time than the partition allows: change slurm.time or slurm.partition",
    "BadConstraints": "no node has what it asks for: change slurm.constraint, cpus_per_task, mem or gpus_per_node",
    "InvalidAccount": "slurm.account does not exist, or may not be used",
    "InvalidQOS": "slurm.qos does not exist, or may not be used",
    "AccountNotAllowed": "slurm.account may not use this partition",
    "QOSNotAllowed": "slurm.qos may not be used in this partition",
    "ReservationDeleted": "the reservation no longer exists",
    "JobHeldUser": "it is held: `scontrol release` releases it",
    "JobHeldAdmin": "an administrator holds it",
}
LIMIT = "it asks for more than this limit allows one job"  # AssocMaxNodePerJobLimit and similar reasons


class SlurmBackend:
    """Run jobs on the Slurm cluster of this machine.

    Args:
        root: The folder of jobs.
        owner: The store's label, in the comment of each Slurm job.
    """

    def __init__(self, root: Path, owner: str = "") -> None:
        self.root, self.owner = Path(root), owner

    def check(self, spec: Spec) -> None:
        """Raise UserError for a spec that can never start here."""
        if spec.mounts:
            raise UnsupportedError(
                "`mounts` are for cloud machines; with backend slurm, use the path of a shared folder in the command",
                param="mounts",
            )
        if shutil.which("sbatch") is None:
            raise UnsupportedError(f"there is no sbatch here: {NO_SLURM}", param="backend", code="no_slurm")
        for name in (spec.accelerator, *spec.others):
            slurm_script.gpus(replace(spec, accelerator=name))

    def create(self, attempt: Attempt) -> str:
        """Submit the attempt, unless Slurm has it already; return Slurm's job id."""
        with before_request():
            self.check(attempt.spec)
            values = secrets.read(attempt.home, attempt.spec)
        if there := _rows("--name", f"{slurm_script.job_name(attempt)},{attempt.name}"):
            return there[-1].id
        folder = attempt.folder
        files.make_folder(folder)
        files.write_text(folder / "script.sh", script.script(attempt.spec, script.interpreter(attempt.spec)))
        files.write_text(folder / "rank.sh", slurm_script.rank_script(attempt))
        files.write_text(folder / "batch.sh", slurm_script.batch_script(attempt))
        for rank in range(attempt.spec.processes):  # the nodes append to them
            files.touch(attempt.log(rank))
        options = slurm_script.options(attempt, f"dovetail:{self.owner}")
        # --export=ALL gives the nodes the environment of sbatch
        environ = secrets.inherited(os.environ) | values
        made = _call(["sbatch", "--parsable", *options, str(folder / "batch.sh")], environ)
        return made.strip().partition(";")[0]

    def observe(self, attempt: Attempt) -> Observed:
        """Return the state of an attempt, from squeue and the files of its processes."""
        try:
            seen = self._seen(attempt)
            if seen is not None and seen.is_held_back:
                # Slurm delays a requeued job by two minutes; its owner may start it now.
                _call(["scontrol", "update", f"JobId={seen.id}", "StartTime=now"])
        except UserError as error:
            return Observed("unknown", str(error))
        codes = _codes(attempt)
        if (seen is None or seen.is_over) and (attempt.folder / "deleted").exists():
            return Observed("absent")
        if seen is None:
            if (attempt.folder / slurm_script.CANCELLED).exists():
                return Observed("cancelled", CANCELLED)
            return _from_files(codes, attempt.spec.processes)
        return replace(observed(seen, attempt.spec, codes), restarts=_restarts(attempt, seen), zone=seen.partition)

    def _seen(self, attempt: Attempt) -> SqueueRow | None:
        """Return the job's row of squeue; None once squeue has forgotten it."""
        by = ("--jobs", attempt.handle) if attempt.handle else ("--name", slurm_script.job_name(attempt))
        try:
            rows = [one for one in _rows(*by) if one.attempt == attempt.name]
        except UserError as error:
            if "invalid job id" in str(error).lower():
                return None
            raise
        return rows[-1] if rows else None

    def stop(self, attempt: Attempt, grace: float) -> None:
        """Signal the steps, not the batch script, which waits for them; cancel a pending job."""
        (attempt.folder / "stop").touch()
        seen = self._seen(attempt)
        if seen is None or seen.is_over:
            return
        if seen.state == "PENDING":
            _call(["scancel", seen.id])
        elif grace > 0:
            _call(["scancel", f"--signal={slurm_script.STOP}", seen.id])
        else:  # only the step: a SIGKILL for the whole job waits for Slurm's KillWait
            _call(["scancel", "--signal=KILL", f"{seen.id}.0"])

    def delete(self, resource: Resource) -> None:
        """Cancel the Slurm job of an attempt."""
        if resource.attempt is not None:
            job, number = resource.attempt
            folder = self.root / "jobs" / job / "attempts" / str(number)
            files.make_folder(folder)
            (folder / "stop").touch()
            (folder / "deleted").touch()
        for row in _rows():  # by the end of the name: the job, with whose name it begins, may not be known here
            if row.attempt == resource.name and not row.is_over:
                _call(["scancel", row.id])

    def list(self) -> Sequence[Resource]:
        """Return this user's Slurm jobs with our comment that are not over."""
        rows = _rows("--user", files.user_name())
        ours = [row for row in rows if row.comment == f"dovetail:{self.owner}" and row.attempt and not row.is_over]
        return [Resource(row.attempt, "", row.id) for row in ours]

    def logs(self, attempt: Attempt, rank: int, since: int = 0) -> LogPart:
        """Return a part of a rank's log."""
        return read_log(attempt.log(rank), since)

    def command(self, attempt: Attempt, rank: int) -> list[str]:
        """Return an srun command that opens a shell on the node of a rank."""
        seen = self._seen(attempt)
        if seen is None or seen.state != "RUNNING":
            raise UserError(f"{attempt.name} is not running: there is no node to open a shell on", param="JOB")
        node = expand(seen.nodes)[rank // attempt.spec.slurm.tasks_per_node]
        return ["srun", "--jobid", seen.id, "--overlap", "--nodelist", node, "--ntasks=1", "--pty", "sh", "-l"]


def _rows(*options: str) -> list[SqueueRow]:
    """Return the jobs that Slurm knows, including those that are over."""
    return parse(_call(["squeue", "-h", "-t", "all", "-o", FORMAT, *options]))


def _restarts(attempt: Attempt, seen: SqueueRow) -> int:
    """Return how often Slurm requeued the job, by what the batch script wrote when it last began."""
    path = attempt.folder / slurm_script.RESTARTS
    text = path.read_text().strip() if path.exists() else ""
    return int(text) + (seen.state in WAITING) if text.isdecimal() else 0


def _codes(attempt: Attempt) -> list[int | None]:
    """Return the exit code of each rank that has written one."""
    found: list[int | None] = []
    for rank in range(attempt.spec.processes):
        path = attempt.folder / f"exit.{rank}"
        text = path.read_text().strip() if path.exists() else ""
        found.append(int(text) if text.isdecimal() else None)
    return found


def _from_files(codes: Sequence[int | None], processes: int) -> Observed:
    """Return the state of an attempt that Slurm has forgotten, from the exit codes alone."""
    ended = [code for code in codes if code is not None]
    if len(ended) < processes and not any(ended):
        return Observed("absent", "Slurm does not know it, and its processes left no exit code")
    code, rank = deciding([code or 0 for code in codes])
    return Observed("succeeded", "", (), 0) if code == 0 else Observed("failed", "", (), code, rank)


def _call(command: list[str], environ: dict[str, str] | None = None) -> str:
    """Return a command's output; raise UnavailableError if the controller does not answer, UserError if it refuses."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, stdin=subprocess.DEVNULL,
            env=environ,
        )  # fmt: skip
    except FileNotFoundError:
        raise RefusedJobError(f"there is no {command[0]} here: {NO_SLURM}", code="no_slurm") from None
    except subprocess.TimeoutExpired:
        raise UnavailableError(f"{command[0]} did not answer in {TIMEOUT_S:g} s") from None
    if done.returncode == 0:
        return done.stdout
    why = " ".join((done.stderr or done.stdout).split())
    if any(word in why.lower() for word in AWAY):
        raise UnavailableError(f"{command[0]}: {why}")
    raise UserError(f"{shlex.join(command[:2])}: {why}", code="slurm_refused")


# --- what squeue reports ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SqueueRow:
    """Hold one line of squeue."""

    id: str
    name: str
    state: str
    reason: str
    nodes: str
    partition: str
    comment: str

    @property
    def attempt(self) -> str:
        """Return the attempt's name, with which the job's name ends; "" for jobs of others."""
        found = re.search(rf"(?:^|-)({PREFIX}-[a-z0-9]+-\d+)$", self.name)
        return found[1] if found else ""

    @property
    def is_over(self) -> bool:
        """Return whether the job has ended."""
        return self.state not in WAITING and self.state not in RUNNING

    @property
    def is_held_back(self) -> bool:
        """Return whether Slurm delays the job after a requeue."""
        return self.state == "PENDING" and self.reason == "BeginTime"


def parse(text: str) -> list[SqueueRow]:
    """Parse the output of `squeue -o FORMAT`."""
    rows = [line.strip().split("|", 6) for line in text.splitlines() if line.count("|") >= 6]
    return [SqueueRow(*row) for row in rows]


def observed(seen: SqueueRow, spec: Spec, codes: Sequence[int | None]) -> Observed:
    """Return the state of an attempt; `codes` are the exit codes that the processes wrote, by rank."""
    hosts = _hosts(seen.nodes, spec)
    if seen.state in WAITING:
        return Observed("waiting", _reason(seen), (), handle=seen.id)
    if seen.state in RUNNING:
        return Observed("running", seen.state, hosts, handle=seen.id)
    if seen.state in TAKEN:
        return Observed("preempted", TAKEN[seen.state], hosts, handle=seen.id)
    code, rank = deciding([code or 0 for code in codes])
    if seen.state == "CANCELLED":  # by a person: preemptions by Slurm have other states
        return Observed("cancelled", CANCELLED, hosts, code or None, rank, seen.id)
    if seen.state == "COMPLETED" and all(code == 0 for code in codes):
        return Observed("succeeded", "", hosts, 0, handle=seen.id)
    if seen.state == "OUT_OF_MEMORY":
        return Observed("failed", "out of memory", hosts, OUT_OF_MEMORY, rank, seen.id)
    # COMPLETED without exit codes: the batch script ended before the processes did
    detail = f"Slurm: {seen.state}" + (f" ({seen.reason})" if seen.reason not in ("", "None") else "")
    return Observed("failed", detail, hosts, code or None, rank, seen.id)


def _reason(seen: SqueueRow) -> str:
    """Return Slurm's reason for waiting, and what to do about one that does not go away."""
    why = STUCK.get(seen.reason, LIMIT if seen.reason.endswith("PerJobLimit") else "")
    return f"Slurm: {seen.state}: {seen.reason}" + (f": {why}" if why else "")


def _hosts(nodes: str, spec: Spec) -> tuple[str, ...]:
    """Return the node of each rank."""
    if not nodes:
        return ()
    return tuple(host for host in expand(nodes) for _ in range(spec.slurm.tasks_per_node))


def expand(nodes: str) -> list[str]:
    """Expand `gpu[003-005,9],login` to gpu003, gpu004, gpu005, gpu9, login."""
    found, name, depth = [], "", 0
    for letter in nodes + ",":
        depth += (letter == "[") - (letter == "]")
        if letter == "," and depth == 0:
            found += _expanded(name)
            name = ""
        else:
            name += letter
    return found


def _expanded(name: str) -> list[str]:
    before, bracket, rest = name.partition("[")
    if not bracket:
        return [name] if name else []
    inner, _, after = rest.partition("]")
    found = []
    for part in inner.split(","):
        first, dash, last = part.partition("-")
        numbers = range(int(first), int(last) + 1) if dash else None
        found += [f"{n:0{len(first)}d}" for n in numbers] if numbers is not None else [first]
    return [f"{before}{number}{tail}" for number in found for tail in (_expanded(after) or [""])]
