"""Where each chip of an accelerator is: its coordinates, its host, and how they give its indices in a mesh.

A device's index along an axis is a sum of digits. Each digit is `coordinate // stride % count * times`, of one
coordinate: a side of the torus, the device within its chip, its number among the GPUs, or its slice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from dovetail.core.accelerator import Accelerator
from dovetail.plan.links import AXES, Span, layout, wraps

SLICE = "slice"  # the coordinate among slices; the others are numbered: sides, then the device within a chip
NUMBER = "number"  # of a GPU, over all machines


def machine(accelerator: Accelerator) -> dict[str, Any]:
    """The accelerator as the page draws it."""
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
    """The chips of one host along each side: 2 x 2, or all of a slice that one machine holds."""
    if not accelerator.is_tpu:
        return (accelerator.chips_per_host,)
    if accelerator.hosts == 1:
        return accelerator.sides
    return (2, 2) + (1,) * (len(accelerator.sides) - 2)


def indices(accelerator: Accelerator, axes: Mapping[str, int]) -> list[dict[str, Any]]:
    """Of each axis of more than one device: what it crosses, and its digits as [coordinate, stride, count, times]."""
    spans = layout(accelerator, axes)
    found = []
    for span in spans:
        digits = _of_torus(accelerator, span, spans) if accelerator.is_tpu else _of_numbers(axes, span.axis)
        found.append({
            "name": span.axis, "size": span.size, "over": span.over, "near": span.size // span.far, "far": span.far,
            "bandwidth": span.bandwidth, "farBandwidth": span.far_bandwidth, "digits": digits,
        })  # fmt: skip
    return found


def _of_torus(accelerator: Accelerator, span: Span, spans: Sequence[Span]) -> list[list[Any]]:
    """Axes that share a side lie within each other, the last axis innermost; the first side counts most."""
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
    """GPUs, and CPU devices, are taken in their order."""
    stride = math.prod(axes.get(later, 1) for later in AXES[AXES.index(name) + 1 :])
    return [[NUMBER, stride, axes[name], 1]]
