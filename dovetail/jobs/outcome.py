"""Why an attempt ended, and what follows: the job is over, or it is tried again.

The cause is read from the exit code, the signal, the backend's report and the last lines of the log. Preemptions
(by the backend), faults (of a machine) and failures (of the program) have separate budgets: many preemptions do not
mean that the program is wrong, and a new machine does not repair a program.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from dovetail.jobs import cost
from dovetail.jobs.backends.backend import Observed
from dovetail.jobs.job import AttemptRow, Job
from dovetail.jobs.spec import Spec

# unavailable: the place has no capacity. mistake: fails the same way on every machine at any time. stopped: by the
# supervisor. cancelled: by a person with the backend's own command (scancel).
Kind = Literal["success", "preemption", "fault", "failure", "mistake", "stopped", "cancelled", "unavailable"]

# The codes of train/guard/exits.py, which jobs may not import: a test holds them equal.
PREEMPTED, QUARANTINE, HUNG, TROUBLE, LOST, ABORTED = 85, 86, 87, 88, 89, 134
NO_FOLDER, NO_ENVIRONMENT = 90, 91  # of our own script, before the command
SIGTERM, SIGKILL = 128 + 15, 128 + 9
FOLLOWERS = (LOST, ABORTED, SIGTERM)  # codes of ranks that end because another one did

MEANING = {
    PREEMPTED: "saved after a stop signal",
    QUARANTINE: "the host's hardware is at fault",
    HUNG: "no step ended for too long",
    TROUBLE: "the health budget is spent: see health.jsonl",
    LOST: "another process of the run was lost",
    ABORTED: "aborted (by XLA or the program itself)",
    NO_FOLDER: "the code's folder does not exist",
    NO_ENVIRONMENT: "the environment could not be set up",
    SIGTERM: "ended by SIGTERM",
    SIGKILL: "killed (by a person, or by the system for lack of memory)",
}
KINDS: dict[int, Kind] = {
    PREEMPTED: "preemption", SIGTERM: "preemption", QUARANTINE: "fault", HUNG: "fault", LOST: "fault",
    ABORTED: "fault", SIGKILL: "fault", TROUBLE: "mistake",
}  # fmt: skip
# Signs of a machine's fault in the last lines of a log, where the exit code is an ordinary 1.
FAULT_LINES = re.compile(
    r"uncorrectable ECC|CUDA_ERROR_(?:ECC|HARDWARE|ILLEGAL_INSTRUCTION)|Xid \d+|"
    r"NCCL.*(?:unhandled system|remote) error|"
    r"Bus error|Stale file handle|Transport endpoint is not connected|Input/output error|"
    r"coordination service.*(?:unavailable|error)|TPU is already in use|Failed to connect to .*:8476",
    re.IGNORECASE,
)
ERROR = re.compile(r"^(?:\w+(?:\.\w+)*(?:Error|Exception|Exit)\b.*|error: .*|internal error: .*|fatal: .*)", re.I)
WORK_S = 600.0  # after an attempt that ran this long, the backoff starts from its first value again
STOP_AT = 0.9  # of a ceiling, at the earliest: the rest is for the grace period
_COUNTERS = {"preemption": "preemptions", "fault": "faults", "failure": "failures"}


# --- why it ended -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """Hold the cause of an attempt's end, with one line that explains it."""

    kind: Kind
    says: str


def deciding(codes: Sequence[int], order: Sequence[int] = ()) -> tuple[int, int | None]:
    """Return (exit code, rank) of the process that decided the end: the first that did not fail because of another.

    Args:
        codes: Exit codes by rank.
        order: Ranks in the order in which they ended.
    """
    failed = [rank for rank in (order or range(len(codes))) if codes[rank]]
    if not failed:
        return 0, None
    leaders = [rank for rank in failed if codes[rank] not in FOLLOWERS]
    saved = [rank for rank in leaders if codes[rank] == PREEMPTED]
    rank = (([r for r in leaders if r not in saved]) or saved or failed)[0]
    return codes[rank], rank


def outcome(seen: Observed, spec: Spec, tail: str = "", stop_sent: bool = False) -> Outcome:
    """Return the cause of an attempt's end.

    Args:
        seen: The backend's last observation.
        spec: The job's spec.
        tail: The last lines of the failing rank's log.
        stop_sent: Whether the supervisor had sent the stop signal.
    """
    if seen.state == "succeeded":
        return Outcome("success", "done")
    if seen.state == "cancelled":
        return _after_stop(Outcome("cancelled", seen.detail), stop_sent)
    if seen.state in ("preempted", "suspended"):
        return _after_stop(Outcome("preemption", seen.detail or seen.state), stop_sent)
    if seen.state == "absent":
        kind = "preemption" if spec.tier in ("spot", "flex-start") else "fault"
        return _after_stop(Outcome(kind, seen.detail or f"it no longer exists on {spec.backend}"), stop_sent)
    code = seen.exit_code
    if code is None:
        return _after_stop(Outcome("fault", seen.detail or "it ended without an exit code"), stop_sent)
    who = "" if seen.failed_rank is None or spec.processes == 1 else f"rank {seen.failed_rank}: "
    says = f"{who}exit {code}: {MEANING.get(code, 'failed')}"
    last = error_line(tail)
    if code not in KINDS and FAULT_LINES.search(tail):
        return _after_stop(Outcome("fault", f"{says}: {last}" if last else says), stop_sent)
    kind = KINDS.get(code, "failure")
    if (spec.recipe and code == 2) or code in (NO_FOLDER, 126, 127):
        kind = "mistake"  # a wrong key in the recipe, or an unknown command: the same on every machine
    if kind in ("failure", "mistake") and last:
        says = f"{says}: {last}"
    return _after_stop(Outcome(kind, says), stop_sent and kind != "failure")


