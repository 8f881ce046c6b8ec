"""A pretraining run, from its recipe to its report.

One step is always under way while the host reads the results of the one before. A boundary (a checkpoint, a
measurement, a trace, the end) waits until nothing is under way, so that the state is that of one known step.

What a step may not do is in train.health (judged on the device), train.doctor (what to do about a bad one),
train.watchdog (a hang) and train.stop (a signal).
"""

from __future__ import annotations

import platform as machine
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

from dovetail.core.chips import chip_of
from dovetail.core.recipe import dump, to_yaml
from dovetail.core.types import Batch
from dovetail.io.checkpoint import Checkpoints
from dovetail.io.tokenizer import Tokenizer
from dovetail.train import health, report
from dovetail.train.doctor import Decision, Doctor, Result, Verdict
from dovetail.train.exits import PREEMPTED
from dovetail.train.export import export
from dovetail.train.files import write_whole
from dovetail.train.flops import train_flops_per_token
from dovetail.train.goodput import Goodput
from dovetail.train.metrics import Metrics, Work
from dovetail.train.prepare import Ready
from dovetail.train.state import DTYPES, TrainState
from dovetail.train.step import Step
from dovetail.train.stop import Stop, Together
from dovetail.train.watchdog import Watchdog

IN_FLIGHT = 2  # steps dispatched before the first of them is looked at


class Rows(Protocol):
    """Batches by their number (data.loader.Loader)."""

    def batch(self, step: int) -> Batch: ...
    def iterate(self, start_step: int = 0) -> Iterator[Batch]: ...
    def documents(self, step: int) -> int: ...


@dataclass(frozen=True)
class Launched:
    step: int  # the update it makes
    index: int  # of its batch
    batch: Batch
    metrics: dict[str, jax.Array]


