"""Step times: Pace measures how long steps take on this machine, Predictor says how long they should take."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from dovetail.core.accelerator import Accelerator, of_devices
from dovetail.core.compute import Compute
from dovetail.engine.device.batch import DISPATCH_SECONDS, LEAST_TOKENS
from dovetail.engine.schedule.plan import StepPlan
from dovetail.models.config import ModelConfig
from dovetail.plan.calibration import fractions
from dovetail.plan.prediction import chip_here
from dovetail.plan.serve_time import Bounds, Replica

STEP_SECONDS = 0.3  # target of a step with prompts on a CPU: streams wait about this long for their next token
GROWTH = 0.8  # share of STEP_SECONDS that a larger step may take, so that the size does not alternate
SHARE = 0.3  # weight of the newest step in the running averages


class Pace:
    """Measure how long steps take, and choose how many prompt tokens a step may have.

    Args:
        most: Tokens of the largest step.
        token_seconds: An estimate for a prompt token, improved by measurements; None: steps with prompts are as large
            as they may be.
    """

    def __init__(self, most: int, token_seconds: float | None = None):
        self.decode_seconds = DISPATCH_SECONDS  # of one decode step
        self.token_seconds = token_seconds
        self._most, self._last_fetch = most, 0.0
        self.tokens = most if token_seconds is None else self._within(STEP_SECONDS)  # of a step with prompts

    def fetched(self, plan: StepPlan, padded: int, others: bool) -> float | None:
        """Measure a step whose tokens have been fetched.

        Where steps run back to back, the time between two fetches is the later step's own.

        Args:
            plan: The step's plan.
            padded: The tokens that it computed.
            others: Whether later steps are in flight.

        Returns:
            The step's seconds, if it was measured.
        """
        now, seconds = time.perf_counter(), None
        if self._last_fetch and others:
            seconds = now - self._last_fetch
            if not plan.num_drafts:
                self.learn(plan, padded, seconds)
        self._last_fetch = now if others else 0.0  # an idle time is not a step's time
        return seconds

    def rest(self) -> None:
        """Do not measure the next step: something else took time too."""
        self._last_fetch = 0.0

    def learn(self, plan: StepPlan, padded: int, seconds: float) -> None:
        """Add a measured step to the running averages."""
        if plan.is_decode and plan.rows:
            self.decode_seconds += SHARE * (seconds / plan.steps - self.decode_seconds)
        elif self.token_seconds is not None:
            self.token_seconds += SHARE * (seconds / padded - self.token_seconds)
            self.tokens = max(self._within(GROWTH * STEP_SECONDS), min(self.tokens, self._within(STEP_SECONDS)))

    def set(self, token_seconds: float) -> None:
        """Replace the estimate by a measurement at the start."""
        if self.token_seconds is not None:
            self.token_seconds = token_seconds
            self.tokens = self._within(STEP_SECONDS)

    def _within(self, seconds: float) -> int:
        """Return the tokens, a power of two as steps are compiled for, that take at most `seconds`."""
        assert self.token_seconds is not None
        tokens = int(seconds / max(self.token_seconds, 1e-9))
        return min(self._most, max(LEAST_TOKENS, 1 << max(0, tokens.bit_length() - 1)))


@dataclass(frozen=True)
class Predictor:
    """Predict decode steps; `replica` is None where no prediction is possible, and `why` is the reason."""

    replica: Replica | None
    why: str = ""

    def decode(self, batch: int, context: float) -> Bounds | None:
        """Return the predicted seconds of a step for `batch` sequences of `context` tokens."""
        return self.replica.decode(batch, context) if self.replica and batch else None

    def describe(self, rows: int, context: int) -> str:
        """Return a line with the predicted throughput of 1 and of `rows` sequences of `context` tokens."""
        if self.replica is None:
            return self.why
        parts = []
        for batch in dict.fromkeys((1, rows)):
            step = self.replica.decode(batch, context)
            parts.append(f"{batch} x {rates(step, batch)}")
        known = self.replica.fractions
        return f"predicted decode at {context:,} tokens, out tok/s: {'; '.join(parts)}" + (
            f" ({known.describe()})" if known else " (bounds)"
        )


def rates(step: Bounds, batch: int) -> str:
    """Return the tokens per second of all sequences, such as `102 to 318`, with the calibrated value if known."""
    likely = "" if step.likely is None else f"{batch / step.likely:,.0f}, within "
    return f"{likely}{batch / step.worst:,.0f} to {batch / step.best:,.0f}"


def predictor(cfg: ModelConfig, compute: Compute, devices: list[Any]) -> Predictor:
    """Return the predictor of a model on these devices."""
    chip, tensor = chip_here(devices[0]), len(devices)
    if chip is None:
        return Predictor(None, f"no prediction: {devices[0].device_kind} is not in the table of chips")
    if not cfg.layers:
        return Predictor(None, "no prediction: the model is a PyTorch module")
    if cfg.scored:
        return Predictor(None, "no prediction: a reward model does not decode")
    machine = of_devices(chip, tensor) or Accelerator(chip, (tensor,))
    try:
        replica = Replica(cfg, machine, tensor, compute.name, fractions=fractions(chip.name))
        replica.decode(1, 1)
    except (ValueError, ArithmeticError, LookupError) as error:  # a missing prediction must not stop the engine
        return Predictor(None, f"no prediction: {error!r}")
    return Predictor(replica)
