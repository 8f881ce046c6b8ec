"""The training loop: launch a step, read the results of the previous one, stop at boundaries.

One step is in flight while the host reads the results of the previous one, unless the rows depend on the weights
(`BatchSource.ahead`). A boundary (a checkpoint, an evaluation, a trace, the end) waits until nothing is in flight, so
that the state is that of one known step.

Faults are handled in train.guard: `health` judges a step on the device, `doctor` decides what to do about a bad one,
`watch` ends a run that hangs, and `stop` handles signals.
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

from dovetail.core.reporter import Reporter
from dovetail.core.types import Batch, num_rows
from dovetail.train.boundary import Boundary
from dovetail.train.guard import health
from dovetail.train.guard.doctor import Decision, Doctor, StepResult, Verdict
from dovetail.train.guard.exits import PREEMPTED
from dovetail.train.guard.stop import Stop
from dovetail.train.guard.watch import Watchdog
from dovetail.train.prepare import Ready
from dovetail.train.report.goodput import Goodput, added
from dovetail.train.report.metrics import RunMetrics
from dovetail.train.rows import BatchSource
from dovetail.train.saves import Saves
from dovetail.train.state import Position
from dovetail.train.step import Step


@dataclass(frozen=True)
class PendingStep:
    """Hold a step whose results have not been read yet."""

    step: int  # the number of its update
    index: int  # the number of its batch
    batch: Batch
    metrics: dict[str, jax.Array]


class Loop:
    """Train from `at` to the end, a signal or a fault; `at` is then where the loop ended."""

    def __init__(
        self,
        ready: Ready,
        source: BatchSource,
        at: Position,
        *,
        saves: Saves,
        boundary: Boundary,
        doctor: Doctor,
        metrics: RunMetrics,
        goodput: Goodput,
        reporter: Reporter,
        watchdog: Watchdog,
        stop: Stop,
    ):
        self.ready, self.settings, self.source, self.at = ready, ready.settings, source, at
        self.saves, self.boundary, self.doctor = saves, boundary, doctor
        self.metrics, self.goodput, self.reporter = metrics, goodput, reporter
        self.watchdog, self.stop = watchdog, stop
        self.total = self.settings.total_steps
        # compiled steps by (rows, the most documents of a row, entries of a row's tables)
        self._steps: dict[tuple[int, int | None, tuple[int, ...]], Step] = {}
        self._inflight: deque[PendingStep] = deque()
        # seconds, tokens and notes of each step since the last reported line
        self._unreported: list[tuple[float, int, Mapping[str, float]]] = []
        self._clock = time.monotonic()  # when the last step ended, or the last pause

    def run(self) -> int:
        """Return the exit code."""
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
        """Return whether the next step is neither past the end nor past an unvisited boundary."""
        last = self.at.step + len(self._inflight)
        return last < self.total and not (self._inflight and self.boundary.is_at(last))

    def _launch(self) -> None:
        at = self.at
        while self.doctor.skips(at.cursor):
            at.cursor += 1
        with self.goodput.span("data") if self.source.waits else nullcontext():
            rows = self.source.get(at)
        run = self._step_for(at.cursor, num_rows(rows), self.ready.entries_of(rows))
        self.stop.begin()
        self.goodput.begin()
        step = at.step + len(self._inflight) + 1
        self.boundary.trace.begin(step)
        batch = self.ready.put(rows)
        at.state, metrics = run(at.state, batch)
        self._inflight.append(PendingStep(step, at.cursor, batch, metrics))
        at.cursor += 1

    def _step_for(self, index: int, rows: int, entries: tuple[int, ...]) -> Step:
        """Return the compiled step for a batch with `rows` rows in this process.

        A batch whose rows hold more documents, or whose tables are larger, needs another compilation.
        """
        bound = self.ready.bucket(self.source.documents(index) if self.ready.platform == "cuda" else 1)
        if (rows, bound, entries) not in self._steps:
            began = time.monotonic()
            with (
                self.goodput.span("compile"),
                self.watchdog.suspend("compiling"),
                self.reporter.waiting("compiling the training step"),
            ):
                self._steps[rows, bound, entries] = self.ready.compile(bound, rows, entries)
            self._clock += time.monotonic() - began  # compilation is not part of a step's time
        return self._steps[rows, bound, entries]

    def _look(self, launched: PendingStep) -> Verdict | None:
        """Read and report a step's results; return the verdict if the step was bad."""
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

    def _trouble(self, bad: PendingStep, values: dict[str, Any]) -> Verdict:
        """Replay a bad step and act on the doctor's verdict.

        The state is halted, so neither the steps in flight behind the bad one nor its replays change it. (If replicas
        disagree about a good step, the state is not halted, but nothing of it is kept.)
        """
        self._inflight.clear()
        self.goodput.undone()
        run = self._step_for(bad.index, self.ready.rows_of(bad.batch), self.ready.entries_of(bad.batch))
        results = [self._result(values)]
        with self.goodput.span("replay"), self.watchdog.suspend("replaying a step"):
            for _ in range(self.settings.health.replays):
                self.at.state, metrics = run(self.at.state, bad.batch)
                results.append(self._result(_fetched(metrics)))
        verdict = self.doctor.examine(bad.step, bad.index, results, self.at.saved)
        self.reporter.note(verdict.reason)
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
        places = jax.tree.map(lambda leaf: leaf.sharding, self.ready.abstract_state.health)
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
