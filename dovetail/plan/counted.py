"""What the compiler says of a program, for one device: its memory, its work, what it sends."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dovetail.plan.collectives import Traffic, collectives, traffic
from dovetail.plan.hlo import copies_of, kernels, read


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
