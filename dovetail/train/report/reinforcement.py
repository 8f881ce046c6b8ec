"""Draw the charts of an RL run: rewards, distance from the reference, and the time of its parts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from statistics import fmean

from dovetail.train.report.curves import Mark, Points, Series, bars, chart, name_of, smooth
from dovetail.train.report.goodput import PART, split
from dovetail.train.report.summary import RunRecord, usual

BIN = re.compile(r"ratio_([\d.]*)_([\d.]*)")  # a metric: the share of tokens whose ratio is between these
LAST = 20  # they are averaged over this many steps
NAMED = "reward/"
_DRAWN = (
    "reward", "reward_std", "kl", "entropy", "completion_length", "clip_fraction", "gap", "gap_max", "ratio",
    "truncated", "unjudged", "rollout_tokens_per_second", "accepted_length", "seconds_saved",
    "drafter_loss", "drafter_accepted",
)  # fmt: skip


def is_drawn(name: str) -> bool:
    """Return whether a metric is drawn in one of these charts."""
    return name in _DRAWN or name.startswith(NAMED) or name.endswith(PART) or bool(BIN.fullmatch(name))


def chart_of_rewards(run: RunRecord, marks: Sequence[Mark]) -> str:
    """Return the chart of each step's mean reward and standard deviation."""
    lines = [line for line in run.steps if line.get("reward") is not None]
    spread = {line["step"]: line.get("reward_std") or 0.0 for line in lines}
    middle = smooth(run.curve("reward"))
    widths = smooth(list(spread.items()))
    high = [(x, y + w) for (x, y), (_, w) in zip(middle, widths, strict=True)]
    low = [(x, y - w) for (x, y), (_, w) in zip(middle, widths, strict=True)]
    series = [
        Series("", high, "area", 0, low),
        Series("each step", run.curve("reward"), "raw"),
        Series("reward", middle),
        Series("held out", run.curve("held_out_reward", run.evals), "dots", 1),
    ]
    title = "reward (band: standard deviation within a step)" if any(spread.values()) else "reward"
    about = name_of("reward").about
    return chart(title, series, form=_figure, marks=marks, width=1060, height=340, about=about)


def charts(run: RunRecord) -> list[str]:
    """Return the small charts; empty strings for missing metrics."""
    return [
        *_named_rewards(run), _evaluation(run), _one(run, "kl", 3), _one(run, "entropy", 2),
        _one(run, "completion_length", 6), _lost(run), _one(run, "clip_fraction", 4), _gap(run), _ratios(run),
        _times(run), _one(run, "accepted_length", 1), _one(run, "seconds_saved", 1),
        _one(run, "drafter_loss", 1),
    ]  # fmt: skip


def _named_rewards(run: RunRecord) -> list[str]:
    """Return charts of the named rewards, three per chart."""
    names = list(dict.fromkeys(name for line in run.steps for name in line if name.startswith(NAMED)))
    lines = [
        Series(_cut(name.removeprefix(NAMED), 18), smooth(run.curve(name)), "line", i % 8)
        for i, name in enumerate(names)
    ]
    parts = [lines[i : i + 3] for i in range(0, len(lines), 3)]
    return [chart("rewards" if len(part) > 1 else f"reward {part[0].name}", part, form=_figure) for part in parts]


def _cut(name: str, most: int) -> str:
    return name if len(name) <= most else f"{name[: most - 1]}…"


def _evaluation(run: RunRecord) -> str:
    """Return the chart of pass@k and maj@k."""
    names = dict.fromkeys(name for line in run.evals for name in line if "@" in name)
    lines = [
        Series(name.removeprefix("held_out_"), run.curve(name, run.evals), "dots", i) for i, name in enumerate(names)
    ]
    title, about = name_of("evaluation")
    return chart(title, lines, form=lambda v: f"{v:.0%}", zero=True, about=about)


def _one(run: RunRecord, name: str, colour: int) -> str:
    points, (title, about) = run.curve(name), name_of(name)
    lines = [Series("each step", points, "raw", colour), Series("mean", smooth(points), "line", colour)]
    return chart(title, lines, form=_figure, zero=True, about=about)


def _lost(run: RunRecord) -> str:
    names = {"truncated": "cut off", "unjudged": "without a reward"}
    lines = [Series(label, smooth(run.curve(name)), "line", i) for i, (name, label) in enumerate(names.items())]
    title, about = name_of("answers")
    return chart(title, lines, form=_figure, zero=True, about=about)


def _gap(run: RunRecord) -> str:
    mean, most = run.curve("gap"), run.curve("gap_max")
    lines = [Series("mean", smooth(mean, log=True), "line", 0), Series("maximum", smooth(most, log=True), "line", 1)]
    title, about = name_of("gap")
    return chart(title, lines, form=lambda v: f"{v:.2g}", log=True, about=about)


def _ratios(run: RunRecord) -> str:
    last = [line for line in run.steps if any(map(BIN.fullmatch, line))][-LAST:]
    shares = {}
    for name in last[-1] if last else ():
        if found := BIN.fullmatch(name):
            low, high = found.groups()
            shares[float(low or 0)] = (_span(low, high), fmean(line.get(name) or 0.0 for line in last))
    steps = f"the last {len(last)} steps" if len(last) > 1 else "the last step"
    title, about = name_of("ratio")
    return bars(f"{title}, {steps}", [shares[low] for low in sorted(shares)], about=about)


def _span(low: str, high: str) -> str:
    return f"{_short(low)}–{_short(high)}" if low and high else f"under {_short(high)}" if high else f"{_short(low)} up"


def _short(number: str) -> str:
    return f"{float(number):g}"


def _times(run: RunRecord) -> str:
    """Return the stacked chart of a step's parts."""
    lines = usual(run)
    below: Points = [(line["step"], 0.0) for line in lines]
    stack = []
    for i, name in enumerate(split(lines[-1]) if lines else ()):
        part = smooth([(line["step"], split(line).get(name, 0.0)) for line in lines])
        above = [(x, y + more) for (x, y), (_, more) in zip(below, part, strict=True)]
        stack.append(Series(name, above, "area", i, below))
        below = above
    drawn = {line["step"] for line in lines}
    marks = [
        Mark(line["step"], f"not drawn: {line['seconds']:.3g} s, mostly compilation")
        for line in run.steps
        if split(line) and line["step"] not in drawn
    ]
    title, about = name_of("parts")
    return chart(title, stack, form=_figure, marks=marks, zero=True, about=about)


def _figure(value: float) -> str:
    return f"{value:.3g}"
