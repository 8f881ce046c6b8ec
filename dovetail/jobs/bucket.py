"""In which region a job's buckets lie: as its spec says, else as gcloud or Google's API do; "" where none of them can.

STORAGE_EMULATOR_HOST=http://127.0.0.1:PORT leads to another server, without credentials, as for Google's own clients.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import Any

from dovetail.core.transfer import FAR_GB, NEAR_GB
from dovetail.jobs.spec import Spec

ASK_S = 20.0
EMULATOR = "STORAGE_EMULATOR_HOST"
ADDRESS = "https://storage.googleapis.com"


def locations(spec: Spec) -> dict[str, str]:
    """Bucket -> region, for those that machines in the cloud would read."""
    if spec.backend not in ("gcp-tpu", "gke"):
        return {}
    own = {"gcp-tpu": spec.gcp.bucket, "gke": spec.gke.bucket}[spec.backend]
    given = {one.source: one.region for one in spec.mounts} | ({own: ""} if own else {})
    return {source: region or location(source) for source, region in given.items() if source.startswith("gs://")}


def location(source: str) -> str:
    name = source.removeprefix("gs://").partition("/")[0]
    found = _by_api(name) if os.environ.get(EMULATOR) else _by_gcloud(name) or _by_api(name)
    return {"nam4": "us", "eur4": "eu", "asia1": "asia"}.get(found.strip().lower(), found.strip().lower())


def _by_gcloud(name: str) -> str:
    if shutil.which("gcloud") is None:
        return ""
    command = ["gcloud", "storage", "buckets", "describe", f"gs://{name}", "--format=value(location)"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ASK_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _by_api(name: str) -> str:
    """Through google-auth, which the extra `gcp` brings. Whatever fails, the answer is that it is not known."""
    try:
        host = os.environ.get(EMULATOR, "")
        with _session(host) as session:
            address = f"{host or ADDRESS}/storage/v1/b/{name}"
            answer = session.get(address, params={"fields": "location"}, timeout=ASK_S)
            return str(answer.json().get("location", "")) if answer.ok else ""
    except Exception:
        return ""


def _session(host: str) -> Any:
    import requests

    if host:
        return requests.Session()
    import google.auth
    from google.auth.transport.requests import AuthorizedSession

    scope = "https://www.googleapis.com/auth/devstorage.read_only"
    return AuthorizedSession(google.auth.default(scopes=[scope])[0])


def keeping_warnings(spec: Spec) -> list[str]:
    """A training whose checkpoints lie on machines that are given back has nothing to go on from."""
    own = {"gcp-tpu": spec.gcp.bucket, "gke": spec.gke.bucket}.get(spec.backend, "none needed")
    if own or not spec.recipe:
        return []
    name = {"gcp-tpu": "gcp.bucket", "gke": "gke.bucket"}[spec.backend]
    return [f"{name} is not set: what the recipe saves goes with its machines, and the next attempt begins anew"]


def unknown_warnings(found: dict[str, str]) -> list[str]:
    """One line for each bucket of which nobody here could say where it is."""
    cost = f"${NEAR_GB * 1000:.0f} to ${FAR_GB * 1000:.0f} per TB"
    how = "say it with the mount's `region`, or install gcloud"
    return [
        f"the region of {source} is not known here ({how}): read from another one it costs {cost}"
        for source, region in found.items()
        if not region
    ]
