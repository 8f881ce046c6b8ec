"""TPUs of a GKE cluster: an attempt is a JobSet, with a ConfigMap for its script and code and a Secret for its secrets.

JobSet itself starts preempted pods again (see jobset.py), which stays one attempt; what it gives up comes back here.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dovetail.core.errors import UserError
from dovetail.jobs import modes, secrets
from dovetail.jobs.attempt import CALL, Attempt, Resource
from dovetail.jobs.backends import jobset, log_copy, tpu_ssh
from dovetail.jobs.backends.backend import LogPart, Observed, Unavailable, unasked
from dovetail.jobs.backends.jobset_status import Pod, pods, told
from dovetail.jobs.backends.kube import Namespace, current_context
from dovetail.jobs.backends.log_file import read
from dovetail.jobs.backends.places import Places
from dovetail.jobs.spec import Spec

KINDS = ("JobSet", "ConfigMap", "Secret")  # of one name each; what costs money first
COPY_S = 300.0  # for the code to reach the bucket
HEALTH = "run/health.jsonl"


class Gke:
    """`root`: the home of jobs. `connect`, `current` and `run` stand in for the real ones in tests."""

    def __init__(
        self,
        root: Path,
        owner: str,
        connect: Callable[[str, str], Namespace] = Namespace,
        current: Callable[[], str] = current_context,
        run: tpu_ssh.Run = tpu_ssh.run,
    ) -> None:
        self._owner, self._places = owner, Places(root, "gke")  # (context, namespace)
        self._connect, self._current, self._run = connect, current, run
        self._spaces: dict[tuple[str, str], Namespace] = {}  # a login may take a second

    # --- making and removing ------------------------------------------------------------------------------------------

    def check(self, spec: Spec) -> None:
        for name in (spec.accelerator, *spec.others):
            jobset.check(replace(spec, accelerator=name))
        self._at(spec.gke.context or self._current(), spec.gke.namespace).connect()

    def create(self, attempt: Attempt) -> str:
        """The handle is its namespace and cluster: kubeconfig may have chosen another cluster the next time."""
        with unasked():
            self.check(attempt.spec)
            bodies = manifests(attempt, secrets.read(attempt.home, attempt.spec))
            context, name = self._place(attempt)
        self._places.add(context, name)
        if attempt.snapshot and not jobset.is_small(attempt):
            self._upload(attempt, [attempt.home / "code.tar.gz"], "")
        if attempt.is_call:
            self._upload(attempt, sorted((attempt.home / CALL).glob("call.*")), f"{CALL}/")
        for body in bodies:
            if not self._space(attempt).create(body):
                self._refuse_others(attempt, body["kind"])
        return f"{name}@{context}"

    def _refuse_others(self, attempt: Attempt, kind: str) -> None:
        there = self._space(attempt).get(kind, attempt.name)
        if there is not None and not self._is_ours(there):
            raise UserError(f"{kind} {attempt.name} is there and carries another owner's label: it is not ours to use")

    def _upload(self, attempt: Attempt, files: Sequence[Path], inside: str) -> None:
        if not attempt.spec.gke.bucket:
            raise UserError("the code is larger than a ConfigMap holds: set gke.bucket, or exclude more (code.exclude)")
        target = f"{_bucket(attempt)}/{inside}"
        done = self._run(["gcloud", "storage", "cp", *map(str, files), target], b"", COPY_S)
        if done.code:
            raise Unavailable(f"{files[0].name} could not be copied to {target}: {done.err[-200:]}")

    def _download(self, attempt: Attempt) -> None:
        """What a remote function returned, if it came to that."""
        source = f"{_bucket(attempt)}/{CALL}/{attempt.number}.*"
        done = self._run(["gcloud", "storage", "cp", source, f"{attempt.home / CALL}/"], b"", COPY_S)
        if done.code and "matched no objects" not in done.err:
            raise Unavailable(f"it is over, and {source} could not be fetched yet: {done.err[-200:]}")

    def delete(self, resource: Resource) -> None:
        """Only what carries our label: a name alone may be somebody else's."""
        for context, name in self._where(resource):
            space = self._at(context, name)
            for kind in KINDS:
                there = space.get(kind, resource.name)
                if there is not None and self._is_ours(there) and not there["metadata"].get("deletionTimestamp"):
                    space.delete(kind, resource.name)

    def _where(self, resource: Resource) -> list[tuple[str, ...]]:
        """The place that the handle names; without one (the create's answer was lost) all that were ever asked."""
        name, at, context = resource.handle.partition("@")
        return [(context, name)] if at else self._places.all()

    def list(self) -> Sequence[Resource]:
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

    # --- watching -----------------------------------------------------------------------------------------------------

    def observe(self, attempt: Attempt) -> Observed:
        try:
            there = self._space(attempt).get("JobSet", attempt.name)
            if there is None or not self._is_ours(there):
                return Observed("absent", "there is no such JobSet")
            found = pods(self._pods(attempt), attempt.spec.device.hosts)
            seen = told(there, found)
            if seen.state in ("succeeded", "failed", "preempted"):
                self._fetch(attempt)
                for pod in found:
                    log_copy.merge(attempt.home / HEALTH, pod.message)
                if attempt.is_call:
                    self._download(attempt)
            return seen
        except (Unavailable, ValueError, ImportError, OSError) as error:
            return Observed("unknown", str(error))

    def _pods(self, attempt: Attempt) -> list[dict[str, Any]]:
        return self._space(attempt).list("Pod", f"jobset.sigs.k8s.io/jobset-name={attempt.name}")

    def stop(self, attempt: Attempt, grace: float) -> None:
        """Deleting it signals every pod, which then has its terminationGracePeriodSeconds (ceiling.grace, from which
        `grace` comes) to save; the JobSet itself goes last. Suspending it would not do: Kueue starts it again. A grace
        of 0 ends the pods at once."""
        space = self._space(attempt)
        space.delete("JobSet", attempt.name)
        for one in self._pods(attempt) if grace <= 0 else ():
            space.delete("Pod", one["metadata"]["name"], grace=0)

    # --- logs ---------------------------------------------------------------------------------------------------------

    def logs(self, attempt: Attempt, rank: int, since: int = 0) -> LogPart:
        """What was brought here is told even when the pods are gone or the cluster does not answer."""
        with contextlib.suppress(Unavailable, ValueError, ImportError):
            self._fetch(attempt, rank)
        return read(attempt.log(rank), since)

    def _fetch(self, attempt: Attempt, rank: int | None = None) -> None:
        for one in pods(self._pods(attempt), attempt.spec.device.hosts):
            if rank in (None, one.rank):
                self._append(attempt, one, self._space(attempt).log(one.name))

    def _append(self, attempt: Attempt, one: Pod, text: bytes) -> None:
        """A cluster tells a pod's log from its beginning: what is here already is passed over. A pod that took another
        one's place goes on in the same file."""
        modes.make_folder(attempt.folder)
        path, mark = attempt.log(one.rank), attempt.folder / f"rank{one.rank}.pod"
        size = log_copy.size(path)
        held = json.loads(mark.read_text()) if mark.exists() else {}
        if held.get("uid") != one.uid:
            held = {"uid": one.uid, "begins": size}
            modes.write_text(mark, json.dumps(held))
        log_copy.append(path, held["begins"], text)

    def command(self, attempt: Attempt, rank: int) -> list[str]:
        found = [one for one in pods(self._pods(attempt), attempt.spec.device.hosts) if one.rank == rank]
        if not found:
            raise UserError(f"{attempt.name} has no pod of rank {rank} now: see `dovetail job show`")
        context, name = self._place(attempt)
        words = ["kubectl", f"--namespace={name}", *([f"--context={context}"] if context else [])]
        return [*words, "exec", "-it", found[0].name, "--", "sh"]

    def _space(self, attempt: Attempt) -> Namespace:
        return self._at(*self._place(attempt))

    def _place(self, attempt: Attempt) -> tuple[str, str]:
        """(context, namespace)."""
        name, at, context = attempt.handle.partition("@")
        gke = attempt.spec.gke
        return (context, name) if at else (gke.context or self._current(), gke.namespace)

    def _at(self, context: str, name: str) -> Namespace:
        if (context, name) not in self._spaces:
            self._spaces[context, name] = self._connect(context, name)
        return self._spaces[context, name]


def _bucket(attempt: Attempt) -> str:
    """The job's folder there; the pods find it at DOVETAIL_JOB_DIR."""
    return f"{attempt.spec.gke.bucket.rstrip('/')}/jobs/{attempt.job}"


def manifests(attempt: Attempt, values: dict[str, str]) -> list[dict[str, Any]]:
    """In the order in which they are made: the JobSet, which starts the pods, last. `values`: of its secrets."""
    secret = [jobset.secret(attempt, values)] if values else []
    return [jobset.config_map(attempt), *secret, jobset.jobset(attempt)]


def render(attempt: Attempt) -> str:
    """The manifests as YAML; secrets are not shown."""
    import yaml

    jobset.check(attempt.spec)
    return yaml.safe_dump_all(manifests(attempt, dict.fromkeys(secrets.names(attempt.spec), "...")), sort_keys=False)


def preview(spec: Spec) -> str:
    """The same of a job that is not created, for `--dry-run`: its id and its code are not known yet."""
    return render(Attempt("job", 1, spec, Path(), "owner", spec.zones[0] if spec.zones else ""))
