"""Predict the step time of a run before its first step, and compare the prediction with the measured time."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax

from dovetail.core.accelerator import Accelerator, of_devices
from dovetail.core.chips import Chip, chip_of, cpu_chip
from dovetail.core.host import host_memory
from dovetail.core.units import format_duration
from dovetail.models.config import ModelConfig
from dovetail.plan.calibration import Fractions, Observation
from dovetail.plan.derive import Derived
from dovetail.plan.plans import MeshPlan
from dovetail.plan.train_time import StepTime, spans_of, step_time

FILE = "prediction.json"  # in a run's folder


@dataclass(frozen=True)
class Prediction:
    """Hold the predicted seconds of a training step on all devices."""

    chip: str
    devices: int
    products: float  # products, memory and links: at the chip's peaks
    memory: float
    links: float
    best: float
    worst: float
    likely: float | None = None  # at the calibrated fractions of the peaks
    calibrated: str = ""  # the runs that the fractions come from

    @property
    def says(self) -> str:
        """Return the sentence for the start of a run."""
        bounds = f"{format_duration(self.best)} to {format_duration(self.worst)}"
        if self.likely is None:
            return f"a step is predicted to take {bounds} (bounds, from the peaks of {self.chip})"
        return f"a step is predicted to take {format_duration(self.likely)} ({self.calibrated}; bounds {bounds})"

    def beside(self, measured: float) -> str:
        """Return the sentence that compares the prediction with the `measured` median step."""
        guess = f"{format_duration(self.best)} to {format_duration(self.worst)}"
        guess = guess if self.likely is None else f"{format_duration(self.likely)}, within {guess}"
        verdict = ""
        if measured > self.worst:
            verdict = ": slower than the upper bound, so something else delays it (other work on the machine, data)"
        elif measured < self.best:
            verdict = ": faster than the lower bound, so steps had fewer tokens, or the chip's table is wrong"
        return f"a step takes {format_duration(measured)} (median), predicted {guess}{verdict}"

    def observed(self, run: str, measured: float, date: str = "") -> Observation:
        """Return the observation of a run for the calibration."""
        return Observation(run, self.chip, self.devices, self.products, self.memory, self.links, measured, date)

    def plain(self) -> dict[str, Any]:
        """Return the prediction for JSON."""
        return asdict(self)


def predict_training(
    cfg: ModelConfig, derived: Derived, chip: Chip, known: Fractions | None = None, slices: int = 1
) -> Prediction:
    """Return the prediction for a step of a derived recipe. `known`: the calibrated fractions of this chip."""
    settings = derived.settings
    # CPU devices share one memory
    machine = of_devices(chip, derived.devices, slices) if chip.kinds else Accelerator(None, (derived.devices,))
    plan = MeshPlan(
        settings.mesh, bool(settings.scan), settings.remat, settings.per_device, settings.accumulate, derived.memory
    )

    def timed(reached: Fractions | None) -> StepTime:
        return step_time(cfg, settings, plan, chip, spans_of(plan, chip, machine), reached)

    peak, likely = timed(None), timed(known) if known else None
    return Prediction(
        chip.name, derived.devices, peak.products, peak.memory, peak.links, peak.lower, peak.upper,
        likely.lower if likely else None, known.describe() if known else "",
    )  # fmt: skip


def chip_here(device: Any) -> Chip | None:
    """Return the chip of a local jax device; None if it is not in the table.

    A CPU is described by its cores, which all devices of this process share.
    """
    if getattr(device, "platform", "") != "cpu":
        return chip_of(device)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return replace(cpu_chip(cores, host_memory() or 0), devices=jax.local_device_count())
