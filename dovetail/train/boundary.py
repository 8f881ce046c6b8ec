"""What a run does between two steps, when nothing is under way: measure, export, save."""

from __future__ import annotations

import json
import time
from functools import cached_property
from pathlib import Path

import jax

from dovetail.core.compute import compute_of
from dovetail.io.tokenizer import Tokenizer
from dovetail.train.export import Command
from dovetail.train.position import Position
from dovetail.train.prepare import Ready
from dovetail.train.report.goodput import Goodput
from dovetail.train.report.metrics import AVERAGED, TRAINED, RunMetrics
from dovetail.train.report.summary import SAMPLES
from dovetail.train.rows import Rows, Samples
from dovetail.train.saves import Saves
from dovetail.train.step import Evaluate
from dovetail.train.trace import Trace


class Boundary:
    def __init__(
        self,
        ready: Ready,
        folder: Path,
        saves: Saves,
        metrics: RunMetrics,
        goodput: Goodput,
        held_out: Rows | None,
        tokenizer: Tokenizer | None,
        samples: Samples | None = None,
    ):
        self._ready, self._settings, self._folder = ready, ready.settings, folder
        self._saves, self._metrics, self._goodput = saves, metrics, goodput
        self._held_out, self._tokenizer, self._samples = held_out, tokenizer, samples
        self._first = jax.process_index() == 0
        self._total = self._settings.total_steps
        self._command = Command(self._settings.eval.command, folder, metrics.remark)
        self._exports_at_end = bool(self._settings.checkpoint.export_hf or self._settings.exports_at_end)
        self.trace = Trace(self._settings.profile_window, folder, self._first, metrics.remark)

    def is_at(self, step: int) -> bool:
        return step == self._total or bool(self._due(step)) or self.trace.is_boundary(step)

    def visit(self, at: Position, stopping: bool, signalled: bool) -> None:
        """`stopping`: a save is wanted now; `signalled`: because the run is told to end."""
        due, over = self._due(at.step), at.step == self._total
        self.trace.end(at.step, leaving=over or signalled)
        if self._held_out and ("evaluate" in due or (over and self._settings.eval.every)):
            self._evaluate(at, self._held_out)
        if self._samples and ("sample" in due or over):
            self._sample(at, self._samples)
        if "export" in due or "command" in due or (over and self._exports_at_end):
            self._export(at, "command" in due)
        if ("save" in due or over or stopping) and at.step:
            self._saves.save(at, durable=over or signalled)

    def end(self) -> None:
        """Wait for what runs beside the training."""
        self._command.wait()

    def _due(self, step: int) -> set[str]:
        s = self._settings
        every = {
            "save": s.checkpoint.every, "evaluate": s.eval.every, "export": s.checkpoint.export_hf,
            "command": s.eval.command_every, "sample": self._samples.every if self._samples else 0,
        }  # fmt: skip
        return {what for what, n in every.items() if n and step and step % n == 0}

    def _evaluate(self, at: Position, rows: Rows) -> None:
        """The mean of each measure over the held-out batches."""
        with self._goodput.span("eval"):
            start, weight, totals = time.monotonic(), 0.0, {}
            for i in range(self._settings.eval.batches):
                weights, batch = at.state.ema or at.state.params, self._ready.put(rows.batch(i))
                sums, more = self._evaluator(weights, batch, at.state.reference)
                totals = {name: totals.get(name, 0.0) + float(value) for name, value in sums.items()}
                weight += float(more)
            means = {f"held_out_{name}": total / (weight or 1.0) for name, total in totals.items()}
            weights = AVERAGED if at.state.ema else TRAINED
            self._metrics.evaluated(at.step, means, time.monotonic() - start, weights)

    @cached_property
    def _evaluator(self) -> Evaluate:
        with self._goodput.span("compile"), self._metrics.waiting("compiling the evaluation"):
            return self._ready.evaluate()

    def _sample(self, at: Position, samples: Samples) -> None:
        """Onto the end of samples.jsonl."""
        with self._goodput.span("eval"):
            began, found = time.monotonic(), samples(at.state.ema or at.state.params, at.step)
        with (self._folder / SAMPLES).open("a") as file:
            file.writelines(json.dumps({"step": at.step} | line, ensure_ascii=False) + "\n" for line in found.lines)
        if found.measures:
            weights = AVERAGED if at.state.ema else TRAINED
            self._metrics.evaluated(at.step, found.measures, time.monotonic() - began, weights)

    def _export(self, at: Position, command: bool) -> None:
        """The averaged weights, where there are any."""
        folder = self._folder / "export" / f"step_{at.step}"
        with self._goodput.span("checkpoint"):
            dtype = compute_of(self._settings.precision.compute).dtype
            self._ready.objective.export(
                folder, self._ready.cfg, at.state.ema or at.state.params, self._tokenizer, dtype
            )
        self._metrics.remark(f"exported to {folder}")
        if command and self._first:
            self._command.start(folder)
