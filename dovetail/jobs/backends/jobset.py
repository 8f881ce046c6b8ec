"""The manifests of an attempt on GKE: a JobSet of one Job per slice and one pod per host, and its ConfigMap and Secret.

They follow Google's documentation, filled in from the accelerator's name. JobSet's API version is v1alpha2.
"""

from __future__ import annotations

import base64
import re
from typing import Any

from dovetail.core.errors import RecipeError, UnsupportedError
from dovetail.jobs import script
from dovetail.jobs.job import Attempt
from dovetail.jobs.outcome import QUARANTINE
from dovetail.jobs.spec import Mount, Spec

GROUP, VERSION, PLURAL = "jobset.x-k8s.io", "v1alpha2", "jobsets"
SLICE = "slice"  # the name of the replicated job
OWNER, JOB, NUMBER = "dovetail-owner", "dovetail-job", "dovetail-attempt"  # labels of all our objects
QUEUE = "kueue.x-k8s.io/queue-name"
EXCLUSIVE = "alpha.jobset.sigs.k8s.io/exclusive-topology"
POOL = "cloud.google.com/gke-nodepool"
MAX_CODE = 900_000  # bytes in a ConfigMap, with the script: Kubernetes refuses 1 MiB
HERE = "/dovetail"
MESSAGE = f"{HERE}/message"  # a file whose contents Kubernetes keeps in the pod's status
ACCELERATOR, TOPOLOGY = "cloud.google.com/gke-tpu-accelerator", "cloud.google.com/gke-tpu-topology"
SPOT, FLEX = "cloud.google.com/gke-spot", "cloud.google.com/gke-flex-start"
RESERVATION = "cloud.google.com/reservation-name"
ZONE, HOST = "topology.kubernetes.io/zone", "kubernetes.io/hostname"
JOB_INDEX = "metadata.annotations['jobset.sigs.k8s.io/job-index']"
POD_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
PORTS = (8471, 8080, 8476)  # between TPU hosts, between slices, jax's coordinator


def check(spec: Spec) -> None:
    """Raise UserError for settings that a JobSet does not support."""
    device = spec.device
    if not device.is_tpu or not device.gke_label:
        raise UnsupportedError(
            f"`accelerator` must be a TPU that GKE has, got {spec.accelerator!r}", param="accelerator"
        )
    if not spec.environment.image:
        raise RecipeError(
            "backend gke needs `environment.image`: a container image with Python and jax[tpu]",
            param="environment.image",
        )
    buckets = [("gke.bucket", spec.gke.bucket)] if spec.gke.bucket else []
    for field, source in [*buckets, *(("mounts", one.source) for one in spec.mounts)]:
        if not source.startswith("gs://"):
            raise RecipeError(
                f"`{field}` must be a bucket for a pod, such as gs://bucket/folder; got {source!r}", param=field
            )
    for pair in spec.gke.labels:
        _label(pair)


def labels(attempt: Attempt) -> dict[str, str]:
    """Return the labels of all objects of an attempt."""
    own = dict(_label(pair) for pair in attempt.spec.gke.labels)
    return {**own, OWNER: attempt.owner, JOB: attempt.job, NUMBER: str(attempt.number)}


def _label(pair: str) -> tuple[str, str]:
    key, equals, value = pair.partition("=")
    if not equals or not re.fullmatch(r"([a-z0-9.-]+/)?[\w.-]{1,63}", key) or not re.fullmatch(r"[\w.-]{0,63}", value):
        raise RecipeError(f"`gke.labels` must be key=value, valid in Kubernetes; got {pair!r}", param="gke.labels")
    return key, value


def jobset(attempt: Attempt) -> dict[str, Any]:
    """Return the JobSet."""
    spec = attempt.spec
    named = labels(attempt) | ({QUEUE: spec.gke.queue} if spec.gke.queue else {})
    metadata: dict[str, Any] = {"name": attempt.name, "namespace": spec.gke.namespace, "labels": named}
    if spec.device.hosts > 1:  # a slice of several hosts is a node pool, and a pool belongs to one slice
        metadata["annotations"] = {EXCLUSIVE: POOL}
    body: dict[str, Any] = {
        "network": {"enableDNSHostnames": True},  # the headless service with which pods find each other
        "failurePolicy": _failure_policy(),
        "replicatedJobs": [{"name": SLICE, "replicas": spec.total_slices, "template": _job(attempt)}],
    }
    if spec.gke.queue:
        body["suspend"] = True  # until Kueue admits it
    return {"apiVersion": f"{GROUP}/{VERSION}", "kind": "JobSet", "metadata": metadata, "spec": body}


def _failure_policy() -> dict[str, Any]:
    """Let JobSet restart preempted pods without limit; the supervisor handles failures, since it has the budgets."""
    again = {
        "name": "preempted",
        "action": "RestartJobSetAndIgnoreMaxRestarts",
        "onJobFailureReasons": ["PodFailurePolicy"],
    }
    return {"maxRestarts": 0, "rules": [again]}


