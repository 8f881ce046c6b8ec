"""Read a run's folder for its report: the page (train.report.page) and the terminal's table.

A report can be made at any time, of a running, ended or failed run: missing files are skipped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from statistics import fmean, median
from typing import Any

from dovetail.core.errors import MissingFileError
from dovetail.core.units import format_clock, format_count, format_duration
from dovetail.plan.prediction import Prediction
from dovetail.train.report import completions, goodput
from dovetail.train.report.goodput import REST, parts, split
from dovetail.train.report.metrics import AVERAGED, EVAL, FILE, WARM, read_prediction

HELD_OUT = "held_out_loss"
SAMPLES = "samples.jsonl"
TOP1 = {"held_out_top1": "held-out top-1", "held_out_zero_shot_top1": "zero-shot top-1"}  # of models of images


@dataclass(frozen=True)
class Saved:
    """Hold a checkpoint or an export on disk."""

    step: int
    kind: str
    bytes: int
    time: float


@dataclass(frozen=True)
class RunRecord:
    """Hold the contents of a run's folder."""

    name: str
    steps: list[dict[str, Any]]  # lines of metrics.jsonl
    evals: list[dict[str, Any]]
    total: int | None  # planned steps
    ledger: goodput.Goodput | None = None
    health: list[dict[str, Any]] = field(default_factory=list)
    saved: list[Saved] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)  # step, prompt, answer
    completions: Path | None = None  # the file of completions (train.report.completions)
    recipe: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    prediction: Prediction | None = None  # of the step time

    def curve(self, name: str, of: Sequence[dict[str, Any]] | None = None) -> list[tuple[int, float]]:
        """Return (step, value) of the lines that have the metric."""
        return [(line["step"], line[name]) for line in (self.steps if of is None else of) if line.get(name) is not None]

    def last(self, name: str) -> float | None:
        """Return the last value of a metric."""
        return points[-1][1] if (points := self.curve(name)) else None

    def typical(self, name: str) -> float | None:
        """Return the median of a metric without the first step, which compiles."""
        values = [value for _, value in self.curve(name)]
        return median(values[1:] or values) if values else None

    @property
    def held_out(self) -> list[tuple[int, float]]:
        """(step, held-out loss), from eval lines and from step lines."""
        return sorted(self.curve(HELD_OUT) + self.curve(HELD_OUT, self.evals))

    @property
    def held_out_of(self) -> str:
        """Return the weights of the last evaluation if they are not the trained ones: "averaged weights"."""
        return f"{AVERAGED} weights" if self.evals and self.evals[-1].get("weights") == AVERAGED else ""


def read(folder: str | Path) -> RunRecord:
    """Return the record of a run's folder.

    Raises:
        MissingFileError: The folder has no metrics.jsonl.
    """
    folder = Path(folder)
    if not (folder / FILE).is_file():
        raise MissingFileError(f"{folder} is not a run's folder: it has no {FILE}; pass the --run-dir of a training")
    lines = [line for line in read_lines(folder / FILE) if isinstance(line.get("step"), int)]
    about = _json(folder / "run.json")
    ledger = folder / "goodput.json"
    return RunRecord(
        name=folder.resolve().name,
        steps=sorted((line for line in lines if "kind" not in line), key=lambda line: line["step"]),
        evals=sorted((line for line in lines if line.get("kind") == EVAL), key=lambda line: line["step"]),
        total=about.get("steps"),
        ledger=goodput.Goodput.stored(ledger) if ledger.is_file() else None,
        health=read_lines(folder / "health.jsonl"),
        saved=_saved(folder / "checkpoints", "checkpoint") + _saved(folder / "export", "export"),
        samples=list({(s.get("step"), json.dumps(s.get("prompt"))): s for s in read_lines(folder / SAMPLES)}.values()),
        completions=folder / completions.FILE if (folder / completions.FILE).is_file() else None,
        recipe=_text(folder / "recipe.yaml"),
        environment=about.get("environment", {}),
        prediction=read_prediction(folder),
    )


def summary(run: RunRecord) -> list[tuple[str, str]]:
    """Return the rows of the terminal's table, which are also the page's first figures."""
    step = run.steps[-1]["step"] if run.steps else 0
    rows = [("steps", f"{step:,}" + (f" of {run.total:,}" if run.total else ""))]
    tokens = sum(value for _, value in run.curve("tokens"))
    rows += [("tokens", format_count(tokens))] if tokens else []
    rows += _reward_rows(run)
    if (loss := run.last("loss")) is not None:
        rows.append(("loss", f"{loss:.4f}" if abs(loss) >= 0.001 else f"{loss:.2g}"))
    if run.held_out:
        best_at, best = min(run.held_out, key=lambda point: point[1])
        notes = [f"best {best:.4f} at {best_at:,}"] if best < run.held_out[-1][1] else []
        notes = [run.held_out_of, *notes] if run.held_out_of else notes
        rows.append(("held-out loss", f"{run.held_out[-1][1]:.4f}" + (f" ({'; '.join(notes)})" if notes else "")))
    for name, title in TOP1.items():
        found = [line[name] for line in run.evals if name in line]
        rows += [(title, f"{found[-1]:.1%}")] if found else []
    if (rate := run.typical("images_per_second")) is not None:
        rows.append(("speed", f"{format_count(rate)} img/s"))
    elif (rate := run.typical("tokens_per_second")) is not None:
        rows.append(("speed", f"{format_count(rate)} tok/s"))
    rows += _step_rows(run)
    causal, full = run.typical("mfu_causal"), run.typical("mfu_full")
    if causal is not None and full is not None:
        rows.append(("MFU", f"{causal:.1%} causal, {full:.1%} full"))
    if (memory := run.last("memory")) is not None:
        rows.append(("device memory", f"{memory / 2**30:.1f} GiB"))
    return rows + _time_rows(run)


