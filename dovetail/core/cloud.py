"""Regions and zones of Google Cloud, and its prices of chips, storage and transfer, for plans, jobs and the doctor.

Regions are as of August 2026; `us-central2` holds TPU v4 and is open by request. A zone is a region's name and a suffix
(`us-east5-b`, `us-central1-ai1a`). Which suffixes a region has differs by product, so only their syntax is checked.

Chips: the default price is that of core.chips, for US regions; `ELSEWHERE` has on-demand prices of other regions (Cloud
TPU's price page, 2025-11). Spot prices change monthly and are scaled by the same ratio. Pass `given` for another price.

Bytes (August 2026): between regions of a continent $0.02 per GB, between continents $0.05 to $0.08 (the higher one is
used), to the internet $0.12 (the first TB of a month, premium tier); class A operations (writes, lists) $0.05 and class
B (reads) $0.004 per 10,000; standard storage $0.020 per GB and month in a US region, $0.026 in a multi-region. These
prices rank choices and trigger warnings.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from dovetail.core.chips import Chip
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
    """Return the region in lower case; raise UserError with `name` (a flag or a key) as `param` for an unknown one."""
    if given.lower() not in REGIONS:
        raise UserError(
            f"{name} must be a region of Google Cloud, such as us-central1; got {_unknown(given)}", param=name
        )
    return given.lower()


def check_zone(name: str, zone: str) -> str:
    """Return the zone in lower case; raise UserError for an unknown region or a missing suffix."""
    if region(zone) not in REGIONS:
        raise UserError(
            f"{name} must be a zone of Google Cloud, such as us-central1-a; got {_unknown(zone)}", param=name
        )
    if not re.fullmatch(r"[a-z]+-[a-z]+[0-9]+-(ai[0-9]+)?[a-z]", zone.lower()):
        raise UserError(f"{name} must be a zone, such as {region(zone)}-a; got {zone!r}", param=name)
    return zone.lower()


def check_place(name: str, place: str) -> str:
    """Return a bucket's location in lower case: a region, a dual-region or a multi-region."""
    if place.lower() not in (*REGIONS, *MULTI_REGIONS, *DUAL_REGIONS):
        raise UserError(
            f"{name} must be a region of Google Cloud, such as us-central1, or us, eu or asia; got {_unknown(place)}",
            param=name,
        )
    return place.lower()


def _unknown(given: str) -> str:
    """Return `given` and either the nearest region or all of them."""
    near = did_you_mean(region(given), REGIONS)
    return f"{given!r}.{near}" if near else f"{given!r}. Known: {', '.join(REGIONS)}"


# chip -> region -> dollars per chip and hour, on demand
ELSEWHERE: dict[str, dict[str, float]] = {
    "v2": {"europe-west4": 1.24, "asia-east1": 1.31},
    "v3": {"europe-west4": 2.20},
    "v5e": {"europe-west4": 1.56, "asia-southeast1": 1.56},
    "v6e": {"europe-west4": 2.97, "asia-northeast1": 3.24},
}


@dataclass(frozen=True)
class Rate:
    """Hold the dollars per chip and hour, and the source of the price."""

    dollars: float | None  # None: not published (TPU7x, GB200: by contract)
    says: str


def rate(chip: Chip | None, spot: bool = False, region: str = "", given: float | None = None) -> Rate:
    """Return the price of a chip; `given` overrides every list. Commands check the region with `check_region`."""
    region = region.lower()
    if given is not None:
        if given < 0:
            raise UserError(f"a price is 0 or more dollars per chip and hour; got {given:g}", param="price")
        return Rate(given, f"${given:g} per chip and hour, as given")
    if chip is None or chip.dollars is None:
        name = chip.name if chip else "CPU"
        return Rate(None, f"no public price of {name}: give yours with --price")
    listed = ELSEWHERE.get(chip.name, {}).get(region, chip.dollars)
    dollars = listed if not spot else (chip.spot or chip.dollars) * listed / chip.dollars
    other = region and not region.startswith("us-")
    where = region if listed != chip.dollars else f"US (none is listed for {region})" if other else "US"
    kind = "spot" if spot else "on demand"
    return Rate(dollars, f"${dollars:.2f} per chip and hour {kind}, list of Google Cloud, {where}, 2026-08")


NEAR_GB = 0.02
FAR_GB = 0.08
CLASS_A = 0.05 / 10_000  # one write
CLASS_B = 0.004 / 10_000  # one read
PIECE_MB = 8  # of a read or write of a checkpoint or a data file
REGION_GB_MONTH, MULTI_REGION_GB_MONTH = 0.020, 0.026


def continent(place: str) -> str:
    """Return the continent of a zone, a region or a bucket's location: `us-east5-b` -> `us`."""
    first = place.lower().partition("-")[0]
    return {"us": "us", "northamerica": "us", "europe": "eu", "eu": "eu", **DUAL_REGIONS}.get(first, first)


def is_multi_region(bucket: str) -> bool:
    """Return whether a bucket's location is a multi-region or dual-region, such as `us`, `eu`, `asia` or `nam4`."""
    return "-" not in bucket


def per_gb(bucket: str, zone: str) -> float:
    """Return the dollars to transfer one GB between a bucket (its region or multi-region) and a zone."""
    if region(zone) == bucket.lower() or (is_multi_region(bucket) and continent(bucket) == continent(zone)):
        return 0.0
    return NEAR_GB if continent(bucket) == continent(zone) else FAR_GB


def transfer(gigabytes: float, bucket: str, zone: str) -> float:
    """Return the dollars to read this many gigabytes of a bucket from a zone."""
    return gigabytes * 1000 / PIECE_MB * CLASS_B + gigabytes * per_gb(bucket, zone)


def storage(gigabytes: float, bucket: str = "") -> float:
    """Return the dollars to store this many gigabytes for a month."""
    many = bool(bucket) and is_multi_region(bucket)
    return gigabytes * (MULTI_REGION_GB_MONTH if many else REGION_GB_MONTH)
