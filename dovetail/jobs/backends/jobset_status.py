"""How a JobSet stands, told from its status and its pods."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dovetail.jobs.backends.backend import Observed
from dovetail.jobs.outcome import deciding

JOB_INDEX = "jobset.sigs.k8s.io/job-index"
POD_INDEX = "batch.kubernetes.io/job-completion-index"


@dataclass(frozen=True)
class Pod:
    rank: int
    name: str
    uid: str
    node: str
    phase: str
    code: int | None  # of its container, where that has ended
    ended: str  # when: RFC 3339, which sorts as it reads
    disrupted: bool  # Kubernetes took it away
    why: str  # what it waits for, or died of
    message: str = ""  # what it left for whoever asks (start.sh: hosts at fault)


def pods(items: Sequence[dict[str, Any]], hosts: int) -> list[Pod]:
    """By rank. Of two for one rank (the old one is still going) the newer."""
    newest = sorted(items, key=lambda one: one["metadata"].get("creationTimestamp") or "")
    found = {rank: _pod(one, rank) for one in newest if (rank := _rank(one, hosts)) is not None}
    return [found[rank] for rank in sorted(found)]


def _rank(one: dict[str, Any], hosts: int) -> int | None:
    told = {**one["metadata"].get("labels", {}), **one["metadata"].get("annotations", {})}
    job, index = told.get(JOB_INDEX, ""), told.get(POD_INDEX, "")
    return int(job) * hosts + int(index) if job.isdecimal() and index.isdecimal() else None


def _pod(one: dict[str, Any], rank: int) -> Pod:
    status = one.get("status", {})
    conditions = {c["type"]: c for c in status.get("conditions") or []}
    main = next((c for c in status.get("containerStatuses") or [] if c["name"] == "main"), {})
    state = main.get("state", {})
    ended = state.get("terminated") or {}
    waiting = state.get("waiting") or {}
    unscheduled = conditions.get("PodScheduled", {})
    why = ended.get("reason") or waiting.get("reason") or status.get("reason") or ""
    if unscheduled.get("status") == "False":
        why = unscheduled.get("message", "")
    return Pod(
        rank, one["metadata"]["name"], one["metadata"].get("uid", ""), one.get("spec", {}).get("nodeName") or "",
        status.get("phase", ""), ended.get("exitCode"), str(ended.get("finishedAt") or ""),
        conditions.get("DisruptionTarget", {}).get("status") == "True", why, ended.get("message") or "",
    )  # fmt: skip


def told(jobset: dict[str, Any], found: Sequence[Pod]) -> Observed:
    status = jobset.get("status") or {}
    conditions = {c["type"]: c for c in status.get("conditions") or [] if c.get("status") == "True"}
    hosts = tuple(pod.node for pod in found)
    if jobset["metadata"].get("deletionTimestamp"):
        return Observed("running", "its pods are ending", hosts)
    if "Completed" in conditions:
        return Observed("succeeded", "", hosts, 0)
    if "Failed" in conditions:
        return _failed(conditions["Failed"].get("message", ""), found, hosts)
    if "Suspended" in conditions or jobset["spec"].get("suspend"):
        queue = jobset["metadata"].get("labels", {}).get("kueue.x-k8s.io/queue-name", "")
        return Observed("waiting", f"in Kueue's queue {queue}" if queue else "suspended")
    return _under_way(jobset, status, found, hosts)


def _under_way(
    jobset: dict[str, Any], status: dict[str, Any], found: Sequence[Pod], hosts: tuple[str, ...]
) -> Observed:
    replicas = sum(one.get("replicas", 1) for one in jobset["spec"]["replicatedJobs"])
    ready = sum(one.get("ready", 0) for one in status.get("replicatedJobsStatus") or [])
    restarts = status.get("restarts", 0)
    again = f"started again {restarts} times after preemptions" if restarts else ""
    if ready == replicas:
        return Observed("running", again, hosts, restarts=restarts)
    waiting = next((f"{pod.name}: {pod.why}" for pod in found if pod.phase == "Pending" and pod.why), "")
    slices = f"{ready} of {replicas} slices are ready"
    detail = "; ".join(part for part in (again, slices, waiting) if part)[:300]
    return Observed("waiting", detail, hosts, restarts=restarts)


def _failed(message: str, found: Sequence[Pod], hosts: tuple[str, ...]) -> Observed:
    taken = next((pod for pod in found if pod.disrupted), None)
    if taken is not None:
        return Observed("preempted", f"{taken.name} was taken away {taken.why}".strip(), hosts)
    ended = {pod.rank: pod for pod in found if pod.code is not None}
    if not any(pod.code for pod in ended.values()):
        return Observed("failed", message or "the JobSet failed, and no pod says why", hosts)
    codes = [ended[rank].code or 0 if rank in ended else 0 for rank in range(max(ended) + 1)]
    code, rank = deciding(codes, sorted(ended, key=lambda one: ended[one].ended))
    why = ended[rank].why if rank is not None else ""
    return Observed("failed", f"rank {rank} ended with {code} {f'({why})' if why else ''}".strip(), hosts, code, rank)
