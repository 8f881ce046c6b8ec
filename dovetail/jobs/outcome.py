"""Whose fault an attempt's end was: the backend's (a preemption), a machine's (a fault) or the program's (a failure).

Read from the exit code, the signal, the backend's word and the last lines of the log. Each kind has a budget of its
own: a week of preemptions says nothing about the program, and a bug is not cured by a new machine.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from dovetail.jobs.backends.backend import Observed
from dovetail.jobs.spec import Spec

# unavailable: the place had none to give; mistake: the same on every machine and at every time; stopped: by us;
# cancelled: by a person, with the backend's own command.
Kind = Literal["success", "preemption", "fault", "failure", "mistake", "stopped", "cancelled", "unavailable"]

# The codes of train/guard/exits.py, which jobs may not import: a test holds them equal.
PREEMPTED, QUARANTINE, HUNG, TROUBLE, LOST, ABORTED = 85, 86, 87, 88, 89, 134
NO_FOLDER, NO_ENVIRONMENT = 90, 91  # of our own script, before the command
SIGTERM, SIGKILL = 128 + 15, 128 + 9
FOLLOWERS = (LOST, ABORTED, SIGTERM)  # how ranks end because another one did

MEANING = {
    PREEMPTED: "stopped in good order and saved",
    QUARANTINE: "the host's hardware is at fault",
    HUNG: "no step ended for too long",
    TROUBLE: "the health budget is spent: a person has to look at health.jsonl",
    LOST: "another process of the run was lost",
    ABORTED: "aborted (XLA, or the program itself)",
    NO_FOLDER: "the code's folder is not there",
    NO_ENVIRONMENT: "the environment could not be set up",
    SIGTERM: "ended by SIGTERM",
    SIGKILL: "killed (by hand, or by the system for want of memory)",
}
KINDS: dict[int, Kind] = {
    PREEMPTED: "preemption", SIGTERM: "preemption", QUARANTINE: "fault", HUNG: "fault", LOST: "fault",
    ABORTED: "fault", SIGKILL: "fault", TROUBLE: "mistake",
}  # fmt: skip
# What a machine's fault looks like in a program's last lines, when the exit code is an ordinary 1.
FAULT_LINES = re.compile(
    r"uncorrectable ECC|CUDA_ERROR_(?:ECC|HARDWARE|ILLEGAL_INSTRUCTION)|Xid \d+|"
    r"NCCL.*(?:unhandled system|remote) error|"
    r"Bus error|Stale file handle|Transport endpoint is not connected|Input/output error|"
    r"coordination service.*(?:unavailable|error)|TPU is already in use|Failed to connect to .*:8476",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Outcome:
    kind: Kind
    says: str  # one line


def deciding(codes: Sequence[int], order: Sequence[int] = ()) -> tuple[int, int | None]:
    """(exit code, rank) of several processes' end: of those that failed, the first one that did not merely follow
    another. `order`: ranks as they ended."""
    failed = [rank for rank in (order or range(len(codes))) if codes[rank]]
    if not failed:
        return 0, None
    leaders = [rank for rank in failed if codes[rank] not in FOLLOWERS]
    saved = [rank for rank in leaders if codes[rank] == PREEMPTED]
    rank = (([r for r in leaders if r not in saved]) or saved or failed)[0]
    return codes[rank], rank


def outcome(seen: Observed, spec: Spec, tail: str = "", asked: bool = False) -> Outcome:
    """`asked`: whether we had told it to stop. `tail`: the last lines of the failing rank's log."""
    if seen.state == "succeeded":
        return Outcome("success", "done")
    if seen.state == "cancelled":
        return _asked(Outcome("cancelled", seen.detail), asked)
    if seen.state in ("preempted", "suspended"):
        return _asked(Outcome("preemption", seen.detail or seen.state), asked)
    if seen.state == "absent":
        kind = "preemption" if spec.tier in ("spot", "flex-start") else "fault"
        return _asked(Outcome(kind, seen.detail or f"it is gone from {spec.backend}"), asked)
    code = seen.exit_code
    if code is None:
        return _asked(Outcome("fault", seen.detail or "it ended, and nothing says how"), asked)
    who = "" if seen.failed_rank is None or spec.processes == 1 else f"rank {seen.failed_rank}: "
    says = f"{who}exit {code}: {MEANING.get(code, 'failed')}"
    last = error_line(tail)
    if code not in KINDS and FAULT_LINES.search(tail):
        return _asked(Outcome("fault", f"{says}: {last}" if last else says), asked)
    kind = KINDS.get(code, "failure")
    if (spec.recipe and code == 2) or code in (NO_FOLDER, 126, 127):
        kind = "mistake"  # a wrong key of the recipe, or no such command: the same on every machine
    if kind in ("failure", "mistake") and last:
        says = f"{says}: {last}"
    return _asked(Outcome(kind, says), asked and kind != "failure")


def _asked(found: Outcome, asked: bool) -> Outcome:
    return Outcome("stopped", found.says) if asked and found.kind in ("preemption", "fault", "cancelled") else found


ERROR = re.compile(r"^(?:\w+(?:\.\w+)*(?:Error|Exception|Exit)\b.*|error: .*|internal error: .*|fatal: .*)", re.I)


def error_line(tail: str) -> str:
    """The last line that reads like an error, else the last line."""
    lines = [line.strip() for line in tail.splitlines() if line.strip()]
    errors = [line for line in lines if ERROR.match(line)]
    return ((errors or lines or [""])[-1])[:300]
