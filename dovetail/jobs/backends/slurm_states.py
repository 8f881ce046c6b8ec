"""What squeue says of a job, in our words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dovetail.jobs.backends.backend import Observed
from dovetail.jobs.outcome import deciding
from dovetail.jobs.spec import Spec

WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESIZING", "SPECIAL_EXIT", "SUSPENDED")
RUNNING = ("RUNNING", "COMPLETING", "SIGNALING", "STAGE_OUT", "STOPPED")
# A node's end is no fault of the program's, and a limit of time is met by going on in the next job.
TAKEN = {"PREEMPTED": "preempted", "TIMEOUT": "it reached Slurm's limit of time", "DEADLINE": "past its deadline"}
OUT_OF_MEMORY = 137


@dataclass(frozen=True)
class Seen:
    """One line of squeue."""

    id: str
    name: str
    state: str
    reason: str
    nodes: str
    comment: str

    @property
    def is_over(self) -> bool:
        return self.state not in WAITING and self.state not in RUNNING

    @property
    def is_held_back(self) -> bool:
        return self.state == "PENDING" and self.reason == "BeginTime"


def parse(text: str) -> list[Seen]:
    """Lines of `squeue -o "%i|%j|%T|%r|%N|%k"`."""
    rows = [line.split("|", 5) for line in text.splitlines() if line.count("|") >= 5]
    return [Seen(id, name, state, reason, nodes, comment.strip()) for id, name, state, reason, nodes, comment in rows]


def observed(seen: Seen, spec: Spec, codes: Sequence[int | None]) -> Observed:
    """`codes`: what the processes wrote, by rank."""
    hosts = _hosts(seen.nodes, spec)
    if seen.state in WAITING:
        return Observed("waiting", f"{seen.state}: {seen.reason}", (), handle=seen.id)
    if seen.state in RUNNING:
        return Observed("running", seen.state, hosts, handle=seen.id)
    if seen.state in TAKEN:
        return Observed("preempted", TAKEN[seen.state], hosts, handle=seen.id)
    code, rank = deciding([code or 0 for code in codes])
    if seen.state == "COMPLETED" and all(code == 0 for code in codes):
        return Observed("succeeded", "", hosts, 0, handle=seen.id)
    if seen.state == "OUT_OF_MEMORY":
        return Observed("failed", "out of memory", hosts, OUT_OF_MEMORY, rank, seen.id)
    # COMPLETED without the processes' codes: the batch script ended before they did
    detail = f"Slurm: {seen.state}" + (f" ({seen.reason})" if seen.reason not in ("", "None") else "")
    return Observed("failed", detail, hosts, code or None, rank, seen.id)


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
