"""SVG plots of `dovetail bench serve` and `dovetail plan serve`, written without a plotting package."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from dovetail.core.units import format_number

PANEL_WIDTH, PANEL_HEIGHT, GAP, BINS = 360, 220, 60, 40  # one panel of a load's plot
WIDTH, HEIGHT, LEFT, TOP, LEGEND = 640, 400, 80, 70, 190  # the plot of serving plans
COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2")
_STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#333}.title{font-weight:600}.small{font-size:11px;fill:#666}"
    ".bar{fill:#4c78a8}.axis{stroke:#999;fill:none}.grid{stroke:#e6e6e6}.mark{stroke:#e45756;stroke-dasharray:4 3}"
)
Scale = Callable[[float], float]


def _svg(width: float, height: float, body: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}">'
        f'<style>{_STYLE}</style><rect width="100%" height="100%" fill="white"/>{body}</svg>\n'
    )


def _label(x: float, y: float, text: str, style: str, anchor: str = "start") -> str:
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


# --- a load on a server: TTFT, E2E and tokens over time --------------------------------------------------------------


def draw_load(
    title: str, waits: Sequence[tuple[str, Sequence[float], dict[str, float]]], rates: Sequence[float], seconds: float
) -> str:
    """Return the plot of a load test.

    Args:
        title: The title of the plot.
        waits: (name, values in ms, {percentile: value}) of each distribution.
        rates: Output tokens per second over the run, at equal intervals.
        seconds: The length of the run.
    """
    panels = [_histogram(*each) for each in waits]
    panels.append(_bars("output tok/s", rates, 0.0, seconds, "seconds since the start", {}))
    step = PANEL_WIDTH + GAP
    shifted = [f'<g transform="translate({GAP + i * step},{GAP + 20})">{p}</g>' for i, p in enumerate(panels)]
    body = _label(GAP, 24, title, "title") + "".join(shifted)
    return _svg(GAP + len(panels) * step, PANEL_HEIGHT + 2 * GAP + 20, body)


def _histogram(name: str, values: Sequence[float], marks: dict[str, float]) -> str:
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    high = high if high > low else low + 1.0
    counts = [0.0] * BINS
    for value in values:
        counts[min(BINS - 1, int((value - low) / (high - low) * BINS))] += 1
    return _bars(f"{name}, requests", counts, low, high, "ms", marks)


def _bars(title: str, heights: Sequence[float], low: float, high: float, unit: str, marks: dict[str, float]) -> str:
    """Draw bars over [low, high], a dashed line at each mark, and the marks' values in the title."""
    width, height = PANEL_WIDTH, PANEL_HEIGHT
    top, each = max([*heights, 0.0]) or 1.0, width / max(1, len(heights))
    named = "".join(f" · {name} {value:,.0f} {unit}" for name, value in marks.items())
    parts = [_label(0, -12, title + named, "title")]
    for i, value in enumerate(heights):
        tall = height * value / top
        parts.append(
            f'<rect class="bar" x="{i * each:.1f}" y="{height - tall:.1f}" width="{each:.2f}" height="{tall:.1f}"/>'
        )
    for value in marks.values():
        x = width * (value - low) / (high - low)
        parts.append(f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{height}"/>')
    parts.append(f'<path class="axis" d="M0 0V{height}H{width}"/>')
    for at, text in (
        (0, format_number(low)),
        (width / 2, f"{format_number((low + high) / 2)} {unit}"),
        (width, format_number(high)),
    ):
        parts.append(_label(at, height + 18, text, "small", "middle"))
    parts += [_label(-6, 10, format_number(top), "small", "end"), _label(-6, height, "0", "small", "end")]
    return "".join(parts)


# --- serving plans: latency against throughput ------------------------------------------------------------------------


def draw_plans(model: str, plans: Sequence[Any]) -> str:
    """Return the plot of serving plans: a band between each plan's bounds, with a dot per batch on the best bound."""
    times = [ms for plan in plans for point in plan.points for ms in _times(point)]
    rates = [rate for plan in plans for point in plan.points for rate in _rates(point)]
    x, xs = _log_scale(min(times), max(times), 0, WIDTH)
    y, ys = _log_scale(min(rates), max(rates), HEIGHT, 0)
    work, name = plans[0].workload, plans[0].replica.accelerator.name
    caption = "bands: between the bounds; dots: concurrent sequences; ring: the requested concurrency"
    parts = [
        _label(0, -40, f"{model} on {name}: {work.prompt:,} in + {work.output:,} out", "title"),
        _label(0, -20, caption, "small"),
        *(_grid_x(x(tick), tick) for tick in xs),
        *(_grid_y(y(tick), tick) for tick in ys),
        f'<path class="axis" d="M0 0V{HEIGHT}H{WIDTH}"/>',
        _label(WIDTH / 2, HEIGHT + 42, "ms between two tokens of a sequence, with others' prompts", "", "middle"),
        f'<g transform="translate(-58,{HEIGHT / 2}) rotate(-90)">{_label(0, 0, "output tok/s", "", "middle")}</g>',
    ]
    for i, plan in enumerate(plans):
        parts.append(_plan(plan, COLOURS[i % len(COLOURS)], x, y))
        parts.append(_legend(plan, COLOURS[i % len(COLOURS)], i))
    body = f'<g transform="translate({LEFT},{TOP})">{"".join(parts)}</g>'
    return _svg(LEFT + WIDTH + LEGEND, TOP + HEIGHT + 60, body)


def _plan(plan: Any, colour: str, x: Scale, y: Scale) -> str:
    best = [(x(_times(p)[0]), y(_rates(p)[0])) for p in plan.points]
    worst = [(x(_times(p)[1]), y(_rates(p)[1])) for p in plan.points]
    outline = " ".join(f"{a:.1f},{b:.1f}" for a, b in [*best, *reversed(worst)])
    line = " ".join(f"{a:.1f},{b:.1f}" for a, b in best)
    dots = "".join(f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{colour}"/>' for a, b in best)
    labels = "".join(
        _label(a - 5, b - 6, f"{point.sequences:,}", "small", "end")
        for point, (a, b) in list(zip(plan.points, best, strict=True))[:: max(1, len(best) // 5)]
    )
    a, b = x(_times(plan.chosen)[0]), y(_rates(plan.chosen)[0])
    return (
        f'<polygon points="{outline}" fill="{colour}" opacity="0.14"/>'
        f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>{dots}{labels}'
        f'<circle cx="{a:.1f}" cy="{b:.1f}" r="7" fill="none" stroke="{colour}" stroke-width="2"/>'
    )


def _legend(plan: Any, colour: str, i: int) -> str:
    at = f'<rect x="{WIDTH + 20}" y="{i * 22}" width="14" height="14" fill="{colour}"/>'
    many = "replica" if plan.replicas == 1 else "replicas"
    return at + _label(WIDTH + 40, i * 22 + 12, f"{plan.replicas} {many} of {plan.tensor}", "")


def _times(point: Any) -> tuple[float, float]:
    """Return ms per token, at best and at worst."""
    return point.per_token.best * 1e3, point.per_token.worst * 1e3


def _rates(point: Any) -> tuple[float, float]:
    return point.rate.best, point.rate.worst


def _log_scale(low: float, high: float, start: float, end: float) -> tuple[Scale, list[float]]:
    """Return a logarithmic scale and its ticks: 1, 2 and 5 of each power of ten."""
    low, high = low / 1.15, high * 1.15
    span = math.log(high / low)
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [m * 10.0**d for d in decades for m in (1, 2, 5) if low <= m * 10.0**d <= high]
    return lambda value: start + (end - start) * math.log(value / low) / span, ticks


def _grid_x(at: float, tick: float) -> str:
    line = f'<path class="grid" d="M{at:.1f} 0V{HEIGHT}"/>'
    return line + _label(at, HEIGHT + 18, f"{tick:,g}", "small", "middle")


def _grid_y(at: float, tick: float) -> str:
    return f'<path class="grid" d="M0 {at:.1f}H{WIDTH}"/>' + _label(-6, at + 4, f"{tick:,g}", "small", "end")
