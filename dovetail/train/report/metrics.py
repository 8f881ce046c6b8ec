"""Write and show a run's metrics: `metrics.jsonl`, the live line, and the loggers of `report_to`.

All numbers are on the host already, so nothing here waits for the device. A step's line must be recorded before the
checkpoint of that step is committed: after a resume at step k the lines up to k exist exactly once, and later ones are
removed.
"""

from __future__ import annotations

import json
import math
import os
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

import jax
from rich.console import RenderableType

from dovetail.core.files import write_atomic
from dovetail.core.reporter import Reporter
from dovetail.plan.prediction import FILE as PREDICTION_FILE
from dovetail.plan.prediction import Prediction
from dovetail.train.report.goodput import REST, Goodput, split
from dovetail.train.report.live import Live, StepStatus
from dovetail.train.report.loggers import open_loggers

FILE = "metrics.jsonl"
EVAL = "eval"  # the kind of a line with held-out metrics
TRAINED, AVERAGED = "trained", "averaged"  # the weights that were evaluated: the average if the recipe sets ema
WINDOW = 20  # the live line's rates are means over this many reports


@dataclass(frozen=True)
class Work:
    """Hold the FLOPs behind an MFU."""

    full: float  # training FLOPs per token, with full attention
    causal: float  # the same with causal attention
    peak: float | None = None  # FLOP/s of all chips together; None: the chip is not known

    def mfu(self, tokens_per_second: float) -> dict[str, float]:
        """Return the MFU in both conventions; empty if the peak is not known."""
        if not self.peak:
            return {}
        return {
            "mfu_causal": tokens_per_second * self.causal / self.peak,
            "mfu_full": tokens_per_second * self.full / self.peak,
        }


@dataclass(frozen=True)
class Passage:
    """Hold a text to show, such as a model's completions."""

    name: str
    shown: RenderableType  # above the live line
    markdown: str  # for TensorBoard and other loggers


class RunMetrics:
    """Record a run's metrics.

    Args:
        folder: The run's folder.
        steps: Steps of the whole run.
        step: The last step that an earlier process completed; 0 for a new run.
        work: FLOPs per token, for the MFU.
        goodput: The ledger of time, for the goodput.
        predicted: The predicted step time, to compare with.
        first: Whether this is the first process: only it writes and shows.
        report_to: Names of loggers (report.loggers).
        config: The recipe, for the loggers.
        reporter: Shows the live line.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        steps: int,
        step: int = 0,
        work: Work | None = None,
        goodput: Goodput | None = None,
        predicted: Predicted | None = None,
        first: bool = True,
        report_to: Sequence[str] = ("tensorboard",),
        config: Mapping[str, Any] | None = None,
        reporter: Reporter | None = None,
    ):
        self._folder, self._work, self._goodput, self._first = Path(folder), work, goodput, first
        self._predicted = predicted
        self._step, self._recent, self._held_out = step, [], {}
        self._live, self._loggers, self._reporter = None, [], reporter or Reporter()
        if not first:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        drop_after(self._folder / FILE, step)
        _describe_run(self._folder / "run.json", steps)
        self._file = open(self._folder / FILE, "a", encoding="utf-8")  # noqa: SIM115 (closed by close)
        self._live = Live(self._reporter, steps, step) if self._reporter.show else None
        self._loggers = open_loggers(report_to, self._folder, step, config or {}, self._reporter)

    def record(self, step: int, values: Mapping[str, float], seconds: float, tokens: int) -> None:
        """Record the metrics of `step`; `seconds` and `tokens` are sums over the steps since the last report."""
        if step <= self._step:
            raise RuntimeError(f"step {self._step} was recorded already; got step {step} after it")
        many, self._step = step - self._step, step
        rate = tokens / seconds if seconds > 0 else 0.0
        speed: dict[str, float] = {"seconds": seconds, "tokens": tokens, "tokens_per_second": rate}
        if self._work:
            speed |= self._work.mfu(rate)
        if (images := values.get("images")) and seconds > 0:
            speed["images_per_second"] = images * many / seconds
        if memory := device_memory():
            speed["memory"] = memory
        if self._goodput:
            speed["goodput"] = self._goodput.share
        self._write({"step": step, **values, **speed})
        if self._live:
            self._recent = [*self._recent, (many, seconds, tokens, split({**values, **speed}))][-WINDOW:]
            self._live.show(self._status(step, values, speed))
        if self._predicted:  # if a step has several parts, compare its training
            took = split({**values, **speed}).get(REST, seconds) / many
            self._reporter.note(self._predicted.took(took))

    def evaluated(self, step: int, values: Mapping[str, float], seconds: float = 0.0, weights: str = TRAINED) -> None:
        """Record held-out metrics of these `weights` after `step`, as a line of their own."""
        self._write({"step": step, "kind": EVAL, **values, "weights": weights, "seconds": seconds})
        self._held_out = {**self._held_out, **values}
        if self._first:
            text = ", ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in values.items())
            of = f" (of the {weights} weights)" if weights != TRAINED else ""
            is_main = "held_out_loss" in values or "held_out_reward" in values
            self._reporter.note(f"step {step:,}: {text}{of}", style="bold" if is_main else "dim")

    def rewind(self, step: int) -> None:
        """Remove the records of steps after `step`: the run was rolled back to it."""
        self._step, self._recent = step, []
        if not self._first:
            return
        self._file.close()
        drop_after(self._folder / FILE, step)
        self._file = open(self._folder / FILE, "a", encoding="utf-8")  # noqa: SIM115
        if self._live:
            self._live.rewind(step)

    def show(self, step: int, passage: Passage) -> None:
        """Show a text above the live line, and send it to the loggers."""
        if self._live:
            self._reporter.console.print(passage.shown)
        for logger in self._loggers:
            logger.text(f"train/{passage.name}", passage.markdown, step)

    def close(self) -> None:
        """Report the last comparison with the prediction, and close the files and the live line."""
        if self._predicted:
            self._reporter.note(self._predicted.summary())
        if self._live:
            self._live.close()
        for logger in self._loggers:
            logger.close()
        if self._first:
            self._file.close()

    def __enter__(self) -> RunMetrics:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, line: dict[str, Any]) -> None:
        if not self._first:
            return
        plain = {key: _plain(value) for key, value in line.items()}
        self._file.write(json.dumps(plain | {"time": round(time.time(), 3)}) + "\n")
        self._file.flush()  # survives a kill of this process
        numbers = {k: v for k, v in plain.items() if k not in ("step", "kind", "weights") and v is not None}
        for logger in self._loggers:
            logger.scalars(line.get("kind", "train"), numbers, line["step"])

    def _status(self, step: int, values: Mapping[str, float], speed: Mapping[str, float]) -> StepStatus:
        """Return the last values, and rates over the last reports, because those of single steps vary."""
        *counts, parts = zip(*self._recent, strict=True)
        steps, seconds, tokens = map(sum, counts)
        rate = tokens / seconds if seconds else 0.0
        mfu = self._work.mfu(rate) if self._work else {}
        return StepStatus(
            step, values, rate, seconds / steps, mfu.get("mfu_causal"), mfu.get("mfu_full"), speed.get("memory"),
            speed.get("goodput"), _shares(parts), self._held_out,
        )  # fmt: skip


def _shares(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the share of each part in the seconds of all parts."""
    sums = {name: sum(each.get(name, 0.0) for each in parts) for name in parts[-1]}
    whole = sum(sums.values())
    return {name: seconds / whole for name, seconds in sums.items()} if whole else {}


