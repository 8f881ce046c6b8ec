"""How long an engine's decode steps are predicted to take on the devices it runs on, beside what is measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dovetail.core.accelerator import Accelerator, of_devices
from dovetail.core.compute import Compute
from dovetail.models.config import ModelConfig
from dovetail.plan.calibration import fractions
from dovetail.plan.here import chip_here
from dovetail.plan.serve_time import Bounds, Replica


@dataclass(frozen=True)
class Predictor:
    """`replica` is None where nothing can be said, and `why` says why."""

    replica: Replica | None
    why: str = ""

    def decode(self, batch: int, context: float) -> Bounds | None:
        """Seconds of a step for `batch` sequences of `context` tokens."""
        return self.replica.decode(batch, context) if self.replica and batch else None

    def says(self, rows: int, context: int) -> str:
        """For the start of a server: one sequence, and as many as a step takes, each of `context` tokens."""
        if self.replica is None:
            return self.why
        told = []
        for batch in dict.fromkeys((1, rows)):
            step = self.replica.decode(batch, context)
            told.append(f"{batch} x {rates(step, batch)}")
        known = self.replica.fractions
        return f"predicted decode at {context:,} tokens, out tok/s: {'; '.join(told)}" + (
            f" ({known.describe()})" if known else " (bounds)"
        )


def rates(step: Bounds, batch: int) -> str:
    """`102 to 318`, and as calibrated where that is known: tokens per second of all sequences."""
    likely = "" if step.likely is None else f"{batch / step.likely:,.0f}, within "
    return f"{likely}{batch / step.worst:,.0f} to {batch / step.best:,.0f}"


def predictor(cfg: ModelConfig, compute: Compute, devices: list[Any]) -> Predictor:
    chip, tensor = chip_here(devices[0]), len(devices)
    if chip is None:
        return Predictor(None, f"no prediction: {devices[0].device_kind} is not in the table of chips")
    if cfg.scored:
        return Predictor(None, "no prediction: a model that gives scores decodes nothing")
    machine = of_devices(chip, tensor) or Accelerator(chip, (tensor,))
    try:
        replica = Replica(cfg, machine, tensor, compute.name, fractions=fractions(chip.name))
        replica.decode(1, 1)
    except (ValueError, ArithmeticError, LookupError) as error:  # what a plan lacks must not keep an engine from going
        return Predictor(None, f"no prediction: {error!r}")
    return Predictor(replica)