def step_times(run: RunRecord) -> list[tuple[int, float]]:
    """Return (step, seconds of its training) of each report; a report of several steps has their mean."""
    took, before = [], 0
    for line in run.steps:
        many, before = line["step"] - before, line["step"]
        if many > 0 and line.get("seconds"):
            took.append((line["step"], split(line).get(REST, line["seconds"]) / many))
    return took


def step_seconds(run: RunRecord) -> float | None:
    """Return the median seconds of a step's training, without the first reports, which compile."""
    took = [seconds for _, seconds in step_times(run)]
    warm = took[WARM:] or took
    return median(warm) if warm else None


def _step_rows(run: RunRecord) -> list[tuple[str, str]]:
    """Return the row with the step time; of a step with several parts, the total and the parts."""
    measured = step_seconds(run)
    if measured is None:
        return []
    found = run.prediction
    beside = ""
    if found is not None:
        likely = "" if found.likely is None else f"{format_duration(found.likely)} ({found.calibrated}), bounds "
        beside = f", predicted {likely}{format_duration(found.best)} to {format_duration(found.worst)}"
    spent = typical_split(run)
    if not spent:
        return [("step time", format_duration(measured) + beside)]
    whole = sum(spent.values())
    shares = ", ".join(f"{name} {seconds / (whole or 1.0):.0%}" for name, seconds in spent.items())
    training = f"; training {format_duration(measured)}{beside}" if beside else ""
    return [("step time", f"{format_duration(whole)} ({shares}{training})")]


def _reward_rows(run: RunRecord) -> list[tuple[str, str]]:
    """Return the rows of an RL run."""
    rewards = run.curve("reward")
    if not rewards:
        return []
    best_at, best = max(rewards, key=lambda point: point[1])
    rows = [("reward", f"{rewards[-1][1]:.4g} (best {best:.4g} at {best_at:,}; {rewards[0][1]:.4g} at first)")]
    for name in (name for name in (run.evals[-1] if run.evals else {}) if "@" in name):
        points = run.curve(name, run.evals)
        first = f" ({points[0][1]:.1%} at {points[0][0]:,})" if len(points) > 1 else ""
        rows += [(name.replace("held_out_", "held-out "), f"{points[-1][1]:.1%}{first}")] if points else []
    if (kl := run.last("kl")) is not None:
        rows.append(("KL", f"{kl:.3g}"))
    return rows


def typical_split(run: RunRecord) -> dict[str, float]:
    """Return the mean seconds of each part of a step."""
    found = [split(line) for line in usual(run)]
    return {name: fmean(each.get(name, 0.0) for each in found) for name in (found[-1] if found else {})}


def usual(run: RunRecord) -> list[dict[str, Any]]:
    """Return the steps with parts, without those that took ten times the median, because they compiled."""
    lines = [line for line in run.steps if split(line)]
    full = [line["seconds"] for line in lines if any(parts(line).values())]
    return [line for line in lines if not full or line["seconds"] <= 10 * median(full)]


def _time_rows(run: RunRecord) -> list[tuple[str, str]]:
    rows = []
    if run.ledger:
        starts = f", {run.ledger.starts} starts" if run.ledger.starts > 1 else ""
        starts += f" and {format_clock(run.ledger.between)} between them" if starts and run.ledger.between else ""
        rows += [("time", format_clock(run.ledger.wall) + starts), ("goodput", f"{run.ledger.share:.1%}")]
        losses = [(kind, share) for kind, _, share in run.ledger.table() if kind != "step" and share >= 0.005]
        if losses:
            rows.append(("lost to", ", ".join(f"{kind} {share:.1%}" for kind, share in losses[:4])))
    if run.health:
        rows.append(("health events", f"{len(run.health):,}"))
    checkpoints = [saved for saved in run.saved if saved.kind == "checkpoint"]
    if checkpoints:
        rows.append(("last checkpoint", f"step {checkpoints[-1].step:,}"))
    return rows


def when(seconds: float) -> str:
    """Return a time as date and minutes."""
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a .jsonl file without incomplete lines."""
    found = []
    for line in _text(path).splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            found.append(value)
    return found


def _saved(folder: Path, kind: str) -> list[Saved]:
    """Return the subfolders that are named by a step, such as 500 or step_500."""
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        if (named := re.fullmatch(r"(?:\D*_)?(\d+)", path.name)) and path.is_dir():
            size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
            found.append(Saved(int(named[1]), kind, size, path.stat().st_mtime))
    return sorted(found, key=lambda saved: saved.step)


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(_text(path) or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
