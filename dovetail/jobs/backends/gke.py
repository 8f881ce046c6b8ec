"""TPUs of a GKE cluster: an attempt is a JobSet, with a ConfigMap for its script and code and a Secret for its secrets.

JobSet restarts preempted pods itself (see jobset.py), within the same attempt; the supervisor handles other ends.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dovetail.core.errors import RecipeError, UserError
from dovetail.jobs import files, secrets
from dovetail.jobs.backends import jobset, tpu_ssh
from dovetail.jobs.backends.backend import (
    LogPart,
    Observed,
    Places,
    UnavailableError,
    append_log,
    before_request,
    log_size,
    merge_log,
    read_log,
)
from dovetail.jobs.backends.kube import KubeNamespace, current_context
from dovetail.jobs.job import CALL_FOLDER, Attempt, Resource
from dovetail.jobs.outcome import deciding
from dovetail.jobs.spec import Spec

KINDS = ("JobSet", "ConfigMap", "Secret")  # one of each per attempt; the one that costs money first
COPY_S = 300.0  # for the code to reach the bucket
HEALTH = "run/health.jsonl"
JOB_INDEX = "jobset.sigs.k8s.io/job-index"
POD_INDEX = "batch.kubernetes.io/job-completion-index"


class GkeBackend:
    """Run jobs on a GKE cluster. `connect`, `current` and `run` are replaced in tests."""

    def __init__(
        self,
        root: Path,
        owner: str,
        connect: Callable[[str, str], KubeNamespace] = KubeNamespace,
        current: Callable[[], str] = current_context,
        run: tpu_ssh.Run = tpu_ssh.run,
    ) -> None:
        self._owner, self._places = owner, Places(root, "gke")  # (context, namespace)
        self._connect, self._current, self._run = connect, current, run
        self._spaces: dict[tuple[str, str], KubeNamespace] = {}  # a login may take a second

    # --- creating and deleting ----------------------------------------------------------------------------------------

    def check(self, spec: Spec) -> None:
        """Raise UserError for a spec that can never start here."""
        for name in (spec.accelerator, *spec.others):
            jobset.check(replace(spec, accelerator=name))
        self._at(spec.gke.context or self._current(), spec.gke.namespace).connect()

    def create(self, attempt: Attempt) -> str:
        """Create the objects; return namespace@context, because kubeconfig may select another cluster later."""
        with before_request():
            self.check(attempt.spec)
            bodies = manifests(attempt, secrets.read(attempt.home, attempt.spec))
            context, name = self._place(attempt)
        self._places.add(context, name)
        if attempt.snapshot and not jobset.is_small(attempt):
            self._upload(attempt, [attempt.home / "code.tar.gz"], "")
        if attempt.is_call:
            self._upload(attempt, sorted((attempt.home / CALL_FOLDER).glob("call.*")), f"{CALL_FOLDER}/")
        for body in bodies:
            if not self._space(attempt).create(body):
                self._refuse_others(attempt, body["kind"])
        return f"{name}@{context}"

    def _refuse_others(self, attempt: Attempt, kind: str) -> None:
        there = self._space(attempt).get(kind, attempt.name)
        if there is not None and not self._is_ours(there):
            raise UserError(
                f"{kind} {attempt.name} exists with another owner's label, so it is not used", code="not_ours"
            )

    def _upload(self, attempt: Attempt, paths: Sequence[Path], inside: str) -> None:
        if not attempt.spec.gke.bucket:
            raise RecipeError(
                "the code is too large for a ConfigMap: set `gke.bucket`, or exclude more (`code.exclude`)",
                param="gke.bucket",
            )
        target = f"{_bucket(attempt)}/{inside}"
        done = self._run(["gcloud", "storage", "cp", *map(str, paths), target], b"", COPY_S)
        if done.code:
            raise UnavailableError(f"{paths[0].name} could not be copied to {target}: {done.err[-200:]}")

    def _download(self, attempt: Attempt) -> None:
        """Fetch the value of a remote function, if it has one."""
        source = f"{_bucket(attempt)}/{CALL_FOLDER}/{attempt.number}.*"
        done = self._run(["gcloud", "storage", "cp", source, f"{attempt.home / CALL_FOLDER}/"], b"", COPY_S)
        if done.code and "matched no objects" not in done.err:
            raise UnavailableError(f"it is over, and {source} could not be fetched yet: {done.err[-200:]}")

    def delete(self, resource: Resource) -> None:
        """Delete the objects with our label: a name alone may be another owner's."""
        for context, name in self._where(resource):
            space = self._at(context, name)
            for kind in KINDS:
                there = space.get(kind, resource.name)
                if there is not None and self._is_ours(there) and not there["metadata"].get("deletionTimestamp"):
                    space.delete(kind, resource.name)

    def _where(self, resource: Resource) -> list[tuple[str, ...]]:
        """Return the place of the handle; without one (the answer was lost) all places used so far."""
        name, at, context = resource.handle.partition("@")
        return [(context, name)] if at else self._places.all()

    def list(self) -> Sequence[Resource]:
        """Return the objects with our label in all places used so far."""
        found = {}
        for context, name in self._places.all():
            space = self._at(context, name)
            for kind in KINDS:
                for one in space.list(kind, f"{jobset.OWNER}={self._owner}"):
                    title = one["metadata"]["name"]
                    found[title, context, name] = Resource(title, "", f"{name}@{context}")
        return list(found.values())

    def _is_ours(self, there: dict[str, Any]) -> bool:
        return there["metadata"].get("labels", {}).get(jobset.OWNER) == self._owner

    # --- observing ----------------------------------------------------------------------------------------------------

    def observe(self, attempt: Attempt) -> Observed:
        """Return the state of an attempt; fetch logs and results at its end."""
        try:
            there = self._space(attempt).get("JobSet", attempt.name)
            if there is None or not self._is_ours(there):
                return Observed("absent", "there is no such JobSet")
            found = pods(self._pods(attempt), attempt.spec.device.hosts)
            seen = observed(there, found)
            if seen.state in ("succeeded", "failed", "preempted"):
                self._fetch(attempt)
                for pod in found:
                    merge_log(attempt.home / HEALTH, pod.message)
                if attempt.is_call:
                    self._download(attempt)
            return seen
        except (UserError, OSError) as error:
            return Observed("unknown", str(error))

    def _pods(self, attempt: Attempt) -> list[dict[str, Any]]:
        return self._space(attempt).list("Pod", f"jobset.sigs.k8s.io/jobset-name={attempt.name}")

    def stop(self, attempt: Attempt, grace: float) -> None:
        """Delete the JobSet, which signals every pod; a grace of 0 also ends the pods at once.

        Pods have terminationGracePeriodSeconds (ceiling.grace) to save. Suspending would not work: Kueue would start
        the JobSet again.
        """
        space = self._space(attempt)
        space.delete("JobSet", attempt.name)
        for one in self._pods(attempt) if grace <= 0 else ():
            space.delete("Pod", one["metadata"]["name"], grace=0)

    # --- logs ---------------------------------------------------------------------------------------------------------

    def logs(self, attempt: Attempt, rank: int, since: int = 0) -> LogPart:
        """Return a part of a rank's log; of the copy on this machine if the cluster does not answer."""
        with contextlib.suppress(UserError):
            self._fetch(attempt, rank)
        return read_log(attempt.log(rank), since)

    def _fetch(self, attempt: Attempt, rank: int | None = None) -> None:
        for one in pods(self._pods(attempt), attempt.spec.device.hosts):
            if rank in (None, one.rank):
                self._append(attempt, one, self._space(attempt).log(one.name))

    def _append(self, attempt: Attempt, one: Pod, text: bytes) -> None:
        """Append the new part of a pod's log, which a cluster returns from its beginning.

        The log of a pod that replaced another one continues in the same file.
        """
        files.make_folder(attempt.folder)
        path, mark = attempt.log(one.rank), attempt.folder / f"rank{one.rank}.pod"
        held = json.loads(mark.read_text()) if mark.exists() else {}
        if held.get("uid") != one.uid:
            held = {"uid": one.uid, "begins": log_size(path)}
            files.write_text(mark, json.dumps(held))
        append_log(path, held["begins"], text)

    def command(self, attempt: Attempt, rank: int) -> list[str]:
        """Return a kubectl command that opens a shell in the pod of a rank."""
        found = [one for one in pods(self._pods(attempt), attempt.spec.device.hosts) if one.rank == rank]
        if not found:
            raise UserError(f"{attempt.name} has no pod of rank {rank} now: see `dovetail job show`", param="--rank")
        context, name = self._place(attempt)
        words = ["kubectl", f"--namespace={name}", *([f"--context={context}"] if context else [])]
        return [*words, "exec", "-it", found[0].name, "--", "sh"]

    def _space(self, attempt: Attempt) -> KubeNamespace:
        return self._at(*self._place(attempt))

    def _place(self, attempt: Attempt) -> tuple[str, str]:
        """Return (context, namespace)."""
        name, at, context = attempt.handle.partition("@")
        gke = attempt.spec.gke
        return (context, name) if at else (gke.context or self._current(), gke.namespace)

    def _at(self, context: str, name: str) -> KubeNamespace:
        if (context, name) not in self._spaces:
            self._spaces[context, name] = self._connect(context, name)
        return self._spaces[context, name]


