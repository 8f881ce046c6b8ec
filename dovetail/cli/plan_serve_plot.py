"""A serving plan's picture: latency against throughput for each way to deal the devices out. SVG by hand, as bench_plot
has it: no package to install."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

WIDTH, HEIGHT, LEFT, TOP, LEGEND = 640, 400, 80, 70, 190
COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2")
_STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#333}.title{font-size:14px;font-weight:600}.small{font-size:11px;"
    "fill:#666}.grid{stroke:#e6e6e6}.axis{stroke:#999;fill:none}"
)
Scale = Callable[[float], float]


def draw(model: str, plans: Sequence[Any]) -> str:
    """Each way is a band between its bounds, with a dot at every batch on the bound at the peaks."""
    times = [ms for plan in plans for point in plan.points for ms in _times(point)]
    rates = [rate for plan in plans for point in plan.points for rate in _rates(point)]
    x, xs = _log(min(times), max(times), 0, WIDTH)
    y, ys = _log(min(rates), max(rates), HEIGHT, 0)
    work, name = plans[0].workload, plans[0].replica.accelerator.name
    parts = [
        _label(0, -40, f"{model} on {name}: {work.prompt:,} in + {work.output:,} out", "title"),
        _label(
            0,
            -20,
            "bands: between the bounds; dots: sequences at a time; ring: as many as were asked for",
            "small",
        ),
        *(_grid_x(x(tick), tick) for tick in xs),
        *(_grid_y(y(tick), tick) for tick in ys),
        f'<path class="axis" d="M0 0V{HEIGHT}H{WIDTH}"/>',
        _label(WIDTH / 2, HEIGHT + 42, "ms between two tokens of a sequence, prompts of others included", "", "middle"),
        f'<g transform="translate(-58,{HEIGHT / 2}) rotate(-90)">{_label(0, 0, "output tok/s", "", "middle")}</g>',
    ]
    for i, plan in enumerate(plans):
        parts.append(_way(plan, COLOURS[i % len(COLOURS)], x, y))
        parts.append(_legend(plan, COLOURS[i % len(COLOURS)], i))
    width, height = LEFT + WIDTH + LEGEND, TOP + HEIGHT + 60
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}">'
        f'<style>{_STYLE}</style><rect width="100%" height="100%" fill="white"/>'
        f'<g transform="translate({LEFT},{TOP})">{"".join(parts)}</g></svg>\n'
    )


def _way(plan: Any, colour: str, x: Scale, y: Scale) -> str:
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
    """In ms, at best and at worst."""
    return point.per_token.best * 1e3, point.per_token.worst * 1e3


def _rates(point: Any) -> tuple[float, float]:
    return point.rate.best, point.rate.worst


def _log(low: float, high: float, start: float, end: float) -> tuple[Scale, list[float]]:
    """A scale of powers of ten and what to mark on it: 1, 2 and 5 of each."""
    low, high = low / 1.15, high * 1.15
    span = math.log(high / low)
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [m * 10.0**d for d in decades for m in (1, 2, 5) if low <= m * 10.0**d <= high]
    return lambda value: start + (end - start) * math.log(value / low) / span, ticks


def _grid_x(at: float, tick: float) -> str:
    line = f'<path class="grid" d="M{at:.1f} 0V{HEIGHT}"/>'
    return line + _label(at, HEIGHT + 18, _short(tick), "small", "middle")


def _grid_y(at: float, tick: float) -> str:
    return f'<path class="grid" d="M0 {at:.1f}H{WIDTH}"/>' + _label(-6, at + 4, _short(tick), "small", "end")


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 1 else f"{value:g}"


def _label(x: float, y: float, text: str, style: str, anchor: str = "start") -> str:
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
