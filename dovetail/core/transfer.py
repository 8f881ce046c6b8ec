"""What a cloud takes for keeping bytes, touching them and sending them elsewhere.

Google Cloud's lists (August 2026): between regions of a continent $0.02 per GB, between continents $0.05 to $0.08 (the
dearer is used), to the internet $0.12 (the first TB of a month, premium tier); class A operations (writes, lists) $0.05
and class B (reads) $0.004 per 10,000; standard storage $0.020 per GB and month in a region of the US, $0.026 in a
multi-region. They rank and warn, they are no offer.
"""

from __future__ import annotations

from dovetail.core.regions import DUAL_REGIONS, region

NEAR_GB = 0.02
FAR_GB = 0.08
INTERNET_GB = 0.12
CLASS_A = 0.05 / 10_000  # one write
CLASS_B = 0.004 / 10_000  # one read
PIECE_MB = 8  # of a read or write of a checkpoint or a data file
REGION_GB_MONTH, MULTI_REGION_GB_MONTH = 0.020, 0.026


def continent(place: str) -> str:
    """Return the continent of a zone, a region or a bucket's place: `us-east5-b` -> `us`."""
    first = place.lower().partition("-")[0]
    return {"us": "us", "northamerica": "us", "europe": "eu", "eu": "eu", **DUAL_REGIONS}.get(first, first)


def is_multi_region(bucket: str) -> bool:
    """Whether a bucket is in several regions: `us`, `eu`, `asia`, `nam4`."""
    return "-" not in bucket


def per_gb(bucket: str, zone: str) -> float:
    """Dollars to carry a GB between a bucket (its region or multi-region) and a zone."""
    if region(zone) == bucket.lower() or (is_multi_region(bucket) and continent(bucket) == continent(zone)):
        return 0.0
    return NEAR_GB if continent(bucket) == continent(zone) else FAR_GB


def transfer(gigabytes: float, bucket: str, zone: str) -> float:
    """Dollars to read so much of a bucket from a zone."""
    return gigabytes * 1000 / PIECE_MB * CLASS_B + gigabytes * per_gb(bucket, zone)


def storage(gigabytes: float, bucket: str = "") -> float:
    """Dollars to keep so much for a month."""
    many = bool(bucket) and is_multi_region(bucket)
    return gigabytes * (MULTI_REGION_GB_MONTH if many else REGION_GB_MONTH)
