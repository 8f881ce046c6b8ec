"""Map the axes of a mesh to an accelerator's links, with the bandwidth of a device along each axis.

On TPUs the axes are laid along the sides of the torus as core.mesh does it (jax's mesh_utils: the axis that
communicates most first, whole sides before parts of them), and the data axis crosses slices first. A whole side that
closes to a ring sends in both directions; a part of a side, or a side whose ends are not joined, has half of that.
If an axis takes every k-th chip of a side, k groups share its links. GPUs are taken host by host: an axis fills what
the axes after it left of the NVLink domain, and the rest goes through the network cards.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass

from dovetail.core.accelerator import Accelerator
from dovetail.core.chips import CUBE, Chip
from dovetail.core.errors import RecipeError
from dovetail.core.mesh import assign

AXES = ("data", "fsdp", "expert", "context", "tensor")  # core.mesh.MESH_AXES, without importing jax
HOP = 1e-6  # seconds from one chip to the next, from the book "How to Scale Your Model"
NETWORK_HOP = 10e-6  # the same through a datacentre network, an order of magnitude more
# In a two-dimensional torus only a side as long as the whole pod has joined ends.
CLOSED_SIDE = {"v2": 16, "v3": 32, "v5e": 16, "v6e": 16}


@dataclass(frozen=True)
class AxisSpan:
    """Describe the links that one axis of a mesh uses."""

    axis: str
    size: int  # devices along it
    # (side of the torus, devices taken along it), nearest first; () for GPUs. The side after the torus's last one is
    # that of the devices of one chip.
    sides: tuple[tuple[int, int], ...]
    over: str  # the slowest link that it crosses: ICI or DCN (TPU), NVLink or NIC (GPU), memory (of one chip)
    bandwidth: float  # bytes/s that one device sends within its group
    far: int = 1  # groups along it that only the slow network joins: slices or NVLink domains
    far_bandwidth: float | None = None  # bytes/s of a device through that network
    longest: int = 1  # devices along the longest of its sides, which bounds an all-to-all

    @property
    def near(self) -> int:
        """Return the devices of one group."""
        return self.size // self.far

    @property
    def hops(self) -> float:
        """Return the latency from one end to the other: through neighbours, or one hop through a switch."""
        steps = sum(taken - 1 for _, taken in self.sides) if self.sides else min(self.near - 1, 1)
        return steps * HOP + (self.far - 1) * NETWORK_HOP


def layout(accelerator: Accelerator, axes: Mapping[str, int]) -> tuple[AxisSpan, ...]:
    """Return the links of each axis with more than one device, in the order of AXES.

    Raises:
        RecipeError: The mesh does not have as many devices as the accelerator, or splits another axis than data over
            slices.
    """
    sizes = tuple(axes.get(name, 1) for name in AXES)
    devices = accelerator.total_devices
    if math.prod(sizes) != devices:
        raise RecipeError(
            f"`mesh` must have the {devices} devices of {accelerator.name}, got {dict(axes)} with {math.prod(sizes)}",
            param="mesh",
        )
    return _layout(accelerator, sizes)


def wraps(accelerator: Accelerator) -> tuple[bool, ...]:
    """Return for each side of the torus whether its ends are joined."""
    if not accelerator.is_tpu or accelerator.chip is None:
        return tuple(False for _ in accelerator.sides)
    if len(accelerator.sides) == 3:  # optical switches join blocks of 4 x 4 x 4
        return (all(side % CUBE == 0 for side in accelerator.sides),) * 3
    closed = CLOSED_SIDE.get(accelerator.chip.name)
    return tuple(side == closed for side in accelerator.sides)


def link_bandwidth(accelerator: Accelerator) -> float:
    """Return the bytes per second of one link of a chip's torus, in one direction."""
    chip = accelerator.chip
    assert chip is not None and accelerator.is_tpu
    return (chip.network or 0.0) / (2 * accelerator.family.sides)


@functools.lru_cache(maxsize=8192)
def _layout(accelerator: Accelerator, sizes: tuple[int, ...]) -> tuple[AxisSpan, ...]:
    if accelerator.chip is None:
        return tuple(
            AxisSpan(axis, size, (), "memory", MEMORY_OF_A_HOST)
            for axis, size in zip(AXES, sizes, strict=True)
            if size > 1
        )
    if not accelerator.is_tpu:
        return _over_domains(accelerator, accelerator.chip, sizes)
    return _over_torus(accelerator, accelerator.chip, sizes)


MEMORY_OF_A_HOST = 4e9  # bytes/s of a copy between two CPU devices of one machine


