"""Days and dollars of a run: from the bounds of its step, or from a share of the peak that is taken for granted."""

from __future__ import annotations

from dataclasses import dataclass

from dovetail.core.chips import Chip
from dovetail.core.errors import UserError
from dovetail.models.config import ModelConfig
from dovetail.plan.plans import forward_flops

DAY = 86_400.0
HOUR = 3_600.0
# a unit of time, its seconds, and up to how many of it a time is shown in it; then years
UNITS = (("seconds", 1.0, 120), ("minutes", 60.0, 120), ("hours", HOUR, 48), ("days", DAY, 1000))
YEAR = 365.25 * DAY


def unit_of(seconds: float) -> tuple[str, float]:
    """Return the unit to show a time in, and its seconds."""
    fits = ((name, each) for name, each, most in UNITS if seconds < most * each)
    return next(fits, ("years", YEAR))


@dataclass(frozen=True)
class Cost:
    """Of a whole run, without evaluation, checkpoints, failures and waiting for machines."""

    seconds: float
    dollars: float | None  # None: nobody publishes a price
    spot: float | None

    @property
    def days(self) -> float:
        return self.seconds / DAY


def cost(seconds: float, chips: int, price: float | None, spot: float | None) -> Cost:
    """`price` and `spot`: dollars per chip and hour."""
    chip_hours = chips * seconds / HOUR
    on_demand, cheaper = (None if each is None else each * chip_hours for each in (price, spot))
    return Cost(seconds, on_demand, cheaper)


def seconds_at(cfg: ModelConfig, tokens: float, chip: Chip, chips: int, mfu: float) -> float:
    """What `tokens` take where `chips` chips reach a share `mfu` of their peak: 6 FLOPs per weight and token."""
    if not 0 < mfu <= 1:
        raise UserError(f"an MFU is a share of the peak above 0 and up to 1, such as 0.4; got {mfu:g}")
    return 3 * forward_flops(cfg) * tokens / (chip.bf16 * chips * mfu)


def critical_batch(chip: Chip, weight_bytes: int = 2, flops: float | None = None) -> float:
    """Tokens of a product at which its weights arrive from memory as fast as they are multiplied: below, the chip waits
    for its memory. Two FLOPs per weight and token against the bytes of a weight."""
    return (flops or chip.bf16) * weight_bytes / (2 * chip.bandwidth)
