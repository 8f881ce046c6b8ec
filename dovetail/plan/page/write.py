"""Writes a page: one HTML file with its style, its programs and its data inside, that fetches nothing."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import Any

from dovetail.core.files import write_atomic
from dovetail.plan.operations import Operation
from dovetail.plan.page import arrays, places
from dovetail.plan.page.page import Choice, Page

TEMPLATE = Path(__file__).parent / "template"
STYLES = ("page.css",)
# In the order in which they need each other; one a picture, after what they share.
SCRIPTS = (
    "base.js", "canvas.js", "roofline.js", "memory.js", "torus.js", "torus_links.js", "domains.js", "mesh.js",
    "schedule.js", "timeline.js", "systolic.js", "tiles.js", "array.js", "curves.js", "start.js",
)  # fmt: skip


def write(path: str | Path, page: Page) -> Path:
    """Write the page and return its path."""
    return write_atomic(path, html(page))  # a browser that reloads meanwhile finds the old page


def html(page: Page) -> str:
    """All that comes from a model's or a plan's name is in the data, which the programs put in as text."""
    found = json.dumps(data(page), ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    parts = {
        "title": escape(page.title),
        "style": "\n".join(_read(name) for name in STYLES),
        "data": found,
        "script": "\n".join(_read(name) for name in SCRIPTS),
    }
    made = _read("page.html")
    for name, text in parts.items():
        made = made.replace("{{" + name + "}}", text)
    return made


def _read(name: str) -> str:
    return (TEMPLATE / name).read_text(encoding="utf-8")


def data(page: Page) -> dict[str, Any]:
    """What the programs draw, as JSON has it."""
    return {
        "title": page.title, "about": page.about, "step": page.step, "machine": places.machine(page.accelerator),
        "unit": arrays.unit(page.accelerator), "roofs": _roofs(page),
        "plans": [_choice(page, choice) for choice in page.choices],
        "curves": [vars(curve) for curve in page.curves],
    }  # fmt: skip


def _roofs(page: Page) -> dict[str, float] | None:
    """Of one device."""
    chip = page.accelerator.chip or page.chip
    if chip is None:
        return None
    peak = page.peak or chip.device_bf16
    return {"peak": peak, "bandwidth": chip.bandwidth / chip.devices, "memory": chip.device_hbm}


def _choice(page: Page, choice: Choice) -> dict[str, Any]:
    return {
        "title": choice.title, "axes": places.indices(page.accelerator, choice.axes),
        "memory": list(choice.memory.items()), "limit": choice.limit,
        "operations": [_operation(page, one) for one in choice.operations],
        "layers": choice.layers, "microsteps": choice.microsteps, "shares": [vars(share) for share in choice.shares],
        "figures": choice.figures, "recipe": choice.recipe,
        "time": {
            "products": choice.time.products, "memory": choice.time.memory, "lower": choice.time.lower,
            "upper": choice.time.upper, "exchanges": [vars(one) for one in choice.time.exchanges],
        },
    }  # fmt: skip


def _operation(page: Page, one: Operation) -> dict[str, Any]:
    return {**vars(one), "part": one.part, "wasted": arrays.wasted(one, page.accelerator)}
