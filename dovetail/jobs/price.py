"""What a job costs per hour, and what it costs to read a bucket from afar: rough figures that stop surprises.

Chip prices are those of core.chips. Network and operation prices are Google Cloud's lists (August 2026): between
regions of a continent $0.02 per GB, between continents $0.05 to $0.08 (the dearer is used), class A operations $0.05
and class B $0.004 per 10,000. They rank and warn, they are no offer.
"""

from __future__ import annotations

from dataclasses import dataclass

from dovetail.jobs.spec import Spec

NEAR_GB = 0.02
FAR_GB = 0.08
CLASS_B = 0.004 / 10_000  # one read
READ_MB = 8  # of a read of a checkpoint or a data file
# Flex-start costs less than on-demand, by region: counted in full, so that a ceiling errs to the safe side.
SPOT_TIERS = ("spot",)


@dataclass(frozen=True)
class Price:
    """`hourly` is None where no list has it (TPU7x is sold by contract)."""

    hourly: float | None
    says: str


def price(spec: Spec) -> Price:
    device = spec.device
    if spec.backend in ("local", "slurm") or device.chip is None:
        return Price(0.0, "no price: the machines are yours")
    each = device.chip.spot if spec.tier in SPOT_TIERS else device.chip.dollars
    chips = device.total_chips * spec.slices
    if each is None:
        return Price(None, f"{chips} x {device.chip.name}, {spec.tier}: no public price")
    return Price(each * chips, f"{chips} x {device.chip.name}, {spec.tier}: ${each * chips:,.2f} per hour")


def hourly(spec: Spec) -> float:
    return price(spec).hourly or 0.0


def refuse_blind_ceiling(spec: Spec) -> None:
    """A ceiling in dollars that cannot be counted would be ignored."""
    if spec.ceiling.dollars and price(spec).hourly is None:
        raise ValueError(f"ceiling.dollars cannot be kept: {price(spec).says}; set ceiling.hours in its place")


def continent(region: str) -> str:
    """`us-east5-b` -> `us`."""
    first = region.lower().partition("-")[0]
    return {"us": "us", "northamerica": "us", "europe": "eu", "eu": "eu"}.get(first, first)


def region(zone: str) -> str:
    """`us-east5-b` -> `us-east5`."""
    parts = zone.lower().split("-")
    return "-".join(parts[:2])


def transfer(gigabytes: float, bucket: str, zone: str) -> float:
    """Dollars to read so much of a bucket (its region or multi-region) from a zone."""
    reads = gigabytes * 1000 / READ_MB * CLASS_B
    if region(zone) == bucket.lower() or ("-" not in bucket and continent(bucket) == continent(zone)):
        return reads
    return reads + gigabytes * (NEAR_GB if continent(bucket) == continent(zone) else FAR_GB)


def transfer_warnings(spec: Spec, locations: dict[str, str], gigabytes: float = 1000.0) -> list[str]:
    """One line for each bucket that a zone reads from another region. `locations`: bucket -> its region."""
    lines = []
    for bucket, place in locations.items():
        for zone in spec.zones:
            dollars = transfer(gigabytes, place, zone)
            if dollars > transfer(gigabytes, region(zone), zone):
                lines.append(
                    f"{bucket} is in {place}: read from {zone} it costs ${dollars / gigabytes * 1000:,.0f} per TB"
                )
    return lines
