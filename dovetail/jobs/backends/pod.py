"""One pod of a JobSet: which node it wants, what it asks for, what it is told, and what it finds in its folders."""

from __future__ import annotations

import re
from typing import Any

from dovetail.jobs.attempt import Attempt
from dovetail.jobs.spec import Mount, Spec

HERE = "/dovetail"
TOLD = f"{HERE}/told"  # a file whose contents Kubernetes keeps in the pod's status
ACCELERATOR, TOPOLOGY = "cloud.google.com/gke-tpu-accelerator", "cloud.google.com/gke-tpu-topology"
SPOT, FLEX = "cloud.google.com/gke-spot", "cloud.google.com/gke-flex-start"
RESERVATION = "cloud.google.com/reservation-name"
ZONE, HOST = "topology.kubernetes.io/zone", "kubernetes.io/hostname"
JOB_INDEX = "metadata.annotations['jobset.sigs.k8s.io/job-index']"
POD_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
PORTS = (8471, 8080, 8476)  # between TPU hosts, between slices, jax's coordinator


def pod(attempt: Attempt, slices: int, labels: dict[str, str]) -> dict[str, Any]:
    """The template, for one host of a slice."""
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
        "containers": [_container(attempt, slices, [mount for _, mount in volumes])],
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
    """TPU nodes keep others off, and so do those of a tier."""
    found = [{"key": "google.com/tpu", "operator": "Exists", "effect": "NoSchedule"}]
    tier = {"spot": SPOT, "flex-start": FLEX}.get(spec.tier)
    if tier:
        found.append({"key": tier, "operator": "Equal", "value": "true", "effect": "NoSchedule"})
    return found


def _without(hosts: tuple[str, ...]) -> dict[str, Any]:
    rule = {"key": HOST, "operator": "NotIn", "values": list(hosts)}
    required = {"nodeSelectorTerms": [{"matchExpressions": [rule]}]}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}


def _container(attempt: Attempt, slices: int, mounts: list[dict[str, Any]]) -> dict[str, Any]:
    device = attempt.spec.device
    asked = {device.gke_resource: device.chips_per_host}
    held: dict[str, Any] = {
        "name": "main",
        "image": attempt.spec.environment.image,
        "command": ["sh", f"{HERE}/job/start.sh"],
        "terminationMessagePath": TOLD,
        "ports": [{"containerPort": port} for port in PORTS],
        "env": _env(attempt, slices),
        "resources": {"requests": asked, "limits": asked},
        "volumeMounts": mounts,
    }
    if attempt.spec.secrets or attempt.is_call:  # a call has a key
        held["envFrom"] = [{"secretRef": {"name": attempt.name}}]
    return held


def _env(attempt: Attempt, slices: int) -> list[dict[str, Any]]:
    """Who this pod is, as jax and libtpu read it. GKE would set some of it by itself; said here it is sure."""
    name, hosts = attempt.name, attempt.spec.device.hosts
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
    """(volume, where it is mounted)."""
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
    """Through GKE's Cloud Storage FUSE driver."""
    bucket, inside = (re.split("/", mount.source.removeprefix("gs://").strip("/"), maxsplit=1) + [""])[:2]
    options = "implicit-dirs" + (f",only-dir={inside}" if inside else "")
    attributes = {"bucketName": bucket, "mountOptions": options, "hostNetworkPodKSA": "true"}
    driver = {"driver": "gcsfuse.csi.storage.gke.io", "readOnly": mount.read_only, "volumeAttributes": attributes}
    return {"name": name, "csi": driver}, {"name": name, "mountPath": mount.path, "readOnly": mount.read_only}