def _after_stop(found: Outcome, stop_sent: bool) -> Outcome:
    stopped = stop_sent and found.kind in ("preemption", "fault", "cancelled")
    return Outcome("stopped", found.says) if stopped else found


def error_line(tail: str) -> str:
    """Return the last line that looks like an error, else the last line."""
    lines = [line.strip() for line in tail.splitlines() if line.strip()]
    errors = [line for line in lines if ERROR.match(line)]
    return ((errors or lines or [""])[-1])[:300]


# --- what follows -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NextStep:
    """Columns of the job to change, and the line for its history."""

    changes: dict[str, Any]
    says: str


def after(job: Job, spec: Spec, found: Outcome, ran: float, now: float) -> NextStep:
    """Decide what follows an attempt that ran for `ran` seconds."""
    if found.kind == "success":
        return over("succeeded", "", "succeeded", now)
    if job.wanted != "run":
        return over("cancelled", "", "cancelled", now)
    if found.kind == "cancelled":
        return over("cancelled", found.says, f"cancelled: {found.says}", now)
    if found.kind == "stopped":
        return over("stopped", job.detail or found.says, f"stopped: {job.detail or found.says}", now)
    if found.kind == "mistake":
        return over("failed", found.says, f"failed, without a retry: {found.says}", now)
    if found.kind == "unavailable":
        return _again(job, spec, found, {}, ran, now)
    counter = _COUNTERS[found.kind]
    used, most = getattr(job, counter) + 1, getattr(spec.retries, counter)
    if used > most:
        says = f"{found.says} (retries.{counter}: {most})"
        return NextStep(over("failed", says, "", now).changes | {counter: used}, f"failed: {says}")
    return _again(job, spec, found, {counter: used}, ran, now)


def over(status: str, detail: str, says: str, now: float) -> NextStep:
    """End the job with this status."""
    return NextStep({"status": status, "detail": detail, "ended": now}, says)


def _again(job: Job, spec: Spec, found: Outcome, counted: dict[str, int], ran: float, now: float) -> NextStep:
    in_a_row = 0 if ran > WORK_S else job.in_a_row
    wait = backoff(job, spec, in_a_row)
    # The place is not to blame for a failure of the program itself.
    place = job.place if found.kind == "failure" else job.place + 1
    says = f"{found.kind}: {found.says}; again in {wait:.0f} s"
    changes = {
        "status": "queued", "detail": found.says, "not_before": now + wait, "in_a_row": in_a_row + 1, "place": place,
    }  # fmt: skip
    return NextStep(changes | counted, says)


def are_preemptions_spent(job: Job, spec: Spec, more: int) -> bool:
    """Return whether `more` preemptions, after which the backend's own queue restarted it, exceed the budget."""
    return more > 0 and job.preemptions + more > spec.retries.preemptions


def backoff(job: Job, spec: Spec, in_a_row: int) -> float:
    """Return the seconds to wait: doubled each time, with up to a fifth added so that jobs do not retry together."""
    wait = min(spec.retries.backoff_max, spec.retries.backoff * 2 ** min(in_a_row, 30))
    return wait * (1 + zlib.crc32(f"{job.id}/{job.attempts}".encode()) % 1000 / 5000)


def place(spec: Spec, turn: int) -> tuple[str, str]:
    """Return (accelerator, zone) of a turn: the first accelerator in all zones, then the others, and so on."""
    places = [(device, zone) for device in (spec.accelerator, *spec.others) for zone in (spec.zones or ("",))]
    return places[turn % len(places)]


def spent(attempts: Sequence[AttemptRow], spec: Spec, now: float) -> tuple[float, float]:
    """Return (seconds, dollars) of the running time of attempts."""
    here = [replace(spec, accelerator=one.accelerator, zones=(one.zone,) if one.zone else ()) for one in attempts]
    each = [(one.seconds(now), cost.hourly(its)) for one, its in zip(attempts, here, strict=True)]
    return sum(ran for ran, _ in each), sum(ran / 3600 * hourly for ran, hourly in each)


def reached_ceiling(spec: Spec, seconds: float, dollars: float, hourly: float) -> str:
    """Return why to stop now, or "". Stops early enough that the grace period also ends below the ceiling."""
    grace = spec.ceiling.grace
    if (limit := spec.ceiling.hours * 3600) and seconds >= max(STOP_AT * limit, limit - grace):
        return f"ceiling.hours is {spec.ceiling.hours:g}, and it has run for {seconds / 3600:.2f}"
    if (limit := spec.ceiling.dollars) and dollars >= max(STOP_AT * limit, limit - grace / 3600 * hourly):
        return f"ceiling.dollars is {limit:g}, and it has cost ${dollars:.2f}"
    return ""
