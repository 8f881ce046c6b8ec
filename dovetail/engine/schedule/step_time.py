"""Pace: how long steps take on this machine, learnt as they run, and how many tokens of prompts a step may have."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from dovetail.core.accelerator import Accelerator, of_devices
from dovetail.core.compute import Compute
from dovetail.engine.device.buckets import DISPATCH_SECONDS, LEAST_TOKENS
from dovetail.engine.schedule.plan import StepPlan
from dovetail.models.config import ModelConfig
from dovetail.plan.calibration import fractions
from dovetail.plan.here import chip_here
from dovetail.plan.serve_time import Bounds, Replica

STEP_SECONDS = 0.3  # of a step with prompts on a CPU, about: so long the streams beside it wait for their next token
GROWTH = 0.8  # of that is what a longer step may take by what was learnt: the size does not change to and fro
SHARE = 0.3  # of what was learnt that the newest step replaces


class Pace:
    """`most`: tokens of the largest step. `token_seconds`: a guess of what a token of a prompt takes, from which on it
    is learnt; None: steps with prompts are as large as they may be."""

    def __init__(self, most: int, token_seconds: float | None = None):
        self.decode_seconds = DISPATCH_SECONDS  # of one decode step
        self.token_seconds = token_seconds
        self._most, self._last_fetch = most, 0.0
        self._tokens = most if token_seconds is None else self._within(STEP_SECONDS)

    @property
    def tokens(self) -> int:
        """Return how many tokens a step with prompts may have: a power of two, as steps are compiled for."""
        return self._tokens

    def fetched(self, plan: StepPlan, padded: int, others: bool) -> None:
        """Learn from a step whose tokens have come. `padded`: the tokens that it computed. `others`: steps are under
        way behind it. Where steps run back to back, the time between two fetches is the later step's own."""
        now = time.perf_counter()
        if self._last_fetch and others:
            self.learn(plan, padded, now - self._last_fetch)
        self._last_fetch = now if others else 0.0  # what follows a rest says nothing of the pace

    def rest(self) -> None:
        """Learn nothing from the next step: something else took time too."""
        self._last_fetch = 0.0

    def learn(self, plan: StepPlan, padded: int, seconds: float) -> None:
        """Take in that a step took so long."""
        if plan.is_decode and plan.rows:
            self.decode_seconds += SHARE * (seconds / plan.steps - self.decode_seconds)
        elif self.token_seconds is not None:
            self.token_seconds += SHARE * (seconds / padded - self.token_seconds)
            self._tokens = max(self._within(GROWTH * STEP_SECONDS), min(self._tokens, self._within(STEP_SECONDS)))

    def set(self, token_seconds: float) -> None:
        """Take a measurement at the start in place of the guess."""
        if self.token_seconds is not None:
            self.token_seconds = token_seconds
            self._tokens = self._within(STEP_SECONDS)

    def _within(self, seconds: float) -> int:
        assert self.token_seconds is not None
        tokens = int(seconds / max(self.token_seconds, 1e-9))
        return min(self._most, max(LEAST_TOKENS, 1 << max(0, tokens.bit_length() - 1)))


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
