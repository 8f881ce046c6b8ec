"""`dovetail job template terraform`: the machines of a spec as Terraform."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dovetail.core.errors import RecipeError, UnsupportedError
from dovetail.jobs.spec import Spec

FOLDER = Path(__file__).parent / "templates"
MAX_HOURS = 7 * 24  # of flex-start
OWN_ACCOUNT = ".iam.gserviceaccount.com"  # ends the domain of accounts that users make; the project is before it


def terraform(spec: Spec) -> str:
    """Return one .tf file with everything that a job of this spec uses and does not make itself.

    This is access to its buckets, its own bucket if it names one, and for gke a cluster whose TPU nodes exist only
    while a job needs them.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    if spec.backend not in ("gcp-tpu", "gke"):
        raise RecipeError(
            f"`backend` must be gcp-tpu or gke for Terraform, got {spec.backend}: set backend=gke", param="backend"
        )
    words = _words(spec)
    made = Environment(loader=FileSystemLoader(FOLDER), undefined=StrictUndefined, keep_trailing_newline=True)
    made.filters["hcl"] = hcl
    names = ("common.tf.j2", f"{spec.backend.replace('-', '_')}.tf.j2")
    return "".join(made.get_template(name).render(words) for name in names)


def hcl(value: Any) -> str:
    """Return a value in HCL: as JSON, with template markers in text escaped."""
    return json.dumps(value).replace("${", "$${").replace("%{", "%%{")


def _words(spec: Spec) -> dict[str, Any]:
    device = spec.device
    gke = spec.backend == "gke"
    if not gke and device.runtime_version is None:
        raise UnsupportedError(f"{device} is not available as TPU VMs: use backend gke", param="accelerator")
    if gke and device.machine_type is None:
        raise UnsupportedError(
            f"GKE has no nodes with {device}: name a TPU that it has, such as v6e-16", param="accelerator"
        )
    account, _, domain = spec.gcp.service_account.partition("@")
    is_own = domain.endswith(OWN_ACCOUNT)  # not one of Google's own
    made = "google_container_cluster.jobs" if gke else "google_service_account.jobs"
    return {
        "gke": gke, "bucket": _bucket(spec.gke.bucket if gke else spec.gcp.bucket), "buckets": _buckets(spec),
        "made": [made] if gke or is_own else [], "service_account": spec.gcp.service_account,
        "account_id": account if is_own else "", "account_project": domain.removesuffix(OWN_ACCOUNT),
        "secrets": [pair.partition("=gcp:")[2] for pair in spec.secrets if "=gcp:" in pair], "queue": spec.gke.queue,
        "accelerator": device.name, "explained": device.explain(), "slice": device.slice_name,
        "slices": spec.total_slices,
        "name": _name(spec.name), "project": spec.gcp.project, "zone": spec.zones[0] if spec.zones else "",
        "tier": spec.tier, "reservation": spec.reservation, "hosts": device.hosts, "topology": device.topology,
        "machine_type": device.machine_type, "namespace": spec.gke.namespace,
        "kube_account": spec.gke.service_account or "default",
        "max_run_seconds": round(min(spec.ceiling.hours or MAX_HOURS, MAX_HOURS) * 3600),
    }  # fmt: skip


def _bucket(source: str) -> str:
    """Return the name of the bucket in gs://name/folder."""
    return source.removeprefix("gs://").partition("/")[0]


def _buckets(spec: Spec) -> list[dict[str, str]]:
    """Return each bucket that the job's programs use, with the role that they need."""
    own = spec.gke.bucket if spec.backend == "gke" else spec.gcp.bucket
    writes = {_bucket(own): True} if own else {}
    for mount in spec.mounts:
        name = _bucket(mount.source)
        writes[name] = writes.get(name, False) or not mount.read_only
    role = {True: "roles/storage.objectUser", False: "roles/storage.objectViewer"}
    return [{"name": name, "role": role[writing]} for name, writing in writes.items()]


def _name(text: str) -> str:
    """Return a name valid for every resource: lower case, a letter first, at most 20 characters."""
    kept = "".join(letter if letter.isalnum() and letter.isascii() else "-" for letter in text.lower())[:20].strip("-")
    return kept if kept[:1].isalpha() else f"job-{kept}"[:20].strip("-")
