"""What a page of plans shows: the machine, and of each plan its mesh, its memory, its products and its exchanges.

Plans of training and of serving both fill a `Page`; nothing below it knows which it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dovetail.core.accelerator import Accelerator
from dovetail.core.chips import Chip
from dovetail.core.errors import UserError
from dovetail.plan.operations import Operation
from dovetail.plan.steptime import StepTime


@dataclass(frozen=True)
class Share:
    """Of which each device has a part: `total` of it, cut along the mesh's `axes`, the first one outermost."""

    what: str
    total: int
    axes: tuple[str, ...]


@dataclass(frozen=True)
class Choice:
    """One plan."""

    title: str
    axes: Mapping[str, int]  # mesh axis -> devices along it; their product is the number of devices
    memory: Mapping[str, int]  # bytes of one device, by kind
    limit: int | None  # bytes that a plan may fill on a device; None: not known
    operations: tuple[Operation, ...]  # of one step on one device
    time: StepTime
    layers: int
    microsteps: int = 1
    shares: tuple[Share, ...] = ()
    figures: tuple[tuple[str, str, str], ...] = ()  # (name, value, what kind of number that is), with units
    recipe: str = ""  # lines to paste


@dataclass(frozen=True)
class Curve:
    """Points of a trade-off, such as latency against throughput: each names what it was reached with."""

    title: str
    across: str  # what x is, with its unit
    up: str
    points: tuple[tuple[float, float, str], ...]
    reading: str  # one sentence on how to read it


@dataclass(frozen=True)
class Page:
    title: str
    about: str
    accelerator: Accelerator
    choices: tuple[Choice, ...]  # the best first
    step: str = "training step"  # what the timeline shows one of
    curves: tuple[Curve, ...] = ()
    chip: Chip | None = None  # whose rates the roofline has, where the accelerator is none: a CPU
    peak: float | None = None  # FLOP/s of a device in the products' dtype; bf16 otherwise

    def __post_init__(self) -> None:
        if not self.choices:
            raise UserError("a page shows at least one plan; got none")
