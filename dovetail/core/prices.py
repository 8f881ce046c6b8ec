"""What a chip costs per hour, by region: the one table that jobs and plans read.

The default is the chip's own price in core.chips, which is that of Google Cloud's US regions. Where a list has another
one for a region it is here: on-demand prices of Cloud TPU's price page as of 2025-11; spot prices move from month to
month and are taken to be cut by the same share. Whoever pays another price says so: `Rate(dollars)`.
"""

from __future__ import annotations

from dataclasses import dataclass

from dovetail.core.chips import Chip
from dovetail.core.errors import UserError

# chip -> region -> dollars per chip and hour, on demand
ELSEWHERE: dict[str, dict[str, float]] = {
    "v2": {"europe-west4": 1.24, "asia-east1": 1.31},
    "v3": {"europe-west4": 2.20},
    "v5e": {"europe-west4": 1.56, "asia-southeast1": 1.56},
    "v6e": {"europe-west4": 2.97, "asia-northeast1": 3.24},
}


@dataclass(frozen=True)
class Rate:
    """Dollars per chip and hour, and whose price that is."""

    dollars: float | None  # None: not published (TPU7x, GB200: by contract)
    says: str


def rate(chip: Chip | None, spot: bool = False, region: str = "", given: float | None = None) -> Rate:
    """Return the price of a chip; `given` comes before every list. Commands check the region (core.regions)."""
    region = region.lower()
    if given is not None:
        if given < 0:
            raise UserError(f"a price is 0 or more dollars per chip and hour; got {given:g}")
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
