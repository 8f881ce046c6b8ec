"""TODO."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dovetail.core.chips import Chip
from dovetail.plan.collectives import Traffic, collectives, traffic
from dovetail.plan.hlo import copies_of, kernels, read
from dovetail.plan.topology import TPUS

# What the compiler says of a program, for one device: its memory, its work, what it sends.


@dataclass(frozen=True)
class Counted:
    memory: dict[str, int]  # by kind; empty where the compiler does not say
    flops: float | None  # a loop once, and nothing inside of a kernel
    bytes: float | None  # read and written, likewise
    traffic: tuple[Traffic, ...]
    kernels: dict[str, int]  # calls of each
    pool_copies: tuple[str, ...]  # instructions that copy a layer's pages

    @property
    def total(self) -> int:
        return sum(self.memory.values())

    def plain(self) -> dict[str, Any]:
        """For JSON: without who is in which group."""
        sent = [{k: v for k, v in asdict(one).items() if k != "groups"} for one in self.traffic]
        return {**asdict(self), "traffic": sent, "memory_in_all": self.total}


def count(
    compiled: Any,
    axes: Mapping[str, int],
    devices: Sequence[Any],
    pools: Iterable[tuple[int, ...]] = (),
    assigned: int | None = None,
) -> Counted:
    """`axes` and `devices` of the mesh, in its order; `pools`: the shapes of the layers' pages on one device;
    `assigned`: bytes of all buffers, where that is known."""
    module, work = read(compiled.as_text() or ""), compiled.cost_analysis() or {}
    slices = [getattr(device, "slice_index", 0) for device in devices]
    return Counted(
        memory=_memory(compiled.memory_analysis(), assigned),
        flops=_known(work.get("flops")),
        bytes=_known(work.get("bytes accessed")),
        traffic=tuple(traffic(collectives(module, len(devices)), axes, slices)),
        kernels=kernels(module),
        pool_copies=tuple(line for dims in pools for line in copies_of(module, dims)),
    )


def _memory(found: Any, assigned: int | None) -> dict[str, int]:
    if found is None:
        return {}
    arguments, outputs = found.argument_size_in_bytes, found.output_size_in_bytes - found.alias_size_in_bytes
    return {
        "arguments": arguments,
        "temporary": found.temp_size_in_bytes if assigned is None else assigned - arguments - outputs,
        "outputs not in their place": outputs,
        "generated code": found.generated_code_size_in_bytes,
    }


def _known(value: float | None) -> float | None:
    return None if value is None or value < 0 else value


# How long a compiled step takes at least, from the chip's table: its products, its memory, its links.
#
# Two bounds, both at peak rates. The lower has everything going on at once and waits for the slowest part alone. The
# upper has nothing sent while something is computed. What a chip reaches of its peaks is measured, not predicted.


@dataclass(frozen=True)
class RooflineBounds:
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
) -> RooflineBounds:
    """`flops` and bytes `moved` (at least, at most) of one device; `devices` of the mesh, in its order."""
    far = sum(one.bytes for one in sent if one.crosses)
    near = sum(one.bytes / _links(chip, one, devices) for one in sent if not one.crosses and chip.network)
    across = far * chip.devices / chip.dcn if chip.dcn else 0.0
    memory = tuple(size * chip.devices / chip.bandwidth for size in moved)
    return RooflineBounds(flops / chip.device_bf16, (memory[0], memory[1]), near, across)


def _links(chip: Chip, one: Traffic, devices: Sequence[Any]) -> float:
    """Bytes per second that a device has for it: of its chip's links, those along the torus's sides that a group spans.
    (A side without a way around has one link in place of two at its ends, which is not known here.)"""
    whole = (chip.network or 0.0) / chip.devices
    places = [getattr(devices[i], "coords", ()) for i in one.groups[0]] if devices else []
    spanned = sum(len(set(side)) > 1 for side in zip(*places, strict=True))
    return whole * min(1.0, spanned / TPUS[chip.name][1]) if spanned and chip.name in TPUS else whole


# The memory that a compiler assigned to a program's buffers, from the report that XLA writes when it is asked to.
#
# `memory_analysis` does not say it for TPUs: the temporary memory that it gives has some of what loops carry more than
# once (docs/tpu.md). libtpu refuses a program by what it assigned, arguments among it.


_IN_ALL = re.compile(r"Memory Space: default\b.*\nTotal bytes: (\d+)")


def written_to(folder: str | Path) -> dict[str, Any]:
    """Options for the compiler."""
    return {"xla_dump_to": str(folder), "xla_dump_hlo_as_text": True}


def assigned(folder: str | Path) -> int | None:
    """Bytes of a device's memory; None where no compiler has written of them."""
    texts = (path.read_text(errors="replace") for path in Path(folder).glob("*memory-usage-report.txt"))
    return max((int(found[1]) for text in texts if (found := _IN_ALL.search(text))), default=None)
