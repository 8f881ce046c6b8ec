"""The loop: launch a step, look at the results of the one before, stop at boundaries.

One step is under way while the host reads the results of the one before, unless the weights make the rows
(`Source.ahead`). A boundary (a checkpoint, a measurement, a trace, the end) waits until nothing is under way, so that
the state is that of one known step.

What a step may not do is in train.guard.health (judged on the device), train.guard.doctor (what to do about a bad one),
train.guard.watchdog (a hang) and train.guard.stop (a signal).
"""

from __future__ import annotations

import dataclasses
import signal
import time
from collections import deque
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from dovetail.core.types import Batch
from dovetail.train.boundary import Boundary
from dovetail.train.guard import health
from dovetail.train.guard.doctor import Decision, Doctor, StepResult, Verdict
from dovetail.train.guard.exits import PREEMPTED
from dovetail.train.guard.stop import Stop
from dovetail.train.guard.watchdog import Watchdog
from dovetail.train.position import Position
from dovetail.train.prepare import Ready
from dovetail.train.report.goodput import Goodput
from dovetail.train.report.metrics import RunMetrics
from dovetail.train.report.split import added
from dovetail.train.rows import Source
from dovetail.train.saves import Saves
from dovetail.train.step import Step


@dataclass(frozen=True)
class StepUnderWay:
    step: int  # the update it makes
    index: int  # of its batch
    batch: Batch
    metrics: dict[str, jax.Array]