def one_domain(chip: Chip, axes: Mapping[str, int]) -> tuple[AxisSpan, ...]:
    """Return the links with all devices behind one switch, or in one memory for a CPU.

    That is the assumption if the topology is not known.
    """
    if chip.network is None:
        return tuple(
            AxisSpan(axis, size, (), "memory", MEMORY_OF_A_HOST) for axis in AXES if (size := axes.get(axis, 1)) > 1
        )
    return tuple(_switched(chip, axis, size, size) for axis in AXES if (size := axes.get(axis, 1)) > 1)


# --- GPUs -------------------------------------------------------------------------------------------------------------


def _over_domains(accelerator: Accelerator, chip: Chip, sizes: tuple[int, ...]) -> tuple[AxisSpan, ...]:
    spans, left = [], accelerator.chips
    for axis, size in reversed(list(zip(AXES, sizes, strict=True))):
        near = math.gcd(size, left)
        left //= near
        if size > 1:
            spans.append(_switched(chip, axis, size, near))
    return tuple(reversed(spans))


def _switched(chip: Chip, axis: str, size: int, near: int) -> AxisSpan:
    far, card = size // near, chip.dcn or 0.0
    if far == 1:
        return AxisSpan(axis, size, (), "NVLink", chip.network or 0.0, longest=size)
    return AxisSpan(axis, size, (), "NIC", (chip.network or 0.0) if near > 1 else card, far, card, longest=near)


# --- TPUs -------------------------------------------------------------------------------------------------------------


def _over_torus(accelerator: Accelerator, chip: Chip, sizes: tuple[int, ...]) -> tuple[AxisSpan, ...]:
    slices = accelerator.slices
    if sizes[0] % slices:
        raise RecipeError(
            f"`mesh.data` must be a multiple of the {slices} slices, because only data crosses slices, got {sizes[0]}",
            param="mesh.data",
        )
    shape = (*accelerator.sides, chip.devices) if chip.devices > 1 else accelerator.sides
    within = (sizes[0] // slices, *sizes[1:])
    taken = assign(shape, within)
    spans = []
    for i, (axis, size) in enumerate(zip(AXES, sizes, strict=True)):
        if size > 1:
            far = slices if axis == "data" else 1
            spans.append(_torus_span(accelerator, chip, axis, size, far, taken, i))
    return tuple(spans)


def _torus_span(
    accelerator: Accelerator, chip: Chip, axis: str, size: int, far: int, taken: tuple[tuple[int, ...], ...], i: int
) -> AxisSpan:
    """Return the links of axis `i`. `taken[i][side]`: its devices along each side."""
    sides = tuple((side, count) for side, count in enumerate(taken[i]) if count > 1)
    on_chip = len(accelerator.sides)
    links = [(side, count) for side, count in sides if side < on_chip]
    here = dict(sides).get(on_chip, 1)
    sharing = chip.devices // here  # a chip's devices that are in different groups of this axis share its links
    closed, one = wraps(accelerator), link_bandwidth(accelerator)
    bandwidth = 0.0
    for side, count in links:
        inner = math.prod(later[side] for later in taken[i + 1 :])
        is_ring = closed[side] and count * inner == accelerator.sides[side]
        bandwidth += one * (2 if is_ring else 1) / inner / sharing
    over = "ICI" if links else "memory"
    dcn = (chip.dcn or 0.0) / chip.devices
    if not links:
        bandwidth = chip.bandwidth / 2 if here > 1 else dcn  # read and written
    longest = max((count for _, count in links), default=here)
    if far > 1:
        return AxisSpan(axis, size, sides, "DCN", bandwidth, far, dcn, longest)
    return AxisSpan(axis, size, sides, over, bandwidth, longest=longest)


# --- several axes at once ---------------------------------------------------------------------------------------------


def joined(spans: tuple[AxisSpan, ...]) -> AxisSpan | None:
    """Return several axes as one group of devices, as for a weight that is split over fsdp and context.

    The sides of a torus add up; a GPU has one link to its switch. Devices of one chip do not divide the chip's links
    here: together they receive what each of them needs.

    Returns:
        The links of the group; None for no axis.
    """
    if len(spans) < 2:
        return spans[0] if spans else None
    is_torus = any(span.sides or span.over == "DCN" for span in spans)
    near = [span for span in spans if span.near > 1] or list(spans)
    linked = [span for span in near if span.over != "memory"] or near
    on_chip = math.prod(span.near for span in near if span not in linked)
    bandwidth = on_chip * sum(span.bandwidth for span in linked) if is_torus else max(one.bandwidth for one in near)
    far = max(spans, key=lambda span: span.far)
    return AxisSpan(
        "+".join(span.axis for span in spans),
        math.prod(span.size for span in spans),
        tuple(side for span in reversed(spans) for side in span.sides),
        max((span.over for span in spans), key=SLOWNESS.index),
        bandwidth,
        math.prod(span.far for span in spans),
        far.far_bandwidth,
        max(span.longest for span in spans),
    )


SLOWNESS = ("memory", "NVLink", "ICI", "NIC", "DCN")  # the slowest last
