"""What follows an attempt's end: done, once more (where, and when), or not again."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from dovetail.jobs import price
from dovetail.jobs.job import Job, Try
from dovetail.jobs.outcome import Outcome
from dovetail.jobs.spec import Spec

WORK_S = 600.0  # an attempt that ran for so long was no failure to start: the next backoff begins anew
STOP_AT = 0.9  # of a ceiling, at the earliest: what is left of it is for the grace
_COUNTERS = {"preemption": "preemptions", "fault": "faults", "failure": "failures"}


@dataclass(frozen=True)
class Next:
    """Columns of the job to change, and the sentence for its history."""

    changes: dict[str, Any]
    says: str


def after(job: Job, spec: Spec, outcome: Outcome, ran: float, now: float) -> Next:
    """`ran`: seconds that the attempt ran."""
    if outcome.kind == "success":
        return _over("succeeded", "", "succeeded", now)
    if job.wanted != "run":
        return _over("cancelled", "", "cancelled", now)
    if outcome.kind == "cancelled":
        return _over("cancelled", outcome.says, f"cancelled: {outcome.says}", now)
    if outcome.kind == "stopped":
        return _over("stopped", job.detail or outcome.says, f"stopped: {job.detail or outcome.says}", now)
    if outcome.kind == "mistake":
        return _over("failed", outcome.says, f"failed, and not to be repeated: {outcome.says}", now)
    if outcome.kind == "unavailable":
        return _again(job, spec, outcome, {}, ran, now)
    counter = _COUNTERS[outcome.kind]
    used, most = getattr(job, counter) + 1, getattr(spec.retries, counter)
    if used > most:
        says = f"{outcome.says} (retries.{counter}: {most})"
        return Next(_over("failed", says, "", now).changes | {counter: used}, f"failed: {says}")
    return _again(job, spec, outcome, {counter: used}, ran, now)


def is_spent(job: Job, spec: Spec, preemptions: int) -> bool:
    """Whether so many more, which a backend's own queue made good, are more than there may be."""
    return preemptions > 0 and job.preemptions + preemptions > spec.retries.preemptions


def _over(status: str, detail: str, says: str, now: float) -> Next:
    return Next({"status": status, "detail": detail, "ended": now}, says)


def _again(job: Job, spec: Spec, outcome: Outcome, counted: dict[str, int], ran: float, now: float) -> Next:
    in_a_row = 0 if ran > WORK_S else job.in_a_row
    wait = backoff(job, spec, in_a_row)
    # a program's own failure says nothing against the place
    place = job.place if outcome.kind == "failure" else job.place + 1
    says = f"{outcome.kind}: {outcome.says}; again in {wait:.0f} s"
    changes = {
        "status": "queued", "detail": outcome.says, "not_before": now + wait, "in_a_row": in_a_row + 1, "place": place,
    }  # fmt: skip
    return Next(changes | counted, says)


def backoff(job: Job, spec: Spec, in_a_row: int) -> float:
    """Doubles each time; spread by up to a fifth, so that what failed together does not return together."""
    wait = min(spec.retries.backoff_max, spec.retries.backoff * 2 ** min(in_a_row, 30))
    return wait * (1 + zlib.crc32(f"{job.id}/{job.attempts}".encode()) % 1000 / 5000)


def place(spec: Spec, turn: int) -> tuple[str, str]:
    """(accelerator, zone) of a turn: all zones with the first accelerator, then with the others, then anew."""
    places = [(device, zone) for device in (spec.accelerator, *spec.others) for zone in (spec.zones or ("",))]
    return places[turn % len(places)]


def spent(attempts: Sequence[Try], spec: Spec, now: float) -> tuple[float, float]:
    """(seconds, dollars) of running."""
    here = [replace(spec, accelerator=one.accelerator, zones=(one.zone,) if one.zone else ()) for one in attempts]
    each = [(one.seconds(now), price.hourly(its)) for one, its in zip(attempts, here, strict=True)]
    return sum(ran for ran, _ in each), sum(ran / 3600 * hourly for ran, hourly in each)


def ceiling(spec: Spec, seconds: float, dollars: float, hourly: float) -> str:
    """Why to stop now; "" to go on. Stops early enough that the grace lies below the ceiling too."""
    grace = spec.ceiling.grace
    if (limit := spec.ceiling.hours * 3600) and seconds >= max(STOP_AT * limit, limit - grace):
        return f"ceiling.hours is {spec.ceiling.hours:g}, and it has run for {seconds / 3600:.2f}"
    if (limit := spec.ceiling.dollars) and dollars >= max(STOP_AT * limit, limit - grace / 3600 * hourly):
        return f"ceiling.dollars is {limit:g}, and it has cost ${dollars:.2f}"
    return ""
