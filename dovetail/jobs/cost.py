"""The cost of a job per hour, and of reading its buckets from another region: estimates that prevent surprises.

Prices of chips are from core.prices, those of networks from core.transfer. The region of a bucket is given in the spec,
or found by gcloud or Google's API. STORAGE_EMULATOR_HOST=http://127.0.0.1:PORT selects another server, without
credentials, as for Google's own clients.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from typing import Any

from dovetail.core.cloud import FAR_GB, NEAR_GB, rate, region, transfer
from dovetail.core.errors import RecipeError
from dovetail.jobs.spec import Spec

# Flex-start costs less than on-demand, depending on the region. It is counted in full, so that a ceiling is safe.
SPOT_TIERS = ("spot",)
ASK_S = 20.0
EMULATOR = "STORAGE_EMULATOR_HOST"
ADDRESS = "https://storage.googleapis.com"


# --- machines ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Price:
    """Dollars per hour, None without a public price (TPU7x is sold by contract), and a line that explains them."""

    hourly: float | None
    says: str


def price(spec: Spec) -> Price:
    """Return the price of a job's machines."""
    device = spec.device
    if spec.backend in ("local", "slurm") or device.chip is None:
        return Price(0.0, "no price: your own machines")
    spot = spec.tier in SPOT_TIERS
    prices = [rate(device.chip, spot, region(zone)).dollars for zone in spec.zones or ("",)]
    each = None if None in prices else max(price for price in prices if price is not None)  # of the dearest zone
    chips = device.total_chips * spec.slices
    if each is None:
        return Price(None, f"{chips} x {device.chip.name}, {spec.tier}: no public price")
    return Price(each * chips, f"{chips} x {device.chip.name}, {spec.tier}: ${each * chips:,.2f} per hour")


def hourly(spec: Spec) -> float:
    """Return dollars per hour; 0 if there is no price."""
    return price(spec).hourly or 0.0


def check_ceiling(spec: Spec) -> None:
    """Raise RecipeError for a ceiling in dollars on machines without a price: it would have no effect."""
    if spec.ceiling.dollars and price(spec).hourly is None:
        raise RecipeError(
            f"`ceiling.dollars` cannot be enforced: {price(spec).says}; set `ceiling.hours` instead",
            param="ceiling.dollars",
        )


# --- buckets ----------------------------------------------------------------------------------------------------------


def locations(spec: Spec) -> dict[str, str]:
    """Return the region of each bucket that cloud machines would read; "" if it is not known."""
    if spec.backend not in ("gcp-tpu", "gke"):
        return {}
    own = {"gcp-tpu": spec.gcp.bucket, "gke": spec.gke.bucket}[spec.backend]
    given = {one.source: one.region for one in spec.mounts} | ({own: ""} if own else {})
    return {source: place or location(source) for source, place in given.items() if source.startswith("gs://")}


def location(source: str) -> str:
    """Return the region of gs://NAME/FOLDER; "" if neither gcloud nor the API can tell."""
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
    """Ask with google-auth, which the extra `gcp` installs; any failure means that the region is not known."""
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


def bucket_warnings(spec: Spec, found: dict[str, str]) -> list[str]:
    """Return one line per problem with the buckets of a job; `found` is the result of `locations`."""
    return [*_transfers(spec, found), *_unknown(found), *_unsaved(spec)]


def _transfers(spec: Spec, found: dict[str, str], gigabytes: float = 1000.0) -> list[str]:
    """Warn of buckets that a zone reads from another region."""
    lines = []
    for bucket, place in found.items():
        for zone in spec.zones if place else ():
            dollars = transfer(gigabytes, place, zone)
            if dollars > transfer(gigabytes, region(zone), zone):
                lines.append(
                    f"{bucket} is in {place}: reading it from {zone} costs ${dollars / gigabytes * 1000:,.0f} per TB"
                )
    return lines


def _unknown(found: dict[str, str]) -> list[str]:
    """Warn of buckets whose region is not known."""
    dollars = f"${NEAR_GB * 1000:.0f} to ${FAR_GB * 1000:.0f} per TB"
    how = "set the mount's `region`, or install gcloud"
    return [
        f"the region of {source} is not known ({how}): reading it from another region costs {dollars}"
        for source, place in found.items()
        if not place
    ]


def _unsaved(spec: Spec) -> list[str]:
    """Warn of a training whose checkpoints are lost with its machines."""
    own = {"gcp-tpu": spec.gcp.bucket, "gke": spec.gke.bucket}.get(spec.backend, "none needed")
    if own or not spec.recipe:
        return []
    name = {"gcp-tpu": "gcp.bucket", "gke": "gke.bucket"}[spec.backend]
    return [
        f"{name} is not set: checkpoints are lost with the machines, and the next attempt starts from the beginning"
    ]
