"""Show the live line of a run: a bar and its metrics. Without a terminal, print a line now and then."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from rich.console import Group
from rich.live import Live as Display
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from dovetail.core.reporter import Reporter
from dovetail.core.units import format_clock, format_count

LEARNING = {
    "loss": "loss {:.4f}", "reward_accuracy": "in order {:.1%}", "reward_margin": "margin {:.3g}",
    "lr": "lr {:.2e}", "grad_norm": "grad {:.3g}", "examples": "{:.0f} examples",
    "pairs": "{:.0f} pairs",
}  # fmt: skip
# For a model that learns from rewards these replace the above: its loss says little.
REWARDED = {
    "kl": "kl {:.3g}", "entropy": "entropy {:.3g}", "completion_length": "length {:.0f}", "grad_norm": "grad {:.3g}",
}  # fmt: skip
PASSED = "held_out_pass@1"
PLAIN_SHARE, PLAIN_SECONDS = 0.05, 30.0  # a plain line at every such share of the run, and at least this often


class StepStatus(NamedTuple):
    """Hold what the live line shows."""

    step: int
    values: Mapping[str, float]  # metrics; those of LEARNING are shown, or the reward and those of REWARDED
    tokens_per_second: float
    seconds: float  # per step
    mfu_causal: float | None = None
    mfu_full: float | None = None
    memory: float | None = None  # bytes
    goodput: float | None = None
    split: Mapping[str, float] = {}  # the share of each part of a step, if it has several
    held_out: Mapping[str, float] = {}  # the last held-out metrics

    def numbers(self) -> list[str]:
        """Return the metrics of the model."""
        if "reward" not in self.values:
            return self._formatted(LEARNING)
        passed = self.held_out.get(PASSED)
        spread = self._formatted({"reward_std": "±{:.3g}"})
        first = " ".join([f"reward {self.values['reward']:.4g}", *spread])
        return [first, *([] if passed is None else [f"pass@1 {passed:.1%}"]), *self._formatted(REWARDED)]

    def _formatted(self, forms: Mapping[str, str]) -> list[str]:
        return [form.format(self.values[name]) for name, form in forms.items() if name in self.values]

    def speed(self) -> list[str]:
        """Return speed and MFU: attention counted as causal, then in full."""
        parts = [f"{format_count(self.tokens_per_second)} tok/s"]
        if images := self.values.get("images"):
            parts = [f"{format_count(images / self.seconds)} img/s"] if self.seconds else []
        if self.split:
            parts = [f"{parts[0]}, {self.seconds:.3g} s per step: {', '.join(map(self._part, self.split))}"]
        if self.mfu_causal is not None and self.mfu_full is not None:
            parts.append(f"MFU {self.mfu_causal:.1%} ({self.mfu_full:.1%} full)")
        return parts

    def _part(self, name: str) -> str:
        rate = self.values.get(f"{name}_tokens_per_second")
        return f"{name} {self.split[name]:.0%}" + (f" ({format_count(rate)} tok/s)" if rate else "")

    def around(self) -> list[str]:
        """Return memory and goodput."""
        memory = [f"{self.memory / 2**30:.1f} GiB"] if self.memory else []
        return memory + ([f"goodput {self.goodput:.0%}"] if self.goodput is not None else [])


class Live:
    """Draw the live line on a reporter's console."""

    def __init__(self, reporter: Reporter, steps: int, step: int = 0, clock: Callable[[], float] = time.monotonic):
        self._steps, self._clock = steps, clock
        self._reporter, self._console = reporter, reporter.console
        self._said_at, self._said_part, self._said_step = -math.inf, -1, -1
        self._last: StepStatus | None = None
        self._text = Text("", no_wrap=True, overflow="ellipsis")
        self._bar = Progress(
            TextColumn("  step"), BarColumn(28), TextColumn("{task.completed:,.0f}/{task.total:,.0f}"),
            TextColumn("{task.percentage:.0f}%"), TextColumn("{task.fields[left]}"), console=self._console,
        )  # fmt: skip
        self._task = self._bar.add_task("", total=max(1, steps), completed=step, left="")
        self._display: Display | None = None

    def show(self, status: StepStatus) -> None:
        """Show the newest metrics."""
        self._last = status
        left = f"{format_clock((self._steps - status.step) * status.seconds)} left"
        if self._console.is_terminal:
            between = "\n  " if status.split else "  "  # the parts of a step need a line of their own
            self._text.plain = "  " + between.join("  ".join(each) for each in (status.numbers(), status.speed()))
            self._bar.update(self._task, completed=status.step, left="  ".join([left, *status.around()]))
            if not self._display:  # only now: lines of the start come before it
                whole = Group(self._bar, self._text)
                self._display = Display(whole, console=self._console, refresh_per_second=4)
                self._display.start()
                self._reporter.is_live = True
        elif self._due(status.step):
            self._say(status, left)

    def rewind(self, step: int) -> None:
        """Move the bar back to `step`."""
        self._bar.update(self._task, completed=step)
        self._said_part = self._part(step)

    def close(self) -> None:
        """Stop drawing; without a terminal, print the last line."""
        if self._display:
            self._display.stop()
            self._reporter.is_live = False
        elif self._last and not self._console.is_terminal and self._last.step != self._said_step:
            self._say(self._last, "ended")

    def _due(self, step: int) -> bool:
        return self._part(step) > self._said_part or self._clock() - self._said_at >= PLAIN_SECONDS

    def _part(self, step: int) -> int:
        return int(step / max(1, self._steps) / PLAIN_SHARE + 1e-9)

    def _say(self, status: StepStatus, left: str) -> None:
        self._said_at, self._said_step, self._said_part = self._clock(), status.step, self._part(status.step)
        count = f"step {status.step:,}/{self._steps:,}"
        line = "  ".join([count, *status.numbers(), *status.speed(), *status.around(), left])
        self._console.print(line, markup=False, soft_wrap=True)
