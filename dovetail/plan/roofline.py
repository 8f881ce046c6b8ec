"""How long a compiled step takes at least, from the chip's table: its products, its memory, its links.

Two bounds, both at peak rates. The lower has everything going on at once and waits for the slowest part alone. The
upper has nothing sent while something is computed. What a chip reaches of its peaks is measured, not predicted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dovetail.core.chips import Chip
from dovetail.plan.collectives import Traffic
from dovetail.plan.topology import TPUS


@dataclass(frozen=True)
class Prediction:
    """Seconds."""

    products: float
    memory: tuple[float, float]  # what is read and written at least, and at most
    links: float  # between the chips of a slice
    slices: float  # between slices

    @property
    def least(self) -> float:
        return max(self.products, self.memory[0], self.links, self.slices)

    @property
    def most(self) -> float:
        return max(self.products, self.memory[1]) + self.links + self.slices

    @property
    def bound_by(self) -> str:
        """What the lower bound waits for."""
        parts = {"products": self.products, "memory": self.memory[0], "links": self.links, "slices": self.slices}
        return max(parts, key=lambda name: parts[name])


def predict(
    chip: Chip, flops: float, moved: tuple[float, float], sent: Sequence[Traffic], devices: Sequence[Any] = ()
) -> Prediction:
    """`flops` and bytes `moved` (at least, at most) of one device; `devices` of the mesh, in its order."""
    far = sum(one.bytes for one in sent if one.crosses)
    near = sum(one.bytes / _links(chip, one, devices) for one in sent if not one.crosses and chip.network)
    across = far * chip.devices / chip.dcn if chip.dcn else 0.0
    memory = tuple(size * chip.devices / chip.bandwidth for size in moved)
    return Prediction(flops / chip.device_bf16, (memory[0], memory[1]), near, across)


def _links(chip: Chip, one: Traffic, devices: Sequence[Any]) -> float:
    """Bytes per second that a device has for it: of its chip's links, those along the torus's sides that a group spans.
    (A side without a way around has one link in place of two at its ends, which is not known here.)"""
    whole = (chip.network or 0.0) / chip.devices
    places = [getattr(devices[i], "coords", ()) for i in one.groups[0]] if devices else []
    spanned = sum(len(set(side)) > 1 for side in zip(*places, strict=True))
    return whole * min(1.0, spanned / TPUS[chip.name][1]) if spanned and chip.name in TPUS else whole
