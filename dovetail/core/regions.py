"""The regions and zones of Google Cloud: the one list that plans, jobs and the doctor check names against.

As of August 2026; `us-central2` holds TPU v4 and is open by request. Zones are a region's name and a suffix
(`us-east5-b`, `us-central1-ai1a`): which suffixes a region has differs by product, so only their form is checked.
"""

from __future__ import annotations

import re

from dovetail.core.choice import did_you_mean
from dovetail.core.errors import UserError

REGIONS = (
    "africa-south1",
    "asia-east1", "asia-east2", "asia-northeast1", "asia-northeast2", "asia-northeast3", "asia-south1", "asia-south2",
    "asia-southeast1", "asia-southeast2", "asia-southeast3",
    "australia-southeast1", "australia-southeast2",
    "europe-central2", "europe-north1", "europe-north2", "europe-southwest1", "europe-west1", "europe-west2",
    "europe-west3", "europe-west4", "europe-west6", "europe-west8", "europe-west9", "europe-west10", "europe-west12",
    "me-central1", "me-central2", "me-west1",
    "northamerica-northeast1", "northamerica-northeast2", "northamerica-south1",
    "southamerica-east1", "southamerica-west1",
    "us-central1", "us-central2", "us-east1", "us-east4", "us-east5", "us-south1", "us-west1", "us-west2", "us-west3",
    "us-west4",
)  # fmt: skip
MULTI_REGIONS = ("us", "eu", "asia")  # of buckets
DUAL_REGIONS = {"nam4": "us", "eur4": "eu", "eur5": "eu", "eur7": "eu", "eur8": "eu", "asia1": "asia"}  # and continents


def region(zone: str) -> str:
    """Return the region of a zone: `us-east5-b` -> `us-east5`; a region is returned as it is."""
    return "-".join(zone.lower().split("-")[:2])


def check_region(name: str, given: str) -> str:
    """Return a region in lower case; ValueError, starting with the option's or field's `name`, if there is none."""
    if given.lower() not in REGIONS:
        raise UserError(f"{name} must be a region of Google Cloud, such as us-central1; got {_unknown(given)}")
    return given.lower()


def check_zone(name: str, zone: str) -> str:
    """Return `zone` in lower case; ValueError if its region is unknown or it has no suffix."""
    if region(zone) not in REGIONS:
        raise UserError(f"{name} must be a zone of Google Cloud, such as us-central1-a; got {_unknown(zone)}")
    if not re.fullmatch(r"[a-z]+-[a-z]+[0-9]+-(ai[0-9]+)?[a-z]", zone.lower()):
        raise UserError(f"{name} must be a zone, such as {region(zone)}-a; got {zone!r}")
    return zone.lower()


def check_place(name: str, place: str) -> str:
    """Return where a bucket is, in lower case: a region, a dual-region or a multi-region."""
    if place.lower() not in (*REGIONS, *MULTI_REGIONS, *DUAL_REGIONS):
        raise UserError(
            f"{name} must be a region of Google Cloud, such as us-central1, or us, eu or asia; got {_unknown(place)}"
        )
    return place.lower()


def _unknown(given: str) -> str:
    """Return `given` and either the nearest region or all of them."""
    near = did_you_mean(region(given), REGIONS)
    return f"{given!r}.{near}" if near else f"{given!r}. Known: {', '.join(REGIONS)}"
