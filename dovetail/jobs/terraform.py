"""`dovetail job template terraform`: a spec's machines as Terraform, for those who keep infrastructure as code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dovetail.jobs.spec import Spec

FOLDER = Path(__file__).parent / "templates"
LONGEST_H = 7 * 24  # of flex-start


def terraform(spec: Spec) -> str:
    """One .tf file: a bucket, a service account, and the TPU VMs (gcp-tpu) or the cluster and its node pools (gke)."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    if spec.backend not in ("gcp-tpu", "gke"):
        raise ValueError(f"there is Terraform for backend gcp-tpu and gke; got {spec.backend}: set backend=gke, say")
    words = _words(spec)
    made = Environment(loader=FileSystemLoader(FOLDER), undefined=StrictUndefined, keep_trailing_newline=True)
    made.filters["hcl"] = hcl
    names = ("common.tf.j2", f"{spec.backend.replace('-', '_')}.tf.j2")
    return "".join(made.get_template(name).render(words) for name in names)


def hcl(value: Any) -> str:
    """A value as HCL has it, which is JSON's, less the templates within text."""
    return json.dumps(value).replace("${", "$${").replace("%{", "%%{")


def _words(spec: Spec) -> dict[str, Any]:
    device, slices = spec.device, spec.slices * spec.device.slices
    gcp = spec.backend == "gcp-tpu"
    if gcp and (device.accelerator_type is None or spec.tier == "flex-start"):
        what = "tier flex-start" if spec.tier == "flex-start" else f"{device} as TPU VMs"
        raise ValueError(
            f"Terraform's google provider has no {what}: use backend gke, or let `dovetail job create` ask"
        )
    if not gcp and device.machine_type is None:
        raise ValueError(f"GKE has no nodes with {device}: name a TPU that it has, such as v6e-16")
    return {
        "accelerator": device.name, "explained": device.explain(), "slice": device.slice_name, "slices": slices,
        "name": _name(spec.name), "project": spec.gcp.project, "zone": spec.zones[0] if spec.zones else "",
        "tier": spec.tier, "reservation": spec.reservation, "hosts": device.hosts, "topology": device.topology,
        "machine_type": device.machine_type, "accelerator_type": device.accelerator_type,
        "runtime": spec.gcp.runtime or device.runtime_version, "external_ips": spec.gcp.external_ips,
        "network": spec.gcp.network, "subnetwork": spec.gcp.subnetwork, "namespace": spec.gke.namespace,
        "kube_account": spec.gke.service_account or "default",
        "max_run_seconds": round(min(spec.ceiling.hours or LONGEST_H, LONGEST_H) * 3600),
    }  # fmt: skip


def _name(text: str) -> str:
    """Fit for every resource: lower case, at most 20 characters (a service account has 30), a letter first."""
    kept = "".join(letter if letter.isalnum() and letter.isascii() else "-" for letter in text.lower())[:20].strip("-")
    return kept if kept[:1].isalpha() else f"job-{kept}"[:20].strip("-")
