"""What a compiled program sends between devices, read from its text: by kind, mesh axis and bytes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dovetail.plan.groups import Groups, groups_of
from dovetail.plan.hlo import Instruction, Module, size_of

KINDS = (
    "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute",
    "collective-broadcast",
)  # fmt: skip
_BETWEEN_SLICES = re.compile(r'_xla_megascale_transfer_type="(\w+)"')


@dataclass(frozen=True)
class Collective:
    """One instruction."""

    kind: str
    bytes: float  # that a device sends each time
    times: int
    groups: Groups  # those who exchange something


@dataclass(frozen=True)
class Traffic:
    """All of one kind over the same axes."""

    kind: str
    axes: tuple[str, ...]  # that the groups run along
    crosses: bool  # from one slice to another
    groups: Groups
    count: int
    bytes: float  # that a device sends in a call of the program


def collectives(module: Module, devices: int) -> list[Collective]:
    """Of what usually runs (Module.usually)."""
    found = []
    for computation, one, times in module.instructions(module.usually):
        kind = _kind(one)
        if kind not in KINDS or _began_elsewhere(module, computation):
            continue
        groups = groups_of(one.rest, devices)
        if any(len(group) > 1 for group in groups):
            found.append(Collective(kind, _sent(computation, kind, one, len(groups[0])), times, groups))
    return found


def _kind(one: Instruction) -> str:
    """Between slices a TPU hands over to its host, which says of what this is a part."""
    far = _BETWEEN_SLICES.search(one.rest) if one.opcode == "send" else None
    return far[1].lower().replace("_", "-") if far else one.opcode.removesuffix("-start")


def _began_elsewhere(module: Module, computation: str) -> bool:
    """A TPU computes while a collective is under way, which is written again there, and again where it ends."""
    root = module.root(computation)
    is_end = root is not None and '"AsyncCollectiveDone"' in root.rest
    return is_end or computation.startswith("async_collective_fusion")


def traffic(found: Sequence[Collective], axes: Mapping[str, int], slices: Sequence[int] = ()) -> list[Traffic]:
    """Summed up, what sends most first. `axes`: the mesh's, in its order; `slices`: that of each of its devices."""
    ways = {groups: (axes_of(groups, axes), crosses_slices(groups, slices)) for groups in {x.groups for x in found}}
    merged: dict[tuple, list[Collective]] = {}
    for one in found:
        merged.setdefault((one.kind, ways[one.groups]), []).append(one)
    summed = []
    for (kind, (along, crosses)), ones in merged.items():
        count, sent = sum(x.times for x in ones), sum(x.times * x.bytes for x in ones)
        summed.append(Traffic(kind, along, crosses, ones[0].groups, count, sent))
    return sorted(summed, key=lambda one: -one.bytes)


def axes_of(groups: Groups, axes: Mapping[str, int]) -> tuple[str, ...]:
    """The mesh axes along which the devices of a group differ."""
    sizes, varying = tuple(axes.values()), np.zeros(len(axes), bool)
    for group in groups:
        places = np.asarray(np.unravel_index(np.asarray(group), sizes))
        varying |= (places != places[:, :1]).any(axis=1)
    return tuple(name for name, differs in zip(axes, varying, strict=True) if differs)


def crosses_slices(groups: Groups, slices: Sequence[int]) -> bool:
    return bool(slices) and any(len({slices[device] for device in group}) > 1 for group in groups)


def _sent(computation: str, kind: str, one: Instruction, n: int) -> float:
    """Bytes that each of n devices sends around a ring. The result of a start holds its operand too."""
    size, is_start = one.bytes, one.opcode.endswith("-start")
    if one.opcode == "send":
        size = size_of(one.shapes[0])  # beside it, what the hosts agree on
    if kind == "collective-permute":
        return size / 2 if is_start else size
    if kind == "reduce-scatter":
        return size * (n - 1)
    if kind == "all-gather":
        whole = size * n / (n + 1) if is_start else size
        return whole * (n - 1) / n
    # an all-reduce of which a TPU keeps a part each is a reduce-scatter, written as a computation of that name
    twice = 2 if kind == "all-reduce" and not computation.startswith("all-reduce-scatter") else 1
    return twice * size * (n - 1) / n
