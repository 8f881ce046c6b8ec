"""A load's picture: how TTFT and E2E are distributed, and the tokens over time. SVG by hand: no package to install."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

WIDTH, HEIGHT, GAP = 360, 220, 60  # of a panel's plot, and around it
BINS = 40
_STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#333}.title{font-weight:600}.small{font-size:11px;fill:#666}"
    ".bar{fill:#4c78a8}.axis{stroke:#999}.mark{stroke:#e45756;stroke-dasharray:4 3}"
)


def draw(title: str, waits: Sequence[tuple[str, Sequence[float], dict[str, float]]], rates: Sequence[float],
         seconds: float) -> str:  # fmt: skip
    """`waits`: (name, values in ms, {percentile's name: value}) for each distribution. `rates`: tok/s over the run."""
    panels = [_histogram(*each) for each in waits]
    panels.append(_bars("output tok/s", rates, 0.0, seconds, "seconds since the start", {}))
    width = GAP + len(panels) * (WIDTH + GAP)
    shifted = [f'<g transform="translate({GAP + i * (WIDTH + GAP)},{GAP + 20})">{p}</g>' for i, p in enumerate(panels)]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {HEIGHT + 2 * GAP + 20}" width="{width}">'
        f"<style>{_STYLE}</style>"
        f'<rect width="100%" height="100%" fill="white"/>{_label(GAP, 24, title, "title")}{"".join(shifted)}</svg>\n'
    )


def _histogram(name: str, values: Sequence[float], marks: dict[str, float]) -> str:
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    high = high if high > low else low + 1.0
    counts = [0.0] * BINS
    for value in values:
        counts[min(BINS - 1, int((value - low) / (high - low) * BINS))] += 1
    return _bars(f"{name}, requests", counts, low, high, "ms", marks)


def _bars(title: str, heights: Sequence[float], low: float, high: float, unit: str, marks: dict[str, float]) -> str:
    """Bars over [low, high], with a dashed line at each mark and its value in the title."""
    top, each = max([*heights, 0.0]) or 1.0, WIDTH / max(1, len(heights))
    named = "".join(f" · {name} {value:,.0f} {unit}" for name, value in marks.items())
    parts = [_label(0, -12, title + named, "title")]
    for i, height in enumerate(heights):
        tall = HEIGHT * height / top
        parts.append(
            f'<rect class="bar" x="{i * each:.1f}" y="{HEIGHT - tall:.1f}" width="{each:.2f}" height="{tall:.1f}"/>'
        )
    for value in marks.values():
        x = WIDTH * (value - low) / (high - low)
        parts.append(f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{HEIGHT}"/>')
    parts.append(f'<path class="axis" fill="none" d="M0 0V{HEIGHT}H{WIDTH}"/>')
    for at, text in ((0, _short(low)), (WIDTH / 2, f"{_short((low + high) / 2)} {unit}"), (WIDTH, _short(high))):
        parts.append(_label(at, HEIGHT + 18, text, "small", "middle"))
    parts += [_label(-6, 10, _short(top), "small", "end"), _label(-6, HEIGHT, "0", "small", "end")]
    return "".join(parts)


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _label(x: float, y: float, text: str, style: str, anchor: str = "start") -> str:
    return f'<text class="{style}" x="{x:.1f}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>'
