"""Draw the charts of a report as SVG, without a plotting package; colours follow the page's light or dark theme."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

LEFT, RIGHT, TOP, BOTTOM = 52, 22, 30, 26  # margins around the plot
LINE_POINTS, RAW_POINTS = 300, 900  # a screen cannot show more points
LEAST = 1e-5  # smaller shares have no bar
Points = Sequence[tuple[float, float]]
TEMPLATE = Path(__file__).parent / "template"
STYLE = (TEMPLATE / "curves.css").read_text(encoding="utf-8")
SCRIPT = (TEMPLATE / "curves.js").read_text(encoding="utf-8")


@dataclass(frozen=True)
class Series:
    """Hold one curve of a chart."""

    name: str
    points: Points
    style: str = "line"  # line | raw (faint, behind, with its extremes) | dots (joined) | area (down to its base)
    colour: int = 0  # an index of the page's palette
    base: Points = ()  # the lower edge of an area, at the same steps

    @property
    def is_named(self) -> bool:
        """Return whether the legend and the values at the pointer include it."""
        return self.style != "raw" and bool(self.name)


@dataclass(frozen=True)
class Mark:
    """Hold an event, drawn as a dashed line."""

    x: float
    text: str


def chart(title: str, series: Sequence[Series], *, form: Callable[[float], str], marks: Sequence[Mark] = (),
          width: int = 520, height: int = 230, log: bool = False, zero: bool = False,
          about: str = "") -> str:  # fmt: skip
    """Return a chart of curves over the steps; empty if there are no points.

    Args:
        title: The title of the chart.
        series: The curves.
        form: Formats a value.
        marks: Events to mark.
        width: Width of the view box.
        height: Height of the view box.
        log: Whether the axis is logarithmic.
        zero: Whether the axis starts at 0.
        about: A sentence below the chart.
    """
    series = [replace(s, points=_finite(s.points, log)) if s.style != "area" else s for s in series]
    series = [s for s in series if s.points]
    if not series:
        return ""
    frame = _Frame.around(series, width, height, log, zero)
    parts = [_text(LEFT, 16, title, "title"), frame.grid(form)]
    parts += [_mark(frame, mark) for mark in marks if frame.low <= mark.x <= frame.high]
    for each in sorted(series, key=lambda s: ("area", "raw").index(s.style) if s.style in ("area", "raw") else 2):
        parts.append(_draw(frame, each))
    parts += [_names(series, width - RIGHT), f'<line class="cursor" y1="{TOP}" y2="{height - BOTTOM}"/>']
    parts.append(_text(width - RIGHT, 16, "", "values", "end"))
    data = escape(json.dumps(_hover_data(frame, series, form), separators=(",", ":")), quote=True)
    return _svg(title, width, height, parts, f' data-points="{data}"') + _explained(about)


def _explained(about: str) -> str:
    return f'<p class="explained">{escape(about)}</p>' if about else ""


def bars(
    title: str, shares: Sequence[tuple[str, float]], *, width: int = 520, height: int = 230, about: str = ""
) -> str:
    """Return a bar chart of named shares on a logarithmic axis, so that a ten-thousandth is visible."""
    if not shares:
        return ""
    base, each = height - BOTTOM, (width - LEFT - RIGHT) / len(shares)
    parts = [_text(LEFT, 16, title, "title"), f'<path class="axis" d="M{LEFT} {base}H{width - RIGHT}"/>']

    def at(share: float) -> float:
        return base - (1 + math.log10(max(share, LEAST)) / -math.log10(LEAST)) * (base - TOP - 16)

    for power in range(1 - round(-math.log10(LEAST)), 1):
        y = at(10.0**power)
        parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{width - RIGHT}"/>')
        parts.append(_text(LEFT - 6, y + 4, f"{10.0**power:.{max(0, -power - 2)}%}", "", "end"))
    for i, (name, share) in enumerate(shares):
        x, y = LEFT + (i + 0.5) * each, at(share)
        bar = f'x="{x - each * 0.38:.1f}" y="{y:.1f}" width="{each * 0.76:.1f}" height="{base - y:.1f}"'
        parts.append(f'<rect class="area" {bar} style="fill:var(--c0)"/>')
        parts.append(_text(x, y - 5, _percent(share), "share", "middle"))
        parts.append(_text(x, base + 16, name, "", "middle"))
    return _svg(title, width, height, parts) + _explained(about)


def smooth(points: Points, log: bool = False) -> list[tuple[float, float]]:
    """Return the moving mean around each point over a 40th of the run; with `log` the geometric mean.

    The window is centred, so that the mean does not lag behind a falling loss, and narrower near the ends.
    """
    points = _finite(points, log)
    if log:
        return [(x, 10.0**y) for x, y in smooth([(x, math.log10(y)) for x, y in points])]
    sums = [0.0, *accumulate(y for _, y in points)]
    most, last = len(points) // 80, len(points) - 1
    out = []
    for i, (x, _) in enumerate(points):
        reach = min(most, i, last - i)
        out.append((x, (sums[i + reach + 1] - sums[i - reach]) / (2 * reach + 1)))
    return out


def _percent(share: float) -> str:
    """Return a share as text with three digits; only a share of 1 is `100%`."""
    return (
        "0" if not share else f"{share:.0%}" if share >= 0.9999995 else f"{100 * share:.{3 if share < 0.99 else 6}g}%"
    )


def _svg(title: str, width: int, height: int, parts: Sequence[str], more: str = "") -> str:
    box = f'role="img" aria-label="{escape(title)}" viewBox="0 0 {width} {height}"'
    return f'<svg class="chart" {box}{more}>{"".join(parts)}</svg>'


# --- the frame: from values to coordinates ----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Frame:
    low: float
    high: float
    bottom: float  # the least value (its logarithm, if log)
    top: float
    width: int
    height: int
    log: bool

    @classmethod
    def around(cls, series: Sequence[Series], width: int, height: int, log: bool, zero: bool) -> _Frame:
        xs = [x for s in series for x, _ in s.points]
        ys = [math.log10(y) if log else y for s in series for _, y in (*s.points, *s.base)]
        bottom, top = (min([0.0, *ys]) if zero else min(ys)), max(ys)
        flat = top - bottom < 1e-9 * abs(top)  # except for rounding
        room = ((top - bottom) * 0.06 if not flat else abs(top) * 0.1) or 1.0
        low, high = min(xs), max(xs)
        return cls(low, high if high > low else low + 1, bottom - (0 if zero else room), top + room, width, height, log)

    def x(self, value: float) -> float:
        return LEFT + (value - self.low) / (self.high - self.low) * (self.width - LEFT - RIGHT)

    def y(self, value: float) -> float:
        value = math.log10(value) if self.log else value
        return self.height - BOTTOM - (value - self.bottom) / (self.top - self.bottom) * (self.height - TOP - BOTTOM)

    def grid(self, form: Callable[[float], str]) -> str:
        right, base, parts = self.width - RIGHT, self.height - BOTTOM, []
        for value in (_log_ticks if self.log else _ticks)(self.bottom, self.top, max(4, self.height // 40)):
            y = self.y(value)
            parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{right}"/>')
            parts.append(_text(LEFT - 6, y + 4, form(value), "", "end"))
        for value in _ticks(self.low, self.high, 6, whole=True):
            parts.append(_text(self.x(value), base + 16, f"{value:,.0f}", "", "middle"))
        return "".join([*parts, f'<path class="axis" d="M{LEFT} {base}H{right}"/>'])


def _ticks(low: float, high: float, most: int, whole: bool = False) -> list[float]:
    """Return at most `most` round numbers in [low, high]."""
    rough = (high - low) / most
    power = 10 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= rough)
    step = max(1.0, step) if whole else step
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]


def _log_ticks(low: float, high: float, most: int) -> list[float]:
    """Return round numbers between 10**low and 10**high, as many as `most` allows."""
    powers = range(math.floor(low), math.ceil(high) + 1)
    for digits in ((1, 1.5, 2, 3, 4, 5, 6, 8), (1, 2, 3, 5), (1, 2, 5), (1, 3), (1,)):
        found = [d * 10.0**p for p in powers for d in digits if low <= math.log10(d) + p <= high]
        if len(found) <= most:
            return found
    return found[:: -(-len(found) // most)]


# --- the curves -------------------------------------------------------------------------------------------------------


def _finite(points: Points, log: bool) -> list[tuple[float, float]]:
    return [(x, y) for x, y in points if y is not None and math.isfinite(y) and (y > 0 or not log)]


def _area(frame: _Frame, series: Series) -> str:
    """Return an area; one without a name is the background of a line."""
    edges = _means(series.points, LINE_POINTS) + _means(series.base, LINE_POINTS)[::-1]
    at = "L".join(f"{frame.x(x):.1f} {frame.y(y):.1f}" for x, y in edges)
    kind = "area" if series.name else "behind"
    return f'<path class="{kind}" style="fill:var(--c{series.colour})" d="M{at}Z"/>'


def _draw(frame: _Frame, series: Series) -> str:
    if series.style == "area":
        return _area(frame, series)
    points = _extremes(series.points, RAW_POINTS) if series.style == "raw" else _means(series.points, LINE_POINTS)
    if series.style == "dots":
        points = list(series.points)
    at = [f"{frame.x(x):.1f} {frame.y(y):.1f}" for x, y in points]
    colour = f'style="stroke:var(--c{series.colour})"'
    path = f'<path class="{"raw" if series.style == "raw" else "line"}" {colour} d="M{"L".join(at)}"/>'
    if series.style != "dots":
        return path
    fill = f'style="fill:var(--c{series.colour})"'
    return path + "".join(
        f'<circle r="{3 if len(points) < 60 else 2}" {fill} cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}"/>'
        for x, y in points
    )


def _buckets(points: Points, most: int) -> list[Points]:
    size = len(points) / most
    return [points[int(i * size) : int((i + 1) * size)] for i in range(most)]


def _means(points: Points, most: int) -> list[tuple[float, float]]:
    if len(points) <= most:
        return list(points)
    return [(fmean(x for x, _ in b), fmean(y for _, y in b)) for b in _buckets(points, most)]


def _extremes(points: Points, most: int) -> list[tuple[float, float]]:
    """Return the minimum and maximum of each bucket, so that no spike is averaged away."""
    if len(points) <= most:
        return list(points)
    out = []
    for b in _buckets(points, most // 2):
        low, high = min(b, key=lambda p: p[1]), max(b, key=lambda p: p[1])
        out += sorted({low, high})
    return out


def _mark(frame: _Frame, mark: Mark) -> str:
    x = f"{frame.x(mark.x):.1f}"
    line = f'<line class="mark" x1="{x}" x2="{x}" y1="{TOP}" y2="{frame.height - BOTTOM}">'
    return f"{line}<title>{escape(mark.text)}</title></line>"


def _names(series: Sequence[Series], right: float) -> str:
    """Return the legend at the right of the title; empty for a single curve."""
    parts, x = [], right
    named = [s for s in series if s.is_named]
    for each in reversed(named if len(named) > 1 else []):
        x -= 6.2 * len(each.name)
        parts.append(_text(x, 16, each.name, ""))
        parts.append(f'<rect x="{x - 15:.1f}" y="10" width="11" height="4" style="fill:var(--c{each.colour})"/>')
        x -= 26
    return f'<g class="names">{"".join(parts)}</g>'


def _hover_data(frame: _Frame, series: Sequence[Series], form: Callable[[float], str]) -> dict:
    """Return the data for the script that shows the values at the pointer."""
    each = []
    for s in series:
        if s.is_named:
            points = list(s.points) if s.style == "dots" else _means(s.points, LINE_POINTS)
            below = [y for _, y in _means(s.base, LINE_POINTS)] or [0.0] * len(points)
            each.append([s.name, [[round(x), form(y - b)] for (x, y), b in zip(points, below, strict=True)]])
    return dict(left=LEFT, right=frame.width - RIGHT, low=frame.low, high=frame.high, width=frame.width, series=each)


def _text(x: float, y: float, text: str, style: str, anchor: str = "start") -> str:
    kind = f' class="{style}"' if style else ""
    return f'<text{kind} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


# --- titles of metrics ------------------------------------------------------------------------------------------------


class Name(NamedTuple):
    """Hold the title of a metric and one sentence about it."""

    title: str
    about: str = ""


_NAMES = {
    "loss": Name("loss", "The training loss. Each step uses other data, so single steps vary."),
    "lr": Name("learning rate", "The optimizer's learning rate, by the schedule."),
    "grad_norm": Name("gradient norm", "Norm of the gradient before clipping. Spikes often precede a rising loss."),
    "tokens_per_second": Name("tokens per second", "Tokens trained per second of wall time."),
    "mfu": Name(
        "model FLOPs utilisation",
        "Share of the chips' peak that the model's arithmetic used; causal counts only the visible half of attention.",
    ),
    "seconds": Name(
        "step time, seconds",
        "Wall time of a step. The band, if any, is the planner's prediction from the chip's peaks.",
    ),
    "parts": Name("step time, seconds", "Wall time of a step by activity; train is the rest."),
    "token_accuracy": Name(
        "token accuracy", "Share of the trained tokens to which the model gave the highest probability."
    ),
    "chosen_reward": Name("reward of chosen", "Change of the chosen answers' log-probability, times beta."),
    "rejected_reward": Name("reward of rejected", "The same for the rejected answers."),
    "reward_margin": Name("reward margin", "Reward of the chosen answer minus that of the rejected one."),
    "reward_accuracy": Name("reward accuracy", "Share of the pairs in which the chosen answer has the higher reward."),
    "chosen_logp": Name("log-probability of chosen", "Summed over the tokens of an answer."),
    "rejected_logp": Name("log-probability of rejected", "Summed over the tokens of an answer."),
    "logp": Name("log-probability", "Summed over the tokens of an answer."),
    "divergence": Name("divergence from the teacher", "Per trained token, in nats. 0: student and teacher agree."),
    "nll": Name("cross entropy", "Cross entropy of the trained tokens, in nats per token."),
    "kl": Name("KL divergence", "How far the model is from its reference, in nats."),
    "reward": Name("reward", "Mean over the step's answers."),
    "entropy": Name("entropy", "Entropy of the next token, in nats. Near 0 all answers to a prompt are the same."),
    "completion_length": Name("tokens per completion", "Mean over the completions of the rollout."),
    "accepted_length": Name("tokens per verify step", "With draft tokens: tokens that a sequence gains per step."),
    "seconds_saved": Name(
        "seconds saved by draft tokens",
        "Estimate per rollout: decode steps for the same tokens, by their measured time, minus the verify steps.",
    ),
    "drafter_loss": Name(
        "loss of the drafter", "Of its last update on a rollout: distance to the policy's distribution."
    ),
    "drafter_accepted": Name(
        "accepted draft tokens in training", "Per draft, where each draft token is the likeliest."
    ),
    "answers": Name(
        "share of the answers", "Cut off: they reached max_completion_length. Without a reward: every reward failed."
    ),
    "clip_fraction": Name("share of the tokens clipped", "Tokens whose ratio left the clipping range: no gradient."),
    "gap": Name(
        "|log-probability of trainer - of sampler|",
        "Over the sampled tokens. It should stay small: the trainer learns from the sampler's tokens.",
    ),
    "ratio": Name("trainer's / sampler's probability", "Share of the sampled tokens by this ratio; 1 is on-policy."),
    "evaluation": Name(
        "held-out prompts answered correctly", "pass@k: one of k completions is correct; maj@k: the most frequent is."
    ),
    "filled": Name("filled rows", "Share of the training rows that holds tokens; the rest is padding."),
    "draws": Name("draws per step", "Rollouts until enough groups had different rewards (loss.dynamic_sampling)."),
    "goodput": Name("goodput", "Share of the wall time spent in useful steps. The rest is listed below."),
}


def name_of(metric: str) -> Name:
    """Return a metric's title and sentence; for an unlisted metric, its own name."""
    return _NAMES.get(metric, Name(metric.replace("_", " ")))