def _job(attempt: Attempt) -> dict[str, Any]:
    hosts = attempt.spec.device.hosts
    disrupted = {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    return {
        "spec": {
            "parallelism": hosts,
            "completions": hosts,
            "completionMode": "Indexed",
            "backoffLimit": 0,  # all hosts of a slice restart together, never one pod alone
            "podFailurePolicy": {"rules": [disrupted]},
            "template": pod(attempt, labels(attempt)),
        }
    }


def config_map(attempt: Attempt) -> dict[str, Any]:
    """Return the ConfigMap with the scripts, and the code if it is small; else the code is in the bucket."""
    held: dict[str, Any] = {"data": {"script.sh": script.script(attempt.spec), "start.sh": _start(attempt)}}
    if is_small(attempt):
        code = (attempt.home / "code.tar.gz").read_bytes()
        held["binaryData"] = {"code.tar.gz": base64.b64encode(code).decode()}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": _metadata(attempt), **held}


def is_small(attempt: Attempt) -> bool:
    """Return whether the code fits in the ConfigMap."""
    path = attempt.home / "code.tar.gz"
    return bool(attempt.snapshot) and path.stat().st_size * 4 / 3 < MAX_CODE


def secret(attempt: Attempt, values: dict[str, str]) -> dict[str, Any]:
    """Return the Secret with the values of the job's secrets."""
    return {
        "apiVersion": "v1", "kind": "Secret", "metadata": _metadata(attempt), "type": "Opaque", "stringData": values,
    }  # fmt: skip


def _metadata(attempt: Attempt) -> dict[str, Any]:
    return {"name": attempt.name, "namespace": attempt.spec.gke.namespace, "labels": labels(attempt)}


def _start(attempt: Attempt) -> str:
    """Return the container's first process, which passes signals on to the whole group of the program."""
    where = f"{HERE}/job/code.tar.gz" if is_small(attempt) else '"$DOVETAIL_JOB_DIR/code.tar.gz"'
    unpack = [f"tar xzf {where} -C {HERE}/code || exit 90"] if attempt.snapshot else []
    return "\n".join(
        [
            "export DOVETAIL_RANK=$((JOB_INDEX * HOSTS + JOB_COMPLETION_INDEX))",
            f'mkdir -p "$DOVETAIL_JOB_DIR" {HERE}/code || exit 90',
            *unpack,
            # the group, or the process alone before it has made its group
            'end() { { kill -s TERM -- "-$child" || kill -s TERM "$child"; } 2>/dev/null; }',
            "child= signalled=; trap 'signalled=1; [ -z \"$child\" ] || end' TERM INT",
            f'setsid sh {HERE}/job/script.sh & child=$!; [ -z "$signalled" ] || end',
            # a signal interrupts `wait`: its code is the child's own only once the child is gone
            'while :; do wait "$child"; code=$?; kill -0 "$child" 2>/dev/null || break; done',
            'wait "$child" 2>/dev/null; last=$?; [ "$last" = 127 ] || code=$last',
            # hosts at fault are reported in the pod's status, which holds 4 KiB, because its folder may be lost with it
            f'[ "$code" != {QUARANTINE} ] || tail -c 4000 "$DOVETAIL_JOB_DIR/run/health.jsonl" > {MESSAGE}',
            'exit "$code"',
            "",
        ]
    )


# --- one pod ----------------------------------------------------------------------------------------------------------


def pod(attempt: Attempt, labels: dict[str, str]) -> dict[str, Any]:
    """Return the pod template of one host of a slice."""
    spec = attempt.spec
    volumes = _volumes(attempt)
    metadata: dict[str, Any] = {"labels": labels}
    if any("csi" in volume for volume, _ in volumes):
        metadata["annotations"] = {"gke-gcsfuse/volumes": "true"}
    body: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": round(spec.ceiling.grace),
        "hostNetwork": True,  # the host's own address: one layer less between slices
        "dnsPolicy": "ClusterFirstWithHostNet",
        "nodeSelector": _nodes(attempt),
        "tolerations": _tolerations(spec),
        "containers": [_container(attempt, [mount for _, mount in volumes])],
        "volumes": [volume for volume, _ in volumes],
    }
    if attempt.exclude:
        body["affinity"] = _without(attempt.exclude)
    if spec.gke.service_account:
        body["serviceAccountName"] = spec.gke.service_account
    if spec.gke.priority:
        body["priorityClassName"] = spec.gke.priority
    return {"metadata": metadata, "spec": body}