def _bucket(attempt: Attempt) -> str:
    """Return the job's folder in the bucket, which is DOVETAIL_JOB_DIR in the pods."""
    return f"{attempt.spec.gke.bucket.rstrip('/')}/jobs/{attempt.job}"


def manifests(attempt: Attempt, values: dict[str, str]) -> list[dict[str, Any]]:
    """Return the objects in the order of creation, the JobSet last; `values` are those of the secrets."""
    secret = [jobset.secret(attempt, values)] if values else []
    return [jobset.config_map(attempt), *secret, jobset.jobset(attempt)]


def render(attempt: Attempt) -> str:
    """Return the manifests as YAML, without the values of secrets."""
    import yaml

    jobset.check(attempt.spec)
    return yaml.safe_dump_all(manifests(attempt, dict.fromkeys(secrets.names(attempt.spec), "...")), sort_keys=False)


def preview(spec: Spec) -> str:
    """Return the manifests of a job that is not created: its id and its code are not known yet."""
    return render(Attempt("job", 1, spec, Path(), "owner", spec.zones[0] if spec.zones else ""))


# --- the status of a JobSet -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pod:
    """Hold the status of one pod."""

    rank: int
    name: str
    uid: str
    node: str
    phase: str
    code: int | None  # of its container, if that has ended
    ended: str  # when, in RFC 3339, which sorts by time
    disrupted: bool  # taken away by Kubernetes
    why: str  # what it waits for, or the reason of its end
    message: str = ""  # its termination message (start.sh: hosts at fault)


