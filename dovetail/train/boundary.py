"""Do the work between two steps, when nothing is in flight: evaluate, sample, export, save, trace."""

from __future__ import annotations

import json
import subprocess
import time
from functools import cached_property
from pathlib import Path

import jax

from dovetail.core.compute import compute_of
from dovetail.core.reporter import Reporter
from dovetail.core.training import profile_window
from dovetail.train.prepare import Ready
from dovetail.train.report.goodput import Goodput
from dovetail.train.report.metrics import AVERAGED, TRAINED, RunMetrics
from dovetail.train.report.summary import SAMPLES
from dovetail.train.rows import Opened, Rows, SampleFn
from dovetail.train.saves import Saves
from dovetail.train.state import Position
from dovetail.train.step import Evaluate


class Boundary:
    """Evaluate, sample, export and save at the steps that the recipe names."""

    def __init__(
        self,
        ready: Ready,
        folder: Path,
        opened: Opened,
        saves: Saves,
        metrics: RunMetrics,
        goodput: Goodput,
        reporter: Reporter,
    ):
        self._ready, self._settings, self._folder = ready, ready.settings, folder
        self._saves, self._metrics, self._goodput, self._reporter = saves, metrics, goodput, reporter
        self._held_out, self._tokenizer, self._samples = opened.held_out, opened.tokenizer, opened.samples
        self._first = jax.process_index() == 0
        self._total = self._settings.total_steps
        self._command = Command(self._settings.eval.command, folder, reporter)
        self._exports_at_end = bool(self._settings.checkpoint.export_hf or self._settings.exports_at_end)
        self.trace = Trace(profile_window(self._settings.profile), folder, self._first, reporter)

    def is_at(self, step: int) -> bool:
        """Return whether there is work after `step`."""
        return step == self._total or bool(self._due(step)) or self.trace.is_boundary(step)

    def visit(self, at: Position, stopping: bool, signalled: bool) -> None:
        """Do the work that is due. `stopping`: save now; `signalled`: because a signal ends the run."""
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
        """Wait for the evaluation command."""
        self._command.wait()

    def _due(self, step: int) -> set[str]:
        s = self._settings
        every = {
            "save": s.checkpoint.every, "evaluate": s.eval.every, "export": s.checkpoint.export_hf,
            "command": s.eval.command_every, "sample": self._samples.every if self._samples else 0,
        }  # fmt: skip
        return {what for what, n in every.items() if n and step and step % n == 0}

    def _evaluate(self, at: Position, rows: Rows) -> None:
        """Report the mean of each metric over the held-out batches."""
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
        with self._goodput.span("compile"), self._reporter.waiting("compiling the evaluation"):
            return self._ready.evaluate()

    def _sample(self, at: Position, samples: SampleFn) -> None:
        """Append the model's answers to samples.jsonl."""
        with self._goodput.span("eval"):
            began, found = time.monotonic(), samples(at.state.ema or at.state.params, at.step)
        with (self._folder / SAMPLES).open("a") as file:
            file.writelines(json.dumps({"step": at.step} | line, ensure_ascii=False) + "\n" for line in found.lines)
        if found.measures:
            weights = AVERAGED if at.state.ema else TRAINED
            self._metrics.evaluated(at.step, found.measures, time.monotonic() - began, weights)

    def _export(self, at: Position, command: bool) -> None:
        """Export the averaged weights if there are any, else the trained ones."""
        folder = self._folder / "export" / f"step_{at.step}"
        with self._goodput.span("checkpoint"):
            dtype, weights = compute_of(self._settings.precision.compute).dtype, at.state.ema or at.state.params
            self._ready.objective.export(folder, self._ready.cfg, weights, self._tokenizer, dtype)
            if self._ready.objective.companion:
                self._ready.objective.companion.export(folder, self._ready, weights, at.state.companion, dtype)
        self._reporter.note(f"exported to {folder}")
        if command and self._first:
            self._command.start(folder)


class Trace:
    """Profile some steps for xprof. Only the first process traces; the others stop at the same boundaries.

    Args:
        window: (first, one past the last) step to trace; None: no trace.
        folder: The run's folder.
        first: Whether this is the first process.
        reporter: Reports where the trace is.
    """

    def __init__(self, window: tuple[int, int] | None, folder: Path, first: bool, reporter: Reporter):
        self._window, self._folder, self._first, self._reporter = window, folder / "profile", first, reporter
        self._tracing = False

    def is_boundary(self, step: int) -> bool:
        """Return whether tracing begins or ends after `step`: nothing else may be in flight then."""
        return self._window is not None and step in (self._window[0] - 1, self._window[1] - 1)

    def begin(self, step: int) -> None:
        """Start the trace if `step`, about to be launched, is the first to trace."""
        if self._first and self._window and step == self._window[0]:
            jax.profiler.start_trace(str(self._folder))
            self._tracing = True

    def end(self, step: int, leaving: bool) -> None:
        """End the trace if `step` is the last to trace, or if the run ends."""
        if self._tracing and self._window and (leaving or step == self._window[1] - 1):
            jax.profiler.stop_trace()
            self._tracing = False
            self._reporter.note(f"traced into {self._folder}: view it with xprof {self._folder}")


class Command:
    """Run a recipe's `eval.command` on exported folders, beside the training and one at a time.

    Its output is written to RUN/eval.
    """

    def __init__(self, line: str, folder: Path, reporter: Reporter):
        self._line, self._folder, self._reporter = line, folder / "eval", reporter
        self._process: subprocess.Popen | None = None

    def start(self, exported: Path) -> None:
        """Start the command on an exported folder, after the previous one has ended."""
        self.wait()
        self._folder.mkdir(exist_ok=True)
        line = self._line.replace("{folder}", str(exported))
        with (self._folder / f"{exported.name}.txt").open("w") as file:
            self._process = subprocess.Popen(line, shell=True, stdout=file, stderr=subprocess.STDOUT)

    def wait(self) -> None:
        """Wait for the command and report a failure."""
        if self._process is not None and (code := self._process.wait()):
            self._reporter.note(f"eval.command exited with {code}: see {self._folder}")
        self._process = None
