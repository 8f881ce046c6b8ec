"""The unit that multiplies matrices, and how much of it a product leaves idle.

On a TPU it is a systolic array: it holds a square of the weights, activations stream through it from the left and sums
fall out below, so k and n are padded to its side. On a GPU each multiprocessor makes one tile of the result at a time,
so m and n are padded to the tile, and the last round of tiles may leave multiprocessors without one.
"""

from __future__ import annotations

import math
from typing import Any

from dovetail.core.accelerator import Accelerator
from dovetail.plan.operations import Operation

# Side of the array: Google Cloud's pages of each TPU. Of a later one none is published: the last that was is drawn.
SIDES = {"v2": 128, "v3": 128, "v4": 128, "v5e": 128, "v5p": 128, "v6e": 256, "TPU7x": 256}
SIDE = 256
# Multiprocessors of the SXM modules: NVIDIA's data sheets.
MULTIPROCESSORS = {"A100-40GB": 108, "A100": 108, "H100": 132, "H200": 132, "B200": 148, "GB200": 148}
TILE, SLAB = 128, 64  # of the result, and of the summed dim per round: what cuBLAS's large kernels take


def unit(accelerator: Accelerator) -> dict[str, Any] | None:
    """What the page draws; None of a CPU."""
    chip = accelerator.chip
    if chip is None:
        return None
    if accelerator.is_tpu:
        return {"kind": "systolic", "side": SIDES.get(chip.name, SIDE), "published": chip.name in SIDES}
    return {"kind": "tiles", "tile": TILE, "slab": SLAB, "processors": MULTIPROCESSORS.get(chip.name)}


def wasted(one: Operation, accelerator: Accelerator) -> float:
    """The share of the unit's multiplications that padding makes, and not the product."""
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