def pods(items: Sequence[dict[str, Any]], hosts: int) -> list[Pod]:
    """Return the pods by rank; of two for one rank (one is still ending) the newer."""
    newest = sorted(items, key=lambda one: one["metadata"].get("creationTimestamp") or "")
    found = {rank: _pod(one, rank) for one in newest if (rank := _rank(one, hosts)) is not None}
    return [found[rank] for rank in sorted(found)]


def _rank(one: dict[str, Any], hosts: int) -> int | None:
    marks = {**one["metadata"].get("labels", {}), **one["metadata"].get("annotations", {})}
    job, index = marks.get(JOB_INDEX, ""), marks.get(POD_INDEX, "")
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


def observed(there: dict[str, Any], found: Sequence[Pod]) -> Observed:
    """Return the state of a JobSet, from its status and its pods."""
    status = there.get("status") or {}
    conditions = {c["type"]: c for c in status.get("conditions") or [] if c.get("status") == "True"}
    hosts = tuple(pod.node for pod in found)
    if there["metadata"].get("deletionTimestamp"):
        return Observed("running", "its pods are ending", hosts)
    if "Completed" in conditions:
        return Observed("succeeded", "", hosts, 0)
    if "Failed" in conditions:
        return _failed(conditions["Failed"].get("message", ""), found, hosts)
    if "Suspended" in conditions or there["spec"].get("suspend"):
        queue = there["metadata"].get("labels", {}).get("kueue.x-k8s.io/queue-name", "")
        return Observed("waiting", f"in Kueue's queue {queue}" if queue else "suspended")
    return _started(there, status, found, hosts)


def _started(there: dict[str, Any], status: dict[str, Any], found: Sequence[Pod], hosts: tuple[str, ...]) -> Observed:
    replicas = sum(one.get("replicas", 1) for one in there["spec"]["replicatedJobs"])
    ready = sum(one.get("ready", 0) for one in status.get("replicatedJobsStatus") or [])
    restarts = status.get("restarts", 0)
    again = f"restarted {restarts} times after preemptions" if restarts else ""
    if ready == replicas:
        return Observed("running", again, hosts, restarts=restarts)
    waiting = next((f"{pod.name}: {pod.why}" for pod in found if pod.phase == "Pending" and pod.why), "")
    slices = f"{ready} of {replicas} slices are ready"
    detail = "; ".join(part for part in (again, slices, waiting) if part)[:300]
    return Observed("waiting", detail, hosts, restarts=restarts)


def _failed(message: str, found: Sequence[Pod], hosts: tuple[str, ...]) -> Observed:
    taken = next((pod for pod in found if pod.disrupted), None)
    if taken is not None:
        return Observed("preempted", f"{taken.name} was preempted {taken.why}".strip(), hosts)
    ended = {pod.rank: pod for pod in found if pod.code is not None}
    if not any(pod.code for pod in ended.values()):
        return Observed("failed", message or "the JobSet failed, and no pod has a reason", hosts)
    codes = [ended[rank].code or 0 if rank in ended else 0 for rank in range(max(ended) + 1)]
    code, rank = deciding(codes, sorted(ended, key=lambda one: ended[one].ended))
    why = ended[rank].why if rank is not None else ""
    return Observed("failed", f"rank {rank} exited with {code} {f'({why})' if why else ''}".strip(), hosts, code, rank)
