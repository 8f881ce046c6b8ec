"""Metrics: what a run says of itself while it goes on. `metrics.jsonl`, the live line, and the loggers of `report_to`.

It takes numbers that are on the host already, so it never waits for the device. A step's line must be recorded before
the checkpoint of that step is committed: after a resume at step k the lines up to k are there, each once, and the later
ones are gone.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from dovetail.core.errors import UserError
from dovetail.core.files import write_atomic
from dovetail.train.report.environment import environment
from dovetail.train.report.goodput import Goodput
from dovetail.train.report.live import Live, Standing
from dovetail.train.report.loggers import open_loggers
from dovetail.train.report.predicted import Predicted
from dovetail.train.report.split import REST, split

FILE = "metrics.jsonl"
EVAL = "eval"  # the kind of a line that holds what was measured on held-out data
TRAINED, AVERAGED = "trained", "averaged"  # the weights that it was measured with: the average where a recipe sets ema
WINDOW = 20  # reports over which the live line's rate is taken


@dataclass(frozen=True)
class Work:
    """What MFU needs: a token's training FLOPs in both conventions, and the FLOP/s of all chips together (None where
    the chip is not known)."""

    full: float
    causal: float
    peak: float | None = None

    def mfu(self, tokens_per_second: float) -> dict[str, float]:
        if not self.peak:
            return {}
        return {
            "mfu_causal": tokens_per_second * self.causal / self.peak,
            "mfu_full": tokens_per_second * self.full / self.peak,
        }


@dataclass(frozen=True)
class Passage:
    """Something to read, such as what a model wrote."""

    name: str
    shown: RenderableType  # above the live line
    markdown: str  # in TensorBoard and the like


class RunMetrics:
    """`step`: the last one done before this process, 0 for a new run. Only a `first` process writes and shows.
    `report_to`, `config`: see report.loggers."""

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
        show: bool = True,
    ):
        self._folder, self._work, self._goodput, self._first = Path(folder), work, goodput, first
        self._predicted = predicted
        self._step, self._recent, self._held_out = step, [], {}
        self._live, self._loggers = None, []
        if not first:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        drop_after(self._folder / FILE, step)
        _describe_run(self._folder / "run.json", steps)
        self._file = open(self._folder / FILE, "a", encoding="utf-8")  # noqa: SIM115 (closed by close)
        self._live = Live(steps, step) if show else None
        self._loggers = open_loggers(report_to, self._folder, step, config or {}, self.remark)

    def record(self, step: int, values: Mapping[str, float], seconds: float, tokens: int) -> None:
        """The results of `step`. `seconds` and `tokens` are of all steps since the last report."""
        if step <= self._step:
            raise UserError(f"step {self._step} was reported already; got step {step} after it")
        many, self._step = step - self._step, step
        rate = tokens / seconds if seconds > 0 else 0.0
        speed: dict[str, float] = {"seconds": seconds, "tokens": tokens, "tokens_per_second": rate}
        if self._work:
            speed |= self._work.mfu(rate)
        if memory := device_memory():
            speed["memory"] = memory
        if self._goodput:
            speed["goodput"] = self._goodput.share
        self._write({"step": step, **values, **speed})
        if self._live:
            self._recent = [*self._recent, (many, seconds, tokens, split({**values, **speed}))][-WINDOW:]
            self._live.show(self._standing(step, values, speed))
        if self._predicted:  # of a step that does more, its training
            took = split({**values, **speed}).get(REST, seconds) / many
            self.remark(self._predicted.took(took) or "")

    def evaluated(self, step: int, values: Mapping[str, float], seconds: float = 0.0, weights: str = TRAINED) -> None:
        """What was measured on held-out data after `step`, with these `weights`: a line of its own."""
        self._write({"step": step, "kind": EVAL, **values, "weights": weights, "seconds": seconds})
        self._held_out = {**self._held_out, **values}
        if self._live:
            told = ", ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in values.items())
            of = f" (of the {weights} weights)" if weights != TRAINED else ""
            measure = values.get("held_out_loss", values.get("held_out_reward"))
            self._live.remark(f"step {step:,}: {told}{of}", value=measure)

    def rewind(self, step: int) -> None:
        """The run went back to `step`: what was said of later ones is not true any more."""
        self._step, self._recent = step, []
        if not self._first:
            return
        self._file.close()
        drop_after(self._folder / FILE, step)
        self._file = open(self._folder / FILE, "a", encoding="utf-8")  # noqa: SIM115
        if self._live:
            self._live.rewind(step)

    def remark(self, text: str) -> None:
        """A sentence above the live line."""
        if self._live and text:
            self._live.remark(text)

    def waiting(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Show how long something silent takes, such as a compilation."""
        return self._live.waiting(what) if self._live else contextlib.nullcontext()

    def show(self, step: int, passage: Passage) -> None:
        if self._live:
            self._live.above(passage.shown)
        for logger in self._loggers:
            logger.text(f"train/{passage.name}", passage.markdown, step)

    def close(self) -> None:
        if self._predicted:
            self.remark(self._predicted.last_word() or "")
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
        self._file.flush()  # the system has it now, whatever becomes of us
        numbers = {k: v for k, v in plain.items() if k not in ("step", "kind", "weights") and v is not None}
        for logger in self._loggers:
            logger.scalars(line.get("kind", "train"), numbers, line["step"])

    def _standing(self, step: int, values: Mapping[str, float], speed: Mapping[str, float]) -> Standing:
        """The last values, and rates over the last reports: a single step's dance."""
        *counts, parts = zip(*self._recent, strict=True)
        steps, seconds, tokens = map(sum, counts)
        rate = tokens / seconds if seconds else 0.0
        mfu = self._work.mfu(rate) if self._work else {}
        return Standing(
            step, values, rate, seconds / steps, mfu.get("mfu_causal"), mfu.get("mfu_full"), speed.get("memory"),
            speed.get("goodput"), _shares(parts), self._held_out,
        )  # fmt: skip