class Run:
    """`train` is asked for this process's share of the rows (Ready.rows_here)."""

    def __init__(
        self,
        ready: Ready,
        folder: Path,
        train: Rows,
        held_out: Rows | None = None,
        tokenizer: Tokenizer | None = None,
        goodput: Goodput | None = None,
        show: bool = True,
    ):
        self.ready, self.settings, self.folder = ready, ready.settings, folder
        self.held_out, self.tokenizer, self.show = held_out, tokenizer, show
        self.first = jax.process_index() == 0
        self.goodput = goodput or Goodput()
        self.batches = Batches(train)
        self.total = self.settings.total_steps
        self._steps: dict[int | None, Step] = {}
        self._unsaid: list[float] = []  # seconds of the steps since the last line
        self._remarks: list[str] = []  # made before there is a line to show them above
        self._inflight: deque[Launched] = deque()
        self._command: subprocess.Popen | None = None
        self._tracing = False
        self._by_clock = Together("save")

    # --- the run ------------------------------------------------------------------------------------------------------

    def go(self) -> int:
        """Train until the end, a signal or a fault; the exit code."""
        wanted = self.settings.checkpoint
        self.folder.mkdir(parents=True, exist_ok=True)
        self.checkpoints = Checkpoints(
            self.folder / "checkpoints", durable=wanted.durable, keep=wanted.keep, keep_every=wanted.keep_every,
            durable_every=wanted.durable_every, on_problem=self._remark,
        )  # fmt: skip
        with self.checkpoints, Stop() as self.stop:
            self._begin()
            with (
                Metrics(
                    self.folder, steps=self.total, step=self.step, work=self._work(), goodput=self.goodput,
                    first=self.first, show=self.show,
                ) as self.metrics,
                Watchdog(self.settings.health.hang_seconds, self.folder) as self.watchdog,
            ):  # fmt: skip
                for text in self._remarks:
                    self.metrics.remark(text)
                code = self._train()
            self._end(code)
        return code

    def _begin(self) -> None:
        """The newest good checkpoint, or a new state."""
        self.cursor = self.step = 0  # the next batch, the last update
        self.saved: int | None = None  # the cursor of the last good checkpoint
        with self.goodput.span("restore"):
            if self.checkpoints.latest() is not None:
                self._restore()
                self._remark(f"going on after step {self.step:,}, from {self.folder / 'checkpoints'}")
        if self.saved is None:
            with self.goodput.span("init"):
                self.state: TrainState = self.ready.init(self._given_weights())
        if self.first:
            write_whole(self.folder / "recipe.yaml", to_yaml(self.settings))
        owners = {d.id: (d.process_index, _host_of(d)) for d in jax.devices()}
        layout = jax.tree.map(lambda leaf: leaf.sharding.spec, self.ready.form.params)
        self.doctor = Doctor(
            self.settings.health, self.folder, process=jax.process_index(), owners=owners,
            replicas=health.replicas(self.ready.placement.mesh, layout), exact=self.ready.platform == "cpu",
        )  # fmt: skip
        self._clock = self._saved_at = time.monotonic()

    def _train(self) -> int:
        while self.step < self.total:
            leaving = self.stop.is_due(self.step)
            stopping = leaving or self._is_time()
            if not stopping and self._may_launch():
                self._launch()
            if self._inflight and (stopping or len(self._inflight) == IN_FLIGHT or not self._may_launch()):
                verdict = self._look(self._inflight.popleft())
                if verdict is not None and verdict.exit_code is not None:
                    return verdict.exit_code
            if not self._inflight and (stopping or self._is_boundary(self.step)):
                self._at_boundary(stopping)
                if leaving:
                    return 130 if self.stop.signal == signal.SIGINT else PREEMPTED
        return 0

    def _end(self, code: int) -> None:
        self.checkpoints.wait()
        self._await_command()
        self.goodput.save()
        if self.first and self.step and code in (0, PREEMPTED, 130):
            report.write(self.folder)

    # --- a step -------------------------------------------------------------------------------------------------------

    def _may_launch(self) -> bool:
        """Not past the end, nor past a boundary that has not been dealt with."""
        last = self.step + len(self._inflight)
        return last < self.total and not (self._inflight and self._is_boundary(last))

    def _launch(self) -> None:
        while self.doctor.skips(self.cursor):
            self.cursor += 1
        with self.goodput.span("data"):
            rows = self.batches.get(self.cursor)
        run = self._step_for(self.batches.rows.documents(self.cursor) if self.ready.platform == "cuda" else 1)
        step = self.step + len(self._inflight) + 1
        window = self.settings.profile_window
        if window and step == window[0] and self.first:
            jax.profiler.start_trace(str(self.folder / "profile"))
            self._tracing = True
        batch = self.ready.put(rows)
        self.state, metrics = run(self.state, batch)
        self._inflight.append(Launched(step, self.cursor, batch, metrics))
        self.cursor += 1

    def _step_for(self, documents: int) -> Step:
        bound = self.ready.bucket(documents)
        if bound not in self._steps:
            with self.goodput.span("compile"), self.watchdog.suspend("compiling"):
                self._steps[bound] = self.ready.compile(bound)
                self._clock = time.monotonic()
        return self._steps[bound]

    def _look(self, launched: Launched) -> Verdict | None:
        """Take in a step's results; the verdict if it was bad."""
        values = _fetched(launched.metrics)
        self.watchdog.beat(launched.step)
        now = time.monotonic()
        seconds, self._clock = now - self._clock, now
        if not values.pop("ok") or self.doctor.outliers(self._result(values)):
            return self._trouble(launched, values)
        values.pop("checksums")
        self.step = launched.step
        self.goodput.step(self.step, seconds)
        self._unsaid.append(seconds)
        if self.step % self.settings.log_every == 0 or self.step == self.total:
            tokens = len(self._unsaid) * self.settings.tokens_per_step
            self.metrics.record(self.step, values, sum(self._unsaid), tokens)
            self._unsaid.clear()
        return None

    def _trouble(self, bad: Launched, values: dict[str, Any]) -> Verdict:
        """What was dispatched behind a bad step did nothing, and neither does a replay: the state is halted. (Where
        replicas disagree about a good step it goes on, but then nothing of it is kept.)"""
        self._inflight.clear()
        run = self._step_for(self.batches.rows.documents(bad.index) if self.ready.platform == "cuda" else 1)
        results = [self._result(values)]
        with self.goodput.span("replay"), self.watchdog.suspend("replaying a step"):
            for _ in range(self.settings.health.replays):
                self.state, metrics = run(self.state, bad.batch)
                results.append(self._result(_fetched(metrics)))
        verdict = self.doctor.examine(bad.step, bad.index, results, self.saved)
        self.metrics.remark(verdict.reason)
        if verdict.decision is Decision.SKIP:
            self._clear(bad.index + 1)
        elif verdict.decision is Decision.ROLLBACK:
            self._roll_back()
        self._clock = time.monotonic()
        return verdict

    def _result(self, values: dict[str, Any]) -> Result:
        sums = np.asarray(values["checksums"]).tolist()
        ids = [device.id for device in self.ready.placement.mesh.devices.flat] if sums else []
        return Result(values["loss"], values["grad_norm"], dict(zip(ids, sums, strict=True)))

    def _clear(self, cursor: int) -> None:
        form = self.ready.form.health
        checks = jax.jit(health.cleared, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, form))(
            self.state.health
        )
        self.state = TrainState(self.state.params, self.state.opt, self.state.step, checks, self.state.ema)
        self.cursor = cursor

    def _roll_back(self) -> None:
        with self.goodput.span("restore"), self.watchdog.suspend("restoring"):
            self._restore()
            self.goodput.restored(self.step)
        self.metrics.rewind(self.step)

    def _restore(self) -> None:
        self.state, meta, self.step = self.checkpoints.restore(self.ready.form)
        self.cursor = self.saved = int(meta["cursor"])
        if meta["data"] != self._data_key():
            raise ValueError(
                f"the run in {self.folder} was begun with other data, batch or length; give another --run-dir, or the "
                "recipe it was begun with"
            )
        self.goodput.restored(self.step)

    # --- boundaries ---------------------------------------------------------------------------------------------------

    def _is_boundary(self, step: int) -> bool:
        return step == self.total or bool(self._due(step)) or step in (self._window_end(), self._window_end(first=True))

    def _due(self, step: int) -> set[str]:
        s, every = self.settings, {}
        every = {
            "save": s.checkpoint.every, "evaluate": s.eval.every, "export": s.checkpoint.export_hf,
            "command": s.eval.command_every,
        }  # fmt: skip
        return {what for what, n in every.items() if n and step and step % n == 0}

    def _window_end(self, first: bool = False) -> int:
        window = self.settings.profile_window
        return -1 if window is None else (window[0] if first else window[1]) - 1

    def _is_time(self) -> bool:
        """Whether the clock asks for a checkpoint: all processes must do it after the same step."""
        minutes = self.settings.checkpoint.minutes
        return bool(minutes) and self._by_clock.is_due(time.monotonic() - self._saved_at > 60 * minutes, self.step)

    def _at_boundary(self, stopping: bool) -> None:
        due, over = self._due(self.step), self.step == self.total
        if self._tracing and (self.step == self._window_end() or over or self.stop.signal):
            jax.profiler.stop_trace()
            self._tracing = False
            self.metrics.remark(f"traced into {self.folder / 'profile'}: xprof {self.folder / 'profile'} shows it")
        with self.watchdog.suspend("a boundary"):
            if self.held_out and ("evaluate" in due or (over and self.settings.eval.every)):
                self._evaluate()
            if "export" in due or "command" in due or (over and self.settings.checkpoint.export_hf):
                self._export("command" in due)
            if ("save" in due or over or stopping) and self.step:
                self._save(durable=over or bool(self.stop.signal))
        self._clock = time.monotonic()

    def _save(self, durable: bool) -> None:
        meta = {"cursor": self.cursor, "data": self._data_key(), "recipe": dump(self.settings)}
        with self.goodput.span("checkpoint"):
            far = True if durable and self.settings.checkpoint.durable else None
            self.checkpoints.save(self.step, self.state, meta, far)
        self.saved, self._saved_at = self.cursor, time.monotonic()
        self._by_clock.done()

    def _evaluate(self) -> None:
        assert self.held_out is not None
        with self.goodput.span("eval"):
            start, total, targets = time.monotonic(), 0.0, 0.0
            for i in range(self.settings.eval.batches):
                nll, count = self._evaluator(
                    self.state.ema or self.state.params, self.ready.put(self.held_out.batch(i))
                )
                total, targets = total + float(nll), targets + float(count)
            loss = total / max(targets, 1.0)
            self.metrics.evaluated(self.step, {"held_out_loss": loss}, time.monotonic() - start)

    @cached_property
    def _evaluator(self) -> Callable:
        with self.goodput.span("compile"):
            return self.ready.evaluate()

    def _export(self, command: bool) -> None:
        """The averaged weights, where there are any. A command on the folder runs beside the training."""
        folder = self.folder / "export" / f"step_{self.step}"
        with self.goodput.span("checkpoint"):
            weights = self.state.ema or self.state.params
            export(folder, self.ready.cfg, weights, self.tokenizer, DTYPES[self.settings.precision.compute])
        self.metrics.remark(f"exported to {folder}")
        if command and self.first:
            self._await_command()
            out = self.folder / "eval" / f"step_{self.step}.txt"
            out.parent.mkdir(exist_ok=True)
            line = self.settings.eval.command.replace("{folder}", str(folder))
            with out.open("w") as file:
                self._command = subprocess.Popen(line, shell=True, stdout=file, stderr=subprocess.STDOUT)

    def _await_command(self) -> None:
        if self._command is not None and (code := self._command.wait()):
            self._remark(f"eval.command exited with {code}: see {self.folder / 'eval'}")
        self._command = None

    # --- what the run is ----------------------------------------------------------------------------------------------

    def _given_weights(self) -> Any:
        if not self.settings.init:
            return None
        from dovetail.io.hf import has_mtp, read_params
        from dovetail.io.hub import resolve
        from dovetail.io.load import open_checkpoint

        path = resolve(self.settings.init)
        source, _, _ = open_checkpoint(path)
        dtype, further = DTYPES[self.settings.precision.params], bool(self.settings.loss.mtp) and has_mtp(source)
        return read_params(source, self.ready.cfg, dtype, str(path), self.ready.placement, mtp=further)

    def _work(self) -> Work:
        cfg, length = self.ready.cfg, self.settings.length
        chip = chip_of(jax.devices()[0])
        peak = chip.device_bf16 * jax.device_count() if chip and chip.device_bf16 else None
        return Work(train_flops_per_token(cfg, length, False), train_flops_per_token(cfg, length, True), peak)

    def _data_key(self) -> dict[str, Any]:
        """What decides which rows a batch holds."""
        s = self.settings
        return {"data": dump(s.data), "batch": s.batch, "length": s.length}

    def _remark(self, text: str) -> None:
        if hasattr(self, "metrics"):
            self.metrics.remark(text)
        else:
            self._remarks.append(text)


class Batches:
    """A loader read ahead: asked for anything but the next batch, it starts anew there."""

    def __init__(self, rows: Rows):
        self.rows, self._next, self._found = rows, -1, None

    def get(self, index: int) -> Batch:
        if index != self._next or self._found is None:
            if self._found is not None:
                self._found.close()  # type: ignore[attr-defined]
            self._found = self.rows.iterate(index)
        self._next = index + 1
        return next(self._found)


def _fetched(metrics: dict[str, jax.Array]) -> dict[str, Any]:
    values = jax.device_get({k: v for k, v in metrics.items() if k != "checksums"})
    sums = metrics.get("checksums")
    return {k: v.item() for k, v in values.items()} | {"checksums": [] if sums is None else _all(sums)}


def _all(x: jax.Array) -> Any:
    if jax.process_count() == 1:
        return jax.device_get(x)
    from jax.experimental import multihost_utils

    return multihost_utils.process_allgather(x, tiled=True)


def _host_of(device: Any) -> str:
    return machine.node() if device.process_index == jax.process_index() else f"process {device.process_index}"
