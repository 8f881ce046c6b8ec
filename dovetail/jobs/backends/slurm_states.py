"""What squeue says of a job, in our words."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from dovetail.jobs.attempt import PREFIX
from dovetail.jobs.backends.backend import Observed
from dovetail.jobs.outcome import deciding
from dovetail.jobs.spec import Spec

WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESIZING", "SPECIAL_EXIT", "SUSPENDED")
RUNNING = ("RUNNING", "COMPLETING", "SIGNALING", "STAGE_OUT", "STOPPED")
# A node's end is no fault of the program's, and a limit of time is met by going on in the next job.
TAKEN = {"PREEMPTED": "preempted", "TIMEOUT": "it reached Slurm's limit of time", "DEADLINE": "past its deadline"}
CANCELLED = "cancelled in Slurm (scancel)"
OUT_OF_MEMORY = 137
FORMAT = "%i|%j|%T|%r|%N|%P|%k"
# Reasons of a pending job that time alone does not remove.
STUCK = {
    "PartitionConfig": "the partition cannot meet the request: change hosts or slurm.partition",
    "PartitionNodeLimit": "it asks for more nodes than the partition allows: change hosts or slurm.partition",
    "PartitionTimeLimit": "it asks for more time than the partition allows: change slurm.time or slurm.partition",
    "BadConstraints": "no node has what it asks for: change slurm.constraint, cpus_per_task, mem or gpus_per_node",
    "InvalidAccount": "slurm.account does not exist, or may not be used",
    "InvalidQOS": "slurm.qos does not exist, or may not be used",
    "AccountNotAllowed": "slurm.account may not use this partition",
    "QOSNotAllowed": "slurm.qos may not be used in this partition",
    "ReservationDeleted": "the reservation does not exist any more",
    "JobHeldUser": "it is held: `scontrol release` lets it go",
    "JobHeldAdmin": "an administrator holds it",
}
LIMIT = "it asks for more than this limit allows one job"  # AssocMaxNodePerJobLimit and its many relatives


@dataclass(frozen=True)
class Seen:
    """One line of squeue."""

    id: str
    name: str
    state: str
    reason: str
    nodes: str
    partition: str
    comment: str

    @property
    def attempt(self) -> str:
        """The attempt's name, which the job's name ends with; "" where it is none of ours."""
        found = re.search(rf"(?:^|-)({PREFIX}-[a-z0-9]+-\d+)$", self.name)
        return found[1] if found else ""

    @property
    def is_over(self) -> bool:
        return self.state not in WAITING and self.state not in RUNNING

    @property
    def is_held_back(self) -> bool:
        return self.state == "PENDING" and self.reason == "BeginTime"


def parse(text: str) -> list[Seen]:
    """Read lines of `squeue -o FORMAT`."""
    rows = [line.strip().split("|", 6) for line in text.splitlines() if line.count("|") >= 6]
    return [Seen(*row) for row in rows]


def observed(seen: Seen, spec: Spec, codes: Sequence[int | None]) -> Observed:
    """`codes`: what the processes wrote, by rank."""
    hosts = _hosts(seen.nodes, spec)
    if seen.state in WAITING:
        return Observed("waiting", _waits(seen), (), handle=seen.id)
    if seen.state in RUNNING:
        return Observed("running", seen.state, hosts, handle=seen.id)
    if seen.state in TAKEN:
        return Observed("preempted", TAKEN[seen.state], hosts, handle=seen.id)
    code, rank = deciding([code or 0 for code in codes])
    if seen.state == "CANCELLED":  # by a person: what Slurm itself takes away has other states
        return Observed("cancelled", CANCELLED, hosts, code or None, rank, seen.id)
    if seen.state == "COMPLETED" and all(code == 0 for code in codes):
        return Observed("succeeded", "", hosts, 0, handle=seen.id)
    if seen.state == "OUT_OF_MEMORY":
        return Observed("failed", "out of memory", hosts, OUT_OF_MEMORY, rank, seen.id)
    # COMPLETED without the processes' codes: the batch script ended before they did
    detail = f"Slurm: {seen.state}" + (f" ({seen.reason})" if seen.reason not in ("", "None") else "")
    return Observed("failed", detail, hosts, code or None, rank, seen.id)


def _waits(seen: Seen) -> str:
    """Why it waits: Slurm's word, and for what does not pass by itself what to do."""
    why = STUCK.get(seen.reason, LIMIT if seen.reason.endswith("PerJobLimit") else "")
    return f"Slurm: {seen.state}: {seen.reason}" + (f": {why}" if why else "")


def _hosts(nodes: str, spec: Spec) -> tuple[str, ...]:
    """Each node as often as it has processes. `gpu[003-005]` is written out."""
    if not nodes:
        return ()
    return tuple(host for host in expand(nodes) for _ in range(spec.slurm.tasks_per_node))


def expand(nodes: str) -> list[str]:
    """`gpu[003-005,9],login` -> gpu003, gpu004, gpu005, gpu9, login."""
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