class Loop:
    """From `at` to the end, a signal or a fault; `at` is then where it ended."""

    def __init__(
        self,
        ready: Ready,
        source: Source,
        at: Position,
        *,
        saves: Saves,
        boundary: Boundary,
        doctor: Doctor,
        metrics: RunMetrics,
        goodput: Goodput,
        watchdog: Watchdog,
        stop: Stop,
    ):
        self.ready, self.settings, self.source, self.at = ready, ready.settings, source, at
        self.saves, self.boundary, self.doctor = saves, boundary, doctor
        self.metrics, self.goodput, self.watchdog, self.stop = metrics, goodput, watchdog, stop
        self.total = self.settings.total_steps
        # compiled, by rows, the most documents of a row, and the entries of a row's tables
        self._steps: dict[tuple[int, int | None, int], Step] = {}
        self._inflight: deque[StepUnderWay] = deque()
        self._unreported: list[tuple[float, int, Mapping[str, float]]] = []  # seconds, tokens and notes of the steps
        # since the last line
        self._clock = time.monotonic()  # when the last step ended, or the last pause

    def run(self) -> int:
        """The exit code."""
        while self.at.step < self.total:
            leaving = self.stop.is_due(self.at.step)
            stopping = leaving or self.saves.is_time(self.at.step)
            if not stopping and self._may_launch():
                self._launch()
            if self._inflight and (stopping or len(self._inflight) == self.source.ahead or not self._may_launch()):
                verdict = self._look(self._inflight.popleft())
                if verdict is not None and verdict.exit_code is not None:
                    return verdict.exit_code
            if not self._inflight and (stopping or self.boundary.is_at(self.at.step)):
                with self.watchdog.suspend("a boundary"):
                    self.source.settle()
                    self.boundary.visit(self.at, stopping, bool(self.stop.signal))
                self._clock = time.monotonic()
                if leaving:
                    return 130 if self.stop.signal == signal.SIGINT else PREEMPTED
        return 0

    # --- a step -------------------------------------------------------------------------------------------------------

    def _may_launch(self) -> bool:
        """Not past the end, nor past a boundary that has not been dealt with."""
        last = self.at.step + len(self._inflight)
        return last < self.total and not (self._inflight and self.boundary.is_at(last))

    def _launch(self) -> None:
        at = self.at
        while self.doctor.skips(at.cursor):
            at.cursor += 1
        with self.goodput.span("data") if self.source.waits else nullcontext():
            rows = self.source.get(at)
        run = self._step_for(at.cursor, len(rows.tokens), self.ready.entries_of(rows))
        self.stop.begin()
        self.goodput.begin()
        step = at.step + len(self._inflight) + 1
        self.boundary.trace.begin(step)
        batch = self.ready.put(rows)
        at.state, metrics = run(at.state, batch)
        self._inflight.append(StepUnderWay(step, at.cursor, batch, metrics))
        at.cursor += 1

    def _step_for(self, index: int, rows: int, entries: int) -> Step:
        """The step for a batch with so many rows here: compiled anew where they hold more documents than those
        before, or larger tables."""
        bound = self.ready.bucket(self.source.documents(index) if self.ready.platform == "cuda" else 1)
        if (rows, bound, entries) not in self._steps:
            began = time.monotonic()
            with (
                self.goodput.span("compile"),
                self.watchdog.suspend("compiling"),
                self.metrics.waiting("compiling the training step"),
            ):
                self._steps[rows, bound, entries] = self.ready.compile(bound, rows, entries)
            self._clock += time.monotonic() - began  # no part of a step's time
        return self._steps[rows, bound, entries]

    def _look(self, launched: StepUnderWay) -> Verdict | None:
        """Take in a step's results; the verdict if it was bad."""
        values = _fetched(launched.metrics)
        self.watchdog.beat(launched.step)
        now = time.monotonic()
        seconds, self._clock = now - self._clock, now
        if not values.pop("ok") or self.doctor.outliers(self._result(values)):
            return self._trouble(launched, values)
        values.pop("checksums")
        self.at.step = launched.step
        self.goodput.step(self.at.step)
        notes = dict(self.source.notes(launched.index))
        tokens = int(notes.pop("tokens", self.settings.tokens_per_step))
        self._unreported.append((seconds, tokens, notes))
        if passage := self.source.passage(launched.index):
            self.metrics.show(self.at.step, passage)
        if self.at.step % self.settings.log_every == 0 or self.at.step == self.total:
            took, counts, noted = zip(*self._unreported, strict=True)
            self.metrics.record(self.at.step, {**values, **notes, **added(noted)}, sum(took), sum(counts))
            self._unreported.clear()
        return None

    # --- a bad step ---------------------------------------------------------------------------------------------------

    def _trouble(self, bad: StepUnderWay, values: dict[str, Any]) -> Verdict:
        """What was dispatched behind a bad step did nothing, and neither does a replay: the state is halted. (Where
        replicas disagree about a good step it goes on, but then nothing of it is kept.)"""
        self._inflight.clear()
        self.goodput.undone()
        run = self._step_for(bad.index, self.ready.rows_of(bad.batch), self.ready.entries_of(bad.batch))
        results = [self._result(values)]
        with self.goodput.span("replay"), self.watchdog.suspend("replaying a step"):
            for _ in range(self.settings.health.replays):
                self.at.state, metrics = run(self.at.state, bad.batch)
                results.append(self._result(_fetched(metrics)))
        verdict = self.doctor.examine(bad.step, bad.index, results, self.at.saved)
        self.metrics.remark(verdict.reason)
        if verdict.decision is Decision.SKIP:
            self._clear(bad.index + 1)
        elif verdict.decision is Decision.ROLLBACK:
            self._roll_back()
        self._clock = time.monotonic()
        return verdict

    def _result(self, values: dict[str, Any]) -> StepResult:
        sums = np.asarray(values["checksums"]).tolist()
        ids = [device.id for device in self.ready.placement.mesh.devices.flat] if sums else []
        return StepResult(values["loss"], values["grad_norm"], dict(zip(ids, sums, strict=True)))

    def _clear(self, cursor: int) -> None:
        places = jax.tree.map(lambda leaf: leaf.sharding, self.ready.form.health)
        checks = jax.jit(health.cleared, out_shardings=places)(self.at.state.health)
        self.at.state = dataclasses.replace(self.at.state, health=checks)
        self.at.cursor = cursor

    def _roll_back(self) -> None:
        with self.watchdog.suspend("restoring"):
            self.at = self.saves.restore()
        self.metrics.rewind(self.at.step)


def _fetched(metrics: dict[str, jax.Array]) -> dict[str, Any]:
    values = jax.device_get({k: v for k, v in metrics.items() if k != "checksums"})
    sums = metrics.get("checksums")
    return {k: v.item() for k, v in values.items()} | {"checksums": [] if sums is None else _all(sums)}


def _all(x: jax.Array) -> Any:
    if jax.process_count() == 1:
        return jax.device_get(x)
    from jax.experimental import multihost_utils

    return multihost_utils.process_allgather(x, tiled=True)
