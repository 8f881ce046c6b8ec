"""The request for TPU slices of an attempt: its names, and its body for Cloud TPU."""

from __future__ import annotations

import os
import re
import uuid
from pathlib import Path
from typing import Any

from dovetail.core.errors import RecipeError, UnsupportedError
from dovetail.jobs.job import Attempt
from dovetail.jobs.spec import Spec

OWNER, JOB, NUMBER = "dovetail-owner", "dovetail-job", "dovetail-attempt"  # labels of every node
MAX_HOURS = 7 * 24  # of flex-start
# The Cloud TPU API's own enumeration, for a topology that has no name as an accelerator type
TYPES = {"v2": "V2", "v3": "V3", "v4": "V4", "v5e": "V5LITE_POD", "v5p": "V5P", "v6e": "V6E"}


def parent(attempt: Attempt) -> str:
    """Return projects/P/locations/ZONE, with the project of the handle if there is one."""
    project = attempt.handle.split("/")[1] if attempt.handle.startswith("projects/") else project_of(attempt.spec)
    if not attempt.zone:
        raise RecipeError(
            "backend gcp-tpu needs `zones` in order of preference, such as zones: [us-east5-b]", param="zones"
        )
    return f"projects/{project}/locations/{attempt.zone}"


def project_of(spec: Spec) -> str:
    """Return the project of a spec, or of the environment."""
    found = spec.gcp.project or os.environ.get("GOOGLE_CLOUD_PROJECT", "")
    if not found:
        raise RecipeError(
            "backend gcp-tpu needs a project: set `gcp.project`, or $GOOGLE_CLOUD_PROJECT", param="gcp.project"
        )
    return found


def request_id(attempt: Attempt) -> str:
    """Return the same id for every create of one attempt, so that the service recognises a repetition."""
    return str(uuid.uuid5(uuid.NAMESPACE_URL, f"{parent(attempt)}/{attempt.owner}/{attempt.name}"))


def node_ids(attempt: Attempt) -> list[str]:
    """Return the id of each slice's node."""
    many = attempt.spec.total_slices
    return [attempt.name] if many == 1 else [f"{attempt.name}-{j}" for j in range(many)]


def labels(attempt: Attempt) -> dict[str, str]:
    """Return the labels of the nodes."""
    own = dict(_label(pair) for pair in attempt.spec.gcp.labels)
    return {**own, OWNER: attempt.owner, JOB: attempt.job, NUMBER: str(attempt.number)}


def _label(pair: str) -> tuple[str, str]:
    key, equals, value = pair.partition("=")
    if not equals or not re.fullmatch(r"[a-z][\w-]{0,62}", key) or not re.fullmatch(r"[a-z0-9_-]{0,63}", value):
        raise RecipeError(
            f"`gcp.labels` must be key=value in lower-case letters, digits, - and _; got {pair!r}", param="gcp.labels"
        )
    return key, value


def resource(attempt: Attempt) -> dict[str, Any]:
    """Return a QueuedResource, in the field names of Google's client."""
    spec, many = attempt.spec, attempt.spec.total_slices
    node_spec: dict[str, Any] = {"parent": parent(attempt), "node": _node(attempt)}
    if many > 1:
        node_spec["multislice_params"] = {"node_count": many, "node_id_prefix": attempt.name}
    else:
        node_spec["node_id"] = attempt.name
    body: dict[str, Any] = {"tpu": {"node_spec": [node_spec]}}
    if spec.tier == "spot":
        body["spot"] = {}
    elif spec.tier == "reservation":
        body["guaranteed"] = {}
        body["reservation_name"] = _reservation(attempt)
    if spec.gcp.wait_hours:
        body["queueing_policy"] = {"valid_until_duration": {"seconds": round(spec.gcp.wait_hours * 3600)}}
    return body


def check(attempt: Attempt) -> None:
    """Raise UserError for an attempt that cannot be requested."""
    resource(attempt)
    if attempt.spec.tier == "flex-start":
        flex_start(attempt)


def _reservation(attempt: Attempt) -> str:
    given = attempt.spec.reservation
    return given if "/" in given else f"{parent(attempt)}/reservations/{given}"


def _node(attempt: Attempt) -> dict[str, Any]:
    spec, device = attempt.spec, attempt.spec.device
    node: dict[str, Any] = {"runtime_version": runtime(spec), "labels": labels(attempt)}
    if device.accelerator_type:
        node["accelerator_type"] = device.accelerator_type
    elif device.chip:
        node["accelerator_config"] = {"type_": TYPES[device.chip.name], "topology": device.topology}
    network = {"enable_external_ips": spec.gcp.external_ips}
    network |= {key: value for key in ("network", "subnetwork") if (value := getattr(spec.gcp, key))}
    node["network_config"] = network
    if spec.gcp.service_account:
        scope = ["https://www.googleapis.com/auth/cloud-platform"]
        node["service_account"] = {"email": spec.gcp.service_account, "scope": scope}
    return node


def runtime(spec: Spec) -> str:
    """Return the runtime version of the VMs."""
    usual = spec.device.runtime_version
    if usual is None:
        raise UnsupportedError(f"{spec.device} is not available as TPU VMs: use backend gke", param="accelerator")
    return spec.gcp.runtime or usual


def flex_start(attempt: Attempt, program: str = "gcloud") -> list[str]:
    """Return the command that requests a flex-start slice: only gcloud's alpha commands can."""
    spec, device, gcp = attempt.spec, attempt.spec.device, attempt.spec.gcp
    if device.accelerator_type is None:
        raise UnsupportedError(
            f"tier flex-start does not support custom topologies: name a standard size; got {device}",
            param="accelerator",
        )
    _, project, _, zone = parent(attempt).split("/")
    many = spec.total_slices
    which = [f"--node-count={many}", f"--node-prefix={attempt.name}"] if many > 1 else [f"--node-id={attempt.name}"]
    hours = min(spec.ceiling.hours or MAX_HOURS, MAX_HOURS)
    words = [
        program, "alpha", "compute", "tpus", "queued-resources", "create", attempt.name, f"--project={project}",
        f"--zone={zone}", *which, f"--accelerator-type={device.accelerator_type}", f"--runtime-version={runtime(spec)}",
        "--provisioning-model=flex-start", f"--max-run-duration={round(hours * 3600)}s",
        "--labels=" + ",".join(f"{key}={value}" for key, value in labels(attempt).items()), "--async", "--quiet",
    ]  # fmt: skip
    options = {"--network": gcp.network, "--subnetwork": gcp.subnetwork, "--service-account": gcp.service_account}
    words += [f"{option}={value}" for option, value in options.items() if value]
    words += [] if gcp.external_ips else ["--internal-ips"]
    return words + ([f"--valid-until-duration={round(gcp.wait_hours * 3600)}s"] if gcp.wait_hours else [])


def preview(spec: Spec) -> dict[str, Any] | list[str]:
    """Return the first zone's request of a job that is not created, or the words of gcloud's command."""
    attempt = Attempt("job", 1, spec, Path(), "owner", spec.zones[0] if spec.zones else "")
    if spec.tier == "flex-start":
        return flex_start(attempt)
    return {"parent": parent(attempt), "queued_resource_id": attempt.name, "queued_resource": resource(attempt)}
