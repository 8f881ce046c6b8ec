"""What the clouds call each chip, how they group it in machines, and the slices that they have of it.

Facts as of August 2026, from Google Cloud's pages of each TPU, of TPUs in GKE and of its machines with GPUs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from dovetail.core.chips import Chip

CUBE = 4  # the side of a 3-D pod's building block: from one block on, every side is a multiple of it


@dataclass(frozen=True)
class Family:
    """What the clouds call a chip, and how they group it."""

    prefix: str  # of the cloud's name of a slice
    spellings: tuple[str, ...]  # as people type it, besides
    gke: str | None  # the value of GKE's node label; None: GKE does not have it
    machine: str | None  # the type of the machine that holds so many chips, with {} for how many
    hosts: tuple[int, ...]  # chips that a single machine may have
    sides: int = 0  # of the torus; 0: a GPU
    cores: int = 1  # of one chip
    counts: Literal["chips", "cores"] = "chips"  # what the number in its name means
    runtime: str | None = None  # the software of a TPU VM; None: not to be had as a TPU VM


BASE = "tpu-ubuntu2204-base"
FAMILIES: dict[str, Family] = {
    "v2": Family("v2", (), None, None, (4,), 2, 2, "cores", BASE),
    "v3": Family("v3", (), "tpu-v3-slice", "ct3p-hightpu-{}t", (4,), 2, 2, "cores", BASE),
    "v4": Family("v4", (), "tpu-v4-podslice", "ct4p-hightpu-{}t", (4,), 3, 2, "cores", BASE),
    "v5e": Family(
        "v5litepod", ("v5e", "v5lite"), "tpu-v5-lite-podslice", "ct5lp-hightpu-{}t", (1, 4, 8), 2,
        runtime="v2-alpha-tpuv5-lite",
    ),
    "v5p": Family("v5p", (), "tpu-v5p-slice", "ct5p-hightpu-{}t", (4,), 3, 2, "cores", "v2-alpha-tpuv5"),
    "v6e": Family("v6e", (), "tpu-v6e-slice", "ct6e-standard-{}t", (1, 4, 8), 2, runtime="v2-alpha-tpuv6e"),
    "TPU7x": Family("tpu7x", ("7x", "v7x"), "tpu7x", "tpu7x-standard-{}t", (1, 4), 3, 2, "cores"),
    "TPU8t": Family("tpu8t", ("8t", "v8t"), None, None, (1, 4), 3),
    "TPU8i": Family("tpu8i", ("8i", "v8i"), None, None, (1, 4), 3, 2),
    "A100-40GB": Family("a100-40gb", (), "nvidia-tesla-a100", "a2-highgpu-{}g", (1, 2, 4, 8)),
    "A100": Family("a100", ("a100-80gb",), "nvidia-a100-80gb", "a2-ultragpu-{}g", (1, 2, 4, 8)),
    "H100": Family("h100", ("h100-80gb",), "nvidia-h100-80gb", "a3-highgpu-{}g", (1, 2, 4, 8)),
    "H200": Family("h200", ("h200-141gb",), "nvidia-h200-141gb", "a3-ultragpu-{}g", (8,)),
    "B200": Family("b200", (), "nvidia-b200", "a4-highgpu-{}g", (8,)),
    "GB200": Family("gb200", (), "nvidia-gb200", "a4x-highgpu-{}g", (4,)),
}  # fmt: skip
CPU = Family("cpu", (), None, None, (1,))  # a machine without accelerators: counted as one chip, itself


def usual_sides(chip: Chip, chips: int) -> tuple[int, ...] | None:
    """The topology that the clouds give to so many chips where none is named; None where there is no such slice."""
    family = FAMILIES[chip.name]
    if family.sides == 0:
        return (chips,)
    if chips < 1 or (chip.pod and chips > chip.pod):
        return None
    if family.sides == 2:
        return _flat(chips) if chips in family.hosts or (_power(chips) and chips >= 16) else None
    return _cube(chips) if chips in family.hosts or chips >= 8 else None


def _flat(chips: int) -> tuple[int, int]:
    short = 2 ** (int(math.log2(chips)) // 2)
    return short, chips // short


def _cube(chips: int) -> tuple[int, ...] | None:
    """Up to a block of 4x4x4 powers of two; from there on whole blocks, as near to a cube as they stack."""
    small = {1: (1, 1, 1), 4: (2, 2, 1), 8: (2, 2, 2), 16: (2, 2, 4), 32: (2, 4, 4)}
    if chips in small or chips % CUBE**3:
        return small.get(chips)
    blocks = chips // CUBE**3
    stacks = ((a, b, blocks // a // b) for a in _divisors(blocks) for b in _divisors(blocks // a))
    return tuple(CUBE * side for side in sorted(min(stacks, key=sum)))


def _divisors(number: int) -> Iterator[int]:
    return (one for one in range(1, number + 1) if number % one == 0)


def _power(number: int) -> bool:
    return number & (number - 1) == 0


def in_order(sides: tuple[int, ...], family: Family) -> tuple[int, ...]:
    """The shortest side first, a single layer's height last; a flat torus may be written with a third side of 1."""
    if family.sides == 2 and len(sides) == 3 and sides[2] == 1:
        sides = sides[:2]
    ordered = tuple(sorted(sides))
    return (*ordered[1:], 1) if len(ordered) == 3 and ordered[0] == 1 else ordered


def is_slice(chip: Chip, sides: tuple[int, ...]) -> bool:
    chips = math.prod(sides)
    if len(sides) != FAMILIES[chip.name].sides or (chip.pod and chips > chip.pod):
        return False
    blocks = len(sides) == 3 and chips > 0 and all(side % CUBE == 0 for side in sides)
    return blocks or sides == usual_sides(chip, chips)
