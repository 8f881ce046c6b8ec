"""The live line: a bar and what the run does now. Where stderr is no terminal, a plain line now and then."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import NamedTuple

from rich.console import Console, Group, RenderableType
from rich.live import Live as Display
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from dovetail.train.report.waiting import waiting

LEARNING = {
    "loss": "loss {:.4f}", "reward_accuracy": "in order {:.1%}", "reward_margin": "margin {:.3g}",
    "lr": "lr {:.2e}", "grad_norm": "grad {:.3g}", "examples": "{:.0f} examples",
    "pairs": "{:.0f} pairs",
}  # fmt: skip
# In place of these, of a model that learns from rewards: how its loss moves says little.
REWARDED = {
    "kl": "kl {:.3g}", "entropy": "entropy {:.3g}", "answer_tokens": "length {:.0f}", "grad_norm": "grad {:.3g}",
}  # fmt: skip
PASSED = "held_out_pass@1"
PLAIN_SHARE, PLAIN_SECONDS = 0.05, 30.0  # a plain line at every such part of the run, and at least this often


class Standing(NamedTuple):
    step: int
    values: Mapping[str, float]  # those of LEARNING are shown, or the reward and those of REWARDED
    tokens_per_second: float
    seconds: float  # a step takes
    mfu_causal: float | None = None
    mfu_full: float | None = None
    memory: float | None = None  # bytes
    goodput: float | None = None
    split: Mapping[str, float] = {}  # the seconds' share of each thing that a step does, where it does several
    held_out: Mapping[str, float] = {}  # what was measured last

    def numbers(self) -> list[str]:
        """What is known of the model."""
        if "reward" not in self.values:
            return self._told(LEARNING)
        passed = self.held_out.get(PASSED)
        spread = self._told({"reward_std": "±{:.3g}"})
        first = " ".join([f"reward {self.values['reward']:.4g}", *spread])
        return [first, *([] if passed is None else [f"pass@1 {passed:.1%}"]), *self._told(REWARDED)]

    def _told(self, forms: Mapping[str, str]) -> list[str]:
        return [form.format(self.values[name]) for name, form in forms.items() if name in self.values]

    def speed(self) -> list[str]:
        """MFU counts attention as causal, then in full."""
        parts = [f"{short(self.tokens_per_second)} tok/s"]
        if self.split:
            parts = [f"{parts[0]}, {self.seconds:.3g} s per step: {', '.join(map(self._part, self.split))}"]
        if self.mfu_causal is not None and self.mfu_full is not None:
            parts.append(f"MFU {self.mfu_causal:.1%} ({self.mfu_full:.1%} full)")
        return parts

    def _part(self, name: str) -> str:
        rate = self.values.get(f"{name}_tokens_per_second")
        return f"{name} {self.split[name]:.0%}" + (f" ({short(rate)} tok/s)" if rate else "")

    def around(self) -> list[str]:
        """What is known of the run."""
        memory = [f"{self.memory / 2**30:.1f} GiB"] if self.memory else []
        return memory + ([f"goodput {self.goodput:.0%}"] if self.goodput is not None else [])


class Live:
    def __init__(
        self, steps: int, step: int = 0, console: Console | None = None, clock: Callable[[], float] = time.monotonic
    ):
        self._steps, self._clock = steps, clock
        self._console = console or Console(stderr=True, highlight=False)
        self._said_at, self._said_part, self._said_step = -math.inf, -1, -1
        self._last: Standing | None = None
        self._text = Text("", no_wrap=True, overflow="ellipsis")
        self._bar = Progress(
            TextColumn("  step"), BarColumn(28), TextColumn("{task.completed:,.0f}/{task.total:,.0f}"),
            TextColumn("{task.percentage:.0f}%"), TextColumn("{task.fields[left]}"), console=self._console,
        )  # fmt: skip
        self._task = self._bar.add_task("", total=max(1, steps), completed=step, left="")
        self._display: Display | None = None

    def show(self, standing: Standing) -> None:
        self._last = standing
        left = f"{clock_text((self._steps - standing.step) * standing.seconds)} left"
        if self._console.is_terminal:
            between = "\n  " if standing.split else "  "  # what else there is to say needs a line of its own
            self._text.plain = "  " + between.join("  ".join(each) for each in (standing.numbers(), standing.speed()))
            self._bar.update(self._task, completed=standing.step, left="  ".join([left, *standing.around()]))
            if not self._display:  # with the first numbers: what starts a run has its own to say before
                whole = Group(self._bar, self._text)
                self._display = Display(whole, console=self._console, refresh_per_second=4)
                self._display.start()
        elif self._due(standing.step):
            self._say(standing, left)

    def remark(self, text: str, value: float | None = None) -> None:
        """Above the line; a `value` is what a reader compares with the loss, and stands out."""
        style = "bold" if value is not None else "dim"
        self._console.print(Text(f"  {text}", style), soft_wrap=True)

    def waiting(self, what: str) -> AbstractContextManager[None]:
        """Count the seconds of what is long and silent: see train.report.waiting."""
        return waiting(what, self._console, self.remark, in_place=self._display is None)

    def above(self, what: RenderableType) -> None:
        self._console.print(what)

    def rewind(self, step: int) -> None:
        self._bar.update(self._task, completed=step)
        self._said_part = self._part(step)

    def close(self) -> None:
        if self._display:
            self._display.stop()
        elif self._last and not self._console.is_terminal and self._last.step != self._said_step:
            self._say(self._last, "ended")

    def _due(self, step: int) -> bool:
        return self._part(step) > self._said_part or self._clock() - self._said_at >= PLAIN_SECONDS

    def _part(self, step: int) -> int:
        return int(step / max(1, self._steps) / PLAIN_SHARE + 1e-9)

    def _say(self, standing: Standing, left: str) -> None:
        self._said_at, self._said_step, self._said_part = self._clock(), standing.step, self._part(standing.step)
        count = f"step {standing.step:,}/{self._steps:,}"
        line = "  ".join([count, *standing.numbers(), *standing.speed(), *standing.around(), left])
        self._console.print(line, markup=False, soft_wrap=True)


def short(value: float) -> str:
    """48,434 -> 48.4k"""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.1f}".removesuffix(".0") + letter
    return f"{value:.0f}"


def clock_text(seconds: float) -> str:
    """1:02:03, 2:03, or 3d 04:05"""
    whole = round(max(0.0, seconds))
    minutes, hours, days = whole // 60 % 60, whole // 3600 % 24, whole // 86400
    if days:
        return f"{days}d {hours:02}:{minutes:02}"
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"
