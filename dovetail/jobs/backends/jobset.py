"""The manifests of an attempt on GKE: a JobSet of one Job per slice and one pod per host, and the files it starts from.

What a person would write by hand from Google's pages, filled in from the accelerator's name. JobSet's own v1alpha2.
"""

from __future__ import annotations

import base64
import re
from typing import Any

from dovetail.core.errors import UserError
from dovetail.jobs import script
from dovetail.jobs.attempt import Attempt
from dovetail.jobs.backends.pod import HERE, TOLD, pod
from dovetail.jobs.outcome import QUARANTINE
from dovetail.jobs.spec import Spec

GROUP, VERSION, PLURAL = "jobset.x-k8s.io", "v1alpha2", "jobsets"
SLICE = "slice"  # the name of the replicated job
OWNER, JOB, NUMBER = "dovetail-owner", "dovetail-job", "dovetail-attempt"  # labels of all that is ours
QUEUE = "kueue.x-k8s.io/queue-name"
EXCLUSIVE = "alpha.jobset.sigs.k8s.io/exclusive-topology"
POOL = "cloud.google.com/gke-nodepool"
LARGEST = 900_000  # bytes that a ConfigMap holds, its script included: Kubernetes refuses 1 MiB


def check(spec: Spec) -> None:
    """Refuse what a JobSet cannot be."""
    device = spec.device
    if not device.is_tpu or not device.gke_label:
        raise UserError(f"backend gke runs on TPUs that GKE has; got accelerator {spec.accelerator!r}")
    if not spec.environment.image:
        raise UserError("backend gke needs environment.image: a container image with Python and jax[tpu]")
    buckets = [("gke.bucket", spec.gke.bucket)] if spec.gke.bucket else []
    for field, source in [*buckets, *(("mounts", one.source) for one in spec.mounts)]:
        if not source.startswith("gs://"):
            raise UserError(f"{field}: a pod can mount buckets alone, as gs://bucket/folder; got {source!r}")
    for pair in spec.gke.labels:
        _label(pair)


def slices(spec: Spec) -> int:
    """`slices: 2` and `accelerator: 2 x v5p-128` say the same; both together multiply."""
    return spec.slices * spec.device.slices


def labels(attempt: Attempt) -> dict[str, str]:
    own = dict(_label(pair) for pair in attempt.spec.gke.labels)
    return {**own, OWNER: attempt.owner, JOB: attempt.job, NUMBER: str(attempt.number)}


def _label(pair: str) -> tuple[str, str]:
    key, equals, value = pair.partition("=")
    if not equals or not re.fullmatch(r"([a-z0-9.-]+/)?[\w.-]{1,63}", key) or not re.fullmatch(r"[\w.-]{0,63}", value):
        raise UserError(f"gke.labels must be key=value, as Kubernetes has labels; got {pair!r}")
    return key, value


def jobset(attempt: Attempt) -> dict[str, Any]:
    spec, many = attempt.spec, slices(attempt.spec)
    named = labels(attempt) | ({QUEUE: spec.gke.queue} if spec.gke.queue else {})
    metadata: dict[str, Any] = {"name": attempt.name, "namespace": spec.gke.namespace, "labels": named}
    if spec.device.hosts > 1:  # a slice of several hosts is a node pool, and all of a pool is one slice's
        metadata["annotations"] = {EXCLUSIVE: POOL}
    body: dict[str, Any] = {
        "network": {"enableDNSHostnames": True},  # the headless service by which the pods find each other
        "failurePolicy": _failure_policy(),
        "replicatedJobs": [{"name": SLICE, "replicas": many, "template": _job(attempt, many)}],
    }
    if spec.gke.queue:
        body["suspend"] = True  # until Kueue has room
    return {"apiVersion": f"{GROUP}/{VERSION}", "kind": "JobSet", "metadata": metadata, "spec": body}


def _failure_policy() -> dict[str, Any]:
    """Preempted pods are started again by JobSet itself, however often; what the program did is left to the supervisor,
    which knows its budgets."""
    again = {
        "name": "preempted",
        "action": "RestartJobSetAndIgnoreMaxRestarts",
        "onJobFailureReasons": ["PodFailurePolicy"],
    }
    return {"maxRestarts": 0, "rules": [again]}


def _job(attempt: Attempt, many: int) -> dict[str, Any]:
    hosts = attempt.spec.device.hosts
    disrupted = {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    return {
        "spec": {
            "parallelism": hosts,
            "completions": hosts,
            "completionMode": "Indexed",
            "backoffLimit": 0,  # a slice is whole or it is nothing: one pod alone is never replaced
            "podFailurePolicy": {"rules": [disrupted]},
            "template": pod(attempt, many, labels(attempt)),
        }
    }


def config_map(attempt: Attempt) -> dict[str, Any]:
    """The script, and the code where it is small; else the code is in the bucket (see `is_small`)."""
    held: dict[str, Any] = {"data": {"script.sh": script.script(attempt.spec), "start.sh": _start(attempt)}}
    if is_small(attempt):
        code = (attempt.home / "code.tar.gz").read_bytes()
        held["binaryData"] = {"code.tar.gz": base64.b64encode(code).decode()}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": _metadata(attempt), **held}


def is_small(attempt: Attempt) -> bool:
    path = attempt.home / "code.tar.gz"
    return bool(attempt.snapshot) and path.stat().st_size * 4 / 3 < LARGEST


def secret(attempt: Attempt, values: dict[str, str]) -> dict[str, Any]:
    return {
        "apiVersion": "v1", "kind": "Secret", "metadata": _metadata(attempt), "type": "Opaque", "stringData": values,
    }  # fmt: skip


def _metadata(attempt: Attempt) -> dict[str, Any]:
    return {"name": attempt.name, "namespace": attempt.spec.gke.namespace, "labels": labels(attempt)}


def _start(attempt: Attempt) -> str:
    """Kubernetes signals the container's first process alone: it hands that on to the whole group of the program."""
    where = f"{HERE}/job/code.tar.gz" if is_small(attempt) else '"$DOVETAIL_JOB_DIR/code.tar.gz"'
    unpack = [f"tar xzf {where} -C {HERE}/code || exit 90"] if attempt.snapshot else []
    return "\n".join(
        [
            "export DOVETAIL_RANK=$((JOB_INDEX * HOSTS + JOB_COMPLETION_INDEX))",
            f'mkdir -p "$DOVETAIL_JOB_DIR" {HERE}/code || exit 90',
            *unpack,
            # the group, or the process alone while it has not made its group yet
            'end() { { kill -s TERM -- "-$child" || kill -s TERM "$child"; } 2>/dev/null; }',
            "child= told=; trap 'told=1; [ -z \"$child\" ] || end' TERM INT",
            f'setsid sh {HERE}/job/script.sh & child=$!; [ -z "$told" ] || end',
            # a signal interrupts `wait`: only when the child is gone is what it says the child's own code
            'while :; do wait "$child"; code=$?; kill -0 "$child" 2>/dev/null || break; done',
            'wait "$child" 2>/dev/null; last=$?; [ "$last" = 127 ] || code=$last',
            # the hosts at fault are told in the pod's status, which holds 4 KiB: its folder may go with it
            f'[ "$code" != {QUARANTINE} ] || tail -c 4000 "$DOVETAIL_JOB_DIR/run/health.jsonl" > {TOLD}',
            'exit "$code"',
            "",
        ]
    )
