"""Read a compiled program for one device: its memory, FLOPs and collectives, and bounds on its time."""

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

# --- as the compiler reports it ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Counted:
    """Hold what the compiler reports of a program on one device."""

    memory: dict[str, int]  # bytes by kind; empty if the compiler does not report them
    flops: float | None  # a loop counts once, and the inside of a kernel does not count
    bytes: float | None  # bytes read and written, counted in the same way
    traffic: tuple[Traffic, ...]
    kernels: dict[str, int]  # calls of each
    pool_copies: tuple[str, ...]  # instructions that copy a layer's pages

    @property
    def total(self) -> int:
        """Return the bytes of all kinds of memory."""
        return sum(self.memory.values())

    def plain(self) -> dict[str, Any]:
        """Return the counts for JSON, without the groups of collectives."""
        sent = [{k: v for k, v in asdict(one).items() if k != "groups"} for one in self.traffic]
        return {**asdict(self), "traffic": sent, "memory_in_all": self.total}


def count(
    compiled: Any,
    axes: Mapping[str, int],
    devices: Sequence[Any],
    pools: Iterable[tuple[int, ...]] = (),
    assigned: int | None = None,
) -> Counted:
    """Return what the compiler reports of a compiled program.

    Args:
        compiled: jax's compiled program.
        axes: The mesh's axes and their sizes, in its order.
        devices: The mesh's devices, in its order.
        pools: The shapes of the layers' KV pages on one device.
        assigned: Bytes of all buffers, if known (see `assigned`).
    """
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


# --- bounds on the time of a compiled step ---------------------------------------------------------------------------


@dataclass(frozen=True)
class RooflineBounds:
    """Hold the seconds of a step's parts at the chip's peak rates.

    In the lower bound everything overlaps, so the slowest part alone counts. In the upper bound nothing is sent while
    something is computed. The fraction of its peaks that a chip reaches is measured, not predicted here.
    """

    products: float
    memory: tuple[float, float]  # with the fewest and the most bytes read and written
    links: float  # between the chips of a slice
    slices: float  # between slices

    @property
    def least(self) -> float:
        """Return the lower bound."""
        return max(self.products, self.memory[0], self.links, self.slices)

    @property
    def most(self) -> float:
        """Return the upper bound."""
        return max(self.products, self.memory[1]) + self.links + self.slices

    @property
    def bound_by(self) -> str:
        """Return the part that the lower bound waits for."""
        parts = {"products": self.products, "memory": self.memory[0], "links": self.links, "slices": self.slices}
        return max(parts, key=lambda name: parts[name])


def predict(
    chip: Chip, flops: float, moved: tuple[float, float], sent: Sequence[Traffic], devices: Sequence[Any] = ()
) -> RooflineBounds:
    """Return the bounds of a step.

    Args:
        chip: The kind of chip.
        flops: FLOPs of one device.
        moved: Bytes that one device reads and writes (at least, at most).
        sent: The program's collectives.
        devices: The mesh's devices, in its order.
    """
    far = sum(one.bytes for one in sent if one.crosses)
    near = sum(one.bytes / _links(chip, one, devices) for one in sent if not one.crosses and chip.network)
    across = far * chip.devices / chip.dcn if chip.dcn else 0.0
    memory = tuple(size * chip.devices / chip.bandwidth for size in moved)
    return RooflineBounds(flops / chip.device_bf16, (memory[0], memory[1]), near, across)


def _links(chip: Chip, one: Traffic, devices: Sequence[Any]) -> float:
    """Return the bytes per second of a device's links along the sides of the torus that a group spans.

    A side whose ends are not joined has one link instead of two at its ends. That is not known here.
    """
    whole = (chip.network or 0.0) / chip.devices
    places = [getattr(devices[i], "coords", ()) for i in one.groups[0]] if devices else []
    spanned = sum(len(set(side)) > 1 for side in zip(*places, strict=True))
    return whole * min(1.0, spanned / TPUS[chip.name][1]) if spanned and chip.name in TPUS else whole


# --- XLA's report of assigned memory ----------------------------------------------------------------------------------
#
# `memory_analysis` is not enough on TPUs: its temporary memory counts some of what loops carry more than once
# (docs/tpu.md). libtpu decides whether a program fits by the assigned bytes, arguments included.


_IN_ALL = re.compile(r"Memory Space: default\b.*\nTotal bytes: (\d+)")


def written_to(folder: str | Path) -> dict[str, Any]:
    """Return the compiler options that write XLA's reports into `folder`."""
    return {"xla_dump_to": str(folder), "xla_dump_hlo_as_text": True}


def assigned(folder: str | Path) -> int | None:
    """Return the bytes that the compiler assigned on one device; None if the folder has no report."""
    texts = (path.read_text(errors="replace") for path in Path(folder).glob("*memory-usage-report.txt"))
    return max((int(found[1]) for text in texts if (found := _IN_ALL.search(text))), default=None)