def drop_after(path: str | Path, step: int) -> None:
    """Remove the lines after `step` and torn lines; a file without such lines is not rewritten."""
    path = Path(path)
    if not path.exists():
        return
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    kept = [line for line in lines if (found := _step_of(line)) is not None and found <= step]
    if len(kept) < len(lines):
        write_atomic(path, "".join(kept))


def _step_of(line: str) -> int | None:
    """Return the step of a line; None for a line that a kill cut short."""
    try:
        return json.loads(line)["step"] if line.endswith("\n") else None
    except (ValueError, KeyError, TypeError):
        return None


def device_memory() -> int | None:
    """Return the peak bytes in use on this process's first device; None if it does not report them (a CPU)."""
    import jax

    stats = jax.local_devices()[0].memory_stats() or {}
    return stats.get("peak_bytes_in_use")


def _plain(value: Any) -> Any:
    """Return a value that JSON can hold: a loss that is not finite becomes null."""
    if isinstance(value, str | int):
        return value
    number = float(value)
    return number if math.isfinite(number) else None


def _describe_run(path: Path, steps: int) -> None:
    """Write run.json; each start overwrites it, so it names the machine of the last one."""
    write_atomic(path, json.dumps({"steps": steps, "pid": os.getpid(), "environment": environment()}, indent=1) + "\n")


PACKAGES = ("dovetail", "jax", "jaxlib", "optax", "orbax-checkpoint", "grain", "libtpu", "jax-cuda13-plugin")


def environment() -> dict[str, str]:
    """Return where a run ran, without paths and user names, because reports are passed on."""
    kinds: dict[str, int] = {}
    for device in jax.devices():
        kinds[device.device_kind] = kinds.get(device.device_kind, 0) + 1
    found = {
        "devices": ", ".join(f"{count} × {kind}" for kind, count in kinds.items()),
        "backend": jax.default_backend(),
        "processes": str(jax.process_count()),
        "host": platform.node(),
        "python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
    }
    return found | {package: _version(package) for package in PACKAGES if _version(package)} | {"command": _command()}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _command() -> str:
    program = sys.argv[0].replace("\\", "/").rpartition("/")[2] if sys.argv else ""
    return " ".join([program, *sys.argv[1:]]).strip()


WARM = 2  # reports of this process that are skipped: they include compilation
ENOUGH = 5  # reports after which the median is reported


class Predicted:
    """Compare the predicted step time with the measured steps of this process."""

    def __init__(self, prediction: Prediction):
        self.prediction = prediction
        self._took: list[float] = []
        self._reported = False

    def took(self, seconds: float) -> str | None:
        """Add a measured step; return the comparison once, after enough steps."""
        self._took.append(seconds)
        return self.summary() if len(self._took) == WARM + ENOUGH else None

    def summary(self) -> str | None:
        """Return the comparison, or None if there are no steps or it was returned already."""
        warm = self._took[WARM:]
        if self._reported or not warm:
            return None
        self._reported = True
        return self.prediction.beside(median(warm))


def save_prediction(folder: Path, prediction: Prediction) -> None:
    """Write a prediction into a run's folder."""
    write_atomic(folder / PREDICTION_FILE, json.dumps(prediction.plain(), indent=1) + "\n")


def read_prediction(folder: Path) -> Prediction | None:
    """Return a run's prediction; None if there is none, or if another version wrote it."""
    try:
        return Prediction(**json.loads((folder / PREDICTION_FILE).read_text()))
    except (OSError, ValueError, TypeError):
        return None