def _shares(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """What each part has of all their seconds."""
    sums = {name: sum(each.get(name, 0.0) for each in parts) for name in parts[-1]}
    whole = sum(sums.values())
    return {name: seconds / whole for name, seconds in sums.items()} if whole else {}


class Remarks:
    """Sentences of a run; those made before there is a live line are shown above it once there is."""

    def __init__(self) -> None:
        self.early: list[str] = []
        self._show: Callable[[str], object] | None = None

    def __call__(self, text: str) -> None:
        if self._show:
            self._show(text)
        else:
            self.early.append(text)

    def show_with(self, show: Callable[[str], object]) -> None:
        self._show = show
        for text in self.early:
            show(text)


def drop_after(path: str | Path, step: int) -> None:
    """Leave the lines up to `step` and no torn one, or the file as it was if it holds no others."""
    path = Path(path)
    if not path.exists():
        return
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    kept = [line for line in lines if (found := _step_of(line)) is not None and found <= step]
    if len(kept) < len(lines):
        write_atomic(path, "".join(kept))


def _step_of(line: str) -> int | None:
    """None for a line that a kill cut short."""
    try:
        return json.loads(line)["step"] if line.endswith("\n") else None
    except (ValueError, KeyError, TypeError):
        return None


def device_memory() -> int | None:
    """The most bytes this process's first device has held; None where it does not say (a CPU)."""
    import jax

    stats = jax.local_devices()[0].memory_stats() or {}
    return stats.get("peak_bytes_in_use")


def _plain(value: Any) -> Any:
    """What JSON can hold: a loss that is not a number is null."""
    if isinstance(value, str | int):
        return value
    number = float(value)
    return number if math.isfinite(number) else None


def _describe_run(path: Path, steps: int) -> None:
    """Written anew by each process: the last one's machine is the one to know."""
    write_atomic(path, json.dumps({"steps": steps, "pid": os.getpid(), "environment": environment()}, indent=1) + "\n")
