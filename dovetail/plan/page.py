"""Build the page of plans: the machine, and the mesh, memory, products and collectives of each plan.

Plans of training and of serving both fill a `Page`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dovetail.core.accelerator import Accelerator
from dovetail.core.chips import Chip
from dovetail.core.errors import UserError
from dovetail.core.files import write_atomic
from dovetail.core.page import html as page_html
from dovetail.plan.links import AXES, AxisSpan, layout, wraps
from dovetail.plan.operations import Operation
from dovetail.plan.train_time import StepTime


@dataclass(frozen=True)
class Share:
    """Hold a quantity that devices share: `total` is split along the mesh's `axes`, the first one outermost."""

    what: str
    total: int
    axes: tuple[str, ...]


@dataclass(frozen=True)
class Choice:
    """Hold one plan of the page."""

    title: str
    axes: Mapping[str, int]  # mesh axis -> devices along it; their product is the number of devices
    memory: Mapping[str, int]  # bytes of one device, by kind
    limit: int | None  # bytes of a device that a plan may fill; None: not known
    operations: tuple[Operation, ...]  # of one step on one device
    time: StepTime
    layers: int
    microsteps: int = 1
    shares: tuple[Share, ...] = ()
    figures: tuple[tuple[str, str, str], ...] = ()  # (name, value with unit, kind of number)
    recipe: str = ""  # lines to paste


@dataclass(frozen=True)
class Curve:
    """Points of a trade-off, such as latency against throughput, each with the plan that reaches it."""

    title: str
    across: str  # the x axis, with its unit
    up: str
    points: tuple[tuple[float, float, str], ...]
    reading: str  # one sentence on how to read it


@dataclass(frozen=True)
class Page:
    """Hold the contents of a page of plans."""

    title: str
    about: str
    accelerator: Accelerator
    choices: tuple[Choice, ...]  # the best first
    step: str = "training step"  # what the timeline shows
    curves: tuple[Curve, ...] = ()
    chip: Chip | None = None  # the chip of the roofline if the accelerator has none: a CPU
    peak: float | None = None  # FLOP/s of a device in the products' dtype; bf16 otherwise

    def __post_init__(self) -> None:
        if not self.choices:
            raise UserError("a page shows at least one plan; got none")


# --- the matrix unit --------------------------------------------------------------------------------------------------
#
# A TPU has a systolic array: it holds a square of the weights, activations stream through it from the left and sums
# leave it below, so k and n are padded to its side. On a GPU each multiprocessor computes one tile of the result at a
# time, so m and n are padded to the tile, and the last round of tiles may leave multiprocessors idle.


# Side of the array, from Google Cloud's page of each TPU. For a TPU without a published side the last known is drawn.
SIDES = {"v2": 128, "v3": 128, "v4": 128, "v5e": 128, "v5p": 128, "v6e": 256, "TPU7x": 256}
SIDE = 256
# Multiprocessors of the SXM modules, from NVIDIA's data sheets.
MULTIPROCESSORS = {"A100-40GB": 108, "A100": 108, "H100": 132, "H200": 132, "B200": 148, "GB200": 148}
TILE, SLAB = 128, 64  # sides of the result's tile and of the summed dim per round, as in cuBLAS's large kernels


def unit(accelerator: Accelerator) -> dict[str, Any] | None:
    """Return the matrix unit that the page draws; None for a CPU."""
    chip = accelerator.chip
    if chip is None:
        return None
    if accelerator.is_tpu:
        return {"kind": "systolic", "side": SIDES.get(chip.name, SIDE), "published": chip.name in SIDES}
    return {"kind": "tiles", "tile": TILE, "slab": SLAB, "processors": MULTIPROCESSORS.get(chip.name)}


def wasted(one: Operation, accelerator: Accelerator) -> float:
    """Return the share of the unit's multiplications that is padding."""
    made = unit(accelerator)
    if made is None:
        return 0.0
    if made["kind"] == "systolic":
        return 1 - one.k / _up(one.k, made["side"]) * one.n / _up(one.n, made["side"])
    padded = _up(one.m, TILE) * _up(one.n, TILE)
    tiles, processors = one.copies * padded // TILE**2, made["processors"] or 1
    return 1 - one.m * one.n / padded * tiles / _up(tiles, processors)


def _up(size: int, side: int) -> int:
    return math.ceil(size / side) * side


# --- where each device is ---------------------------------------------------------------------------------------------
#
# A device's index along an axis is a sum of digits. Each digit is `coordinate // stride % count * times` of one
# coordinate: a side of the torus, the device within its chip, its number among the GPUs, or its slice.


SLICE = "slice"  # the coordinate among slices; the others are numbers: sides, then the device within a chip
NUMBER = "number"  # a GPU's number over all machines