def _nodes(attempt: Attempt) -> dict[str, str]:
    spec, device = attempt.spec, attempt.spec.device
    selector = {ACCELERATOR: device.gke_label or "", TOPOLOGY: device.topology}
    tiers = {"spot": {SPOT: "true"}, "flex-start": {FLEX: "true"}, "reservation": {RESERVATION: spec.reservation}}
    zone = {ZONE: attempt.zone} if attempt.zone else {}
    return {**selector, **tiers.get(spec.tier, {}), **zone}


def _tolerations(spec: Spec) -> list[dict[str, str]]:
    """Return the tolerations of the taints of TPU nodes and of the tier's nodes."""
    found = [{"key": "google.com/tpu", "operator": "Exists", "effect": "NoSchedule"}]
    tier = {"spot": SPOT, "flex-start": FLEX}.get(spec.tier)
    if tier:
        found.append({"key": tier, "operator": "Equal", "value": "true", "effect": "NoSchedule"})
    return found


def _without(hosts: tuple[str, ...]) -> dict[str, Any]:
    rule = {"key": HOST, "operator": "NotIn", "values": list(hosts)}
    required = {"nodeSelectorTerms": [{"matchExpressions": [rule]}]}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}


def _container(attempt: Attempt, mounts: list[dict[str, Any]]) -> dict[str, Any]:
    device = attempt.spec.device
    asked = {device.gke_resource: device.chips_per_host}
    held: dict[str, Any] = {
        "name": "main",
        "image": attempt.spec.environment.image,
        "command": ["sh", f"{HERE}/job/start.sh"],
        "terminationMessagePath": MESSAGE,
        "ports": [{"containerPort": port} for port in PORTS],
        "env": _env(attempt),
        "resources": {"requests": asked, "limits": asked},
        "volumeMounts": mounts,
    }
    if attempt.spec.secrets or attempt.is_call:  # a remote function has a key
        held["envFrom"] = [{"secretRef": {"name": attempt.name}}]
    return held


def _env(attempt: Attempt) -> list[dict[str, Any]]:
    """Return the variables that identify the pod to jax and libtpu; GKE sets only some of them by itself."""
    name, hosts, slices = attempt.name, attempt.spec.device.hosts, attempt.spec.total_slices
    bucket = f"{HERE}/bucket/jobs/{attempt.job}" if attempt.spec.gke.bucket else f"{HERE}/run"
    names = [f"{name}-slice-$(JOB_INDEX)-{k}.{name}" for k in range(hosts)] if hosts * slices > 1 else ["localhost"]
    known = {**attempt.variables, "DOVETAIL_JOB_DIR": bucket, "DOVETAIL_CODE_DIR": f"{HERE}/code", "HOSTS": str(hosts)}
    env: list[dict[str, Any]] = [{"name": key, "value": value} for key, value in known.items()]
    env.append({"name": "JOB_INDEX", "valueFrom": {"fieldRef": {"fieldPath": JOB_INDEX}}})
    env.append({"name": "TPU_WORKER_ID", "valueFrom": {"fieldRef": {"fieldPath": POD_INDEX}}})
    env.append({"name": "TPU_WORKER_HOSTNAMES", "value": ",".join(names)})
    if slices > 1:
        env.append({"name": "MEGASCALE_NUM_SLICES", "value": str(slices)})
        env.append({"name": "MEGASCALE_SLICE_ID", "value": "$(JOB_INDEX)"})
        env.append({"name": "MEGASCALE_COORDINATOR_ADDRESS", "value": f"{name}-slice-0-0.{name}"})
    return env


def _volumes(attempt: Attempt) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return (volume, volume mount) pairs."""
    spec = attempt.spec
    found: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"name": "job", "configMap": {"name": attempt.name}}, {"name": "job", "mountPath": f"{HERE}/job"}),
        ({"name": "code", "emptyDir": {}}, {"name": "code", "mountPath": f"{HERE}/code"}),
        ({"name": "run", "emptyDir": {}}, {"name": "run", "mountPath": f"{HERE}/run"}),
        ({"name": "shm", "emptyDir": {"medium": "Memory"}}, {"name": "shm", "mountPath": "/dev/shm"}),
    ]
    if spec.gke.bucket:
        found.append(_bucket("bucket", Mount(spec.gke.bucket, f"{HERE}/bucket")))
    return found + [_bucket(f"mount{n}", one) for n, one in enumerate(spec.mounts)]


def _bucket(name: str, mount: Mount) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a bucket's volume with GKE's Cloud Storage FUSE driver."""
    bucket, inside = (re.split("/", mount.source.removeprefix("gs://").strip("/"), maxsplit=1) + [""])[:2]
    options = "implicit-dirs" + (f",only-dir={inside}" if inside else "")
    attributes = {"bucketName": bucket, "mountOptions": options, "hostNetworkPodKSA": "true"}
    driver = {"driver": "gcsfuse.csi.storage.gke.io", "readOnly": mount.read_only, "volumeAttributes": attributes}
    return {"name": name, "csi": driver}, {"name": name, "mountPath": mount.path, "readOnly": mount.read_only}
