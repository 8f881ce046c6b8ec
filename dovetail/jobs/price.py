"""What a job costs per hour, and what it costs to read a bucket from afar: rough figures that stop surprises.

Chip prices are those of core.prices, those of networks and operations core.transfer's.
"""

from __future__ import annotations

from dataclasses import dataclass

from dovetail.core.errors import UserError
from dovetail.core.prices import rate
from dovetail.core.transfer import region, transfer
from dovetail.jobs.spec import Spec

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
    spot = spec.tier in SPOT_TIERS
    prices = [rate(device.chip, spot, region(zone)).dollars for zone in spec.zones or ("",)]
    each = None if None in prices else max(price for price in prices if price is not None)  # where it will run is open
    chips = device.total_chips * spec.slices
    if each is None:
        return Price(None, f"{chips} x {device.chip.name}, {spec.tier}: no public price")
    return Price(each * chips, f"{chips} x {device.chip.name}, {spec.tier}: ${each * chips:,.2f} per hour")


def hourly(spec: Spec) -> float:
    return price(spec).hourly or 0.0


def refuse_blind_ceiling(spec: Spec) -> None:
    """A ceiling in dollars that cannot be counted would be ignored."""
    if spec.ceiling.dollars and price(spec).hourly is None:
        raise UserError(f"ceiling.dollars cannot be kept: {price(spec).says}; set ceiling.hours in its place")


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