def machine(accelerator: Accelerator) -> dict[str, Any]:
    """Return the accelerator as the page draws it."""
    chip, tpu = accelerator.chip, accelerator.is_tpu
    return {
        "name": accelerator.name, "chip": chip.name if chip else "CPU", "tpu": tpu, "sides": accelerator.sides,
        "wraps": wraps(accelerator), "slices": accelerator.slices, "chips": accelerator.chips,
        "hosts": accelerator.hosts, "host": host_box(accelerator), "devices": chip.devices if chip else 1,
        "near": {"name": "ICI" if tpu else "NVLink" if chip else "memory", "bytes": chip.network if chip else None},
        "far": {"name": "DCN" if tpu else "NIC" if chip else "network", "bytes": chip.dcn if chip else None},
        "says": accelerator.explain(),
    }  # fmt: skip


def host_box(accelerator: Accelerator) -> tuple[int, ...]:
    """Return the chips of one host along each side: 2 x 2, or a whole slice that one machine holds."""
    if not accelerator.is_tpu:
        return (accelerator.chips_per_host,)
    if accelerator.hosts == 1:
        return accelerator.sides
    return (2, 2) + (1,) * (len(accelerator.sides) - 2)


def indices(accelerator: Accelerator, axes: Mapping[str, int]) -> list[dict[str, Any]]:
    """Return the links of each axis with more than one device, and its digits as [coordinate, stride, count, times]."""
    spans = layout(accelerator, axes)
    found = []
    for span in spans:
        digits = _of_torus(accelerator, span, spans) if accelerator.is_tpu else _of_numbers(axes, span.axis)
        found.append({
            "name": span.axis, "size": span.size, "over": span.over, "near": span.size // span.far, "far": span.far,
            "bandwidth": span.bandwidth, "farBandwidth": span.far_bandwidth, "digits": digits,
        })  # fmt: skip
    return found


def _of_torus(accelerator: Accelerator, span: AxisSpan, spans: Sequence[AxisSpan]) -> list[list[Any]]:
    """Return an axis's digits on a torus. Axes that share a side are nested, the last axis innermost."""
    digits, times = [], 1
    for side, count in reversed(span.sides):
        later = [other for other in spans if AXES.index(other.axis) > AXES.index(span.axis)]
        inner = math.prod(dict(other.sides).get(side, 1) for other in later)
        digits.append([side, inner, count, times])
        times *= count
    if span.far > 1:
        digits.append([SLICE, 1, span.far, times])
    return digits


def _of_numbers(axes: Mapping[str, int], name: str) -> list[list[Any]]:
    """Return an axis's digits over GPUs or CPU devices, which are taken in their order."""
    stride = math.prod(axes.get(later, 1) for later in AXES[AXES.index(name) + 1 :])
    return [[NUMBER, stride, axes[name], 1]]


# --- the page ---------------------------------------------------------------------------------------------------------


TEMPLATE = Path(__file__).parent / "page_template"
# One script per picture, after the shared ones, in the order in which they need each other.
SCRIPTS = (
    "base.js", "canvas.js", "roofline.js", "memory.js", "torus.js", "torus_links.js", "domains.js", "mesh.js",
    "schedule.js", "timeline.js", "systolic.js", "tiles.js", "array.js", "curves.js", "start.js",
)  # fmt: skip


def write(path: str | Path, page: Page) -> Path:
    """Write the page and return its path."""
    return write_atomic(path, html(page))  # a browser that reloads meanwhile finds the old page


def html(page: Page) -> str:
    """Return the page. Names of models and plans are in its data only, which the scripts insert as text."""
    script = "\n".join(_read(name) for name in SCRIPTS)
    return page_html(page.title, _read("page.html"), style=_read("page.css"), script=script, data=data(page))


def _read(name: str) -> str:
    return (TEMPLATE / name).read_text(encoding="utf-8")


def data(page: Page) -> dict[str, Any]:
    """Return the data that the scripts draw."""
    return {
        "title": page.title, "about": page.about, "step": page.step, "machine": machine(page.accelerator),
        "unit": unit(page.accelerator), "roofs": _roofs(page),
        "plans": [_choice(page, choice) for choice in page.choices],
        "curves": [vars(curve) for curve in page.curves],
    }  # fmt: skip


def _roofs(page: Page) -> dict[str, float] | None:
    """Return the rates of one device for the roofline."""
    chip = page.accelerator.chip or page.chip
    if chip is None:
        return None
    peak = page.peak or chip.device_bf16
    return {"peak": peak, "bandwidth": chip.bandwidth / chip.devices, "memory": chip.device_hbm}


def _choice(page: Page, choice: Choice) -> dict[str, Any]:
    return {
        "title": choice.title, "axes": indices(page.accelerator, choice.axes),
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
    return {**vars(one), "part": one.part, "wasted": wasted(one, page.accelerator)}
