"""Read from the text of a compiled program what it sends between devices: by kind, mesh axis and bytes.

XLA writes the groups of a collective in one of these ways; devices are numbered by their place in the mesh:

    replica_groups={{0,1},{2,3}}                  lists
    replica_groups=[2,4]<=[4,2]T(1,0)             0 to 7 in rows of [4,2], transposed, then cut into [2,4]
    replica_groups=mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b':(2)2}   along axes of a mesh, or parts of them
    source_target_pairs={{0,1},{1,0}}             pairs
    _xla_megascale_target="{1,2}x{0:3}"           slices 1 and 2; devices 0 to 3 of each with the same number
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dovetail.plan.hlo import Instruction, Module, size_of

KINDS = (
    "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute",
    "collective-broadcast",
)  # fmt: skip
Groups = tuple[tuple[int, ...], ...]
_BETWEEN_SLICES = re.compile(r'_xla_megascale_transfer_type="(\w+)"')


@dataclass(frozen=True)
class Collective:
    """Hold one collective instruction."""

    kind: str
    bytes: float  # bytes that a device sends each time
    times: int
    groups: Groups  # groups of devices that exchange data


@dataclass(frozen=True)
class Traffic:
    """Hold the sum of all collectives of one kind over the same axes."""

    kind: str
    axes: tuple[str, ...]  # the axes that the groups run along
    crosses: bool  # whether it crosses slices
    groups: Groups
    count: int
    bytes: float  # bytes that a device sends in a call of the program


def collectives(module: Module, devices: int) -> list[Collective]:
    """Return the collectives of the computations that usually run (Module.usually)."""
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
    """Return the kind of a collective. Between slices a TPU sends to its host, with the kind as an attribute."""
    far = _BETWEEN_SLICES.search(one.rest) if one.opcode == "send" else None
    return far[1].lower().replace("_", "-") if far else one.opcode.removesuffix("-start")


def _began_elsewhere(module: Module, computation: str) -> bool:
    """Return whether the computation repeats a collective that began in another one.

    The TPU compiler writes an asynchronous collective again in the computation that overlaps with it, and again where
    it ends.
    """
    root = module.root(computation)
    is_end = root is not None and '"AsyncCollectiveDone"' in root.rest
    return is_end or computation.startswith("async_collective_fusion")


def traffic(found: Sequence[Collective], axes: Mapping[str, int], slices: Sequence[int] = ()) -> list[Traffic]:
    """Return the sums by kind and axes, the most bytes first.

    Args:
        found: The collectives of a program.
        axes: The mesh's axes and their sizes, in its order.
        slices: The slice of each of the mesh's devices.
    """
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
    """Return the mesh axes along which the devices of a group differ."""
    sizes, varying = tuple(axes.values()), np.zeros(len(axes), bool)
    for group in groups:
        places = np.asarray(np.unravel_index(np.asarray(group), sizes))
        varying |= (places != places[:, :1]).any(axis=1)
    return tuple(name for name, differs in zip(axes, varying, strict=True) if differs)


def crosses_slices(groups: Groups, slices: Sequence[int]) -> bool:
    """Return whether a group has devices of several slices."""
    return bool(slices) and any(len({slices[device] for device in group}) > 1 for group in groups)


def _sent(computation: str, kind: str, one: Instruction, n: int) -> float:
    """Return the bytes that each of n devices sends around a ring. A `-start` returns its operand with its result."""
    size, is_start = one.bytes, one.opcode.endswith("-start")
    if one.opcode == "send":
        size = size_of(one.shapes[0])  # the other shapes are control data of the hosts
    if kind == "collective-permute":
        return size / 2 if is_start else size
    if kind == "reduce-scatter":
        return size * (n - 1)
    if kind == "all-gather":
        whole = size * n / (n + 1) if is_start else size
        return whole * (n - 1) / n
    # the TPU compiler writes some reduce-scatters as an all-reduce in a computation of this name
    twice = 2 if kind == "all-reduce" and not computation.startswith("all-reduce-scatter") else 1
    return twice * size * (n - 1) / n


# --- groups (their syntax is in the module's docstring) --------------------------------------------------------------

_PAIRS = re.compile(r"source_target_pairs=\{(\{.*?\})\}")
_LISTS = re.compile(r"replica_groups=\{(\{.*?\})\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)")
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\((.*?)\))? \{([^}]*)\}")
_COUNTED = re.compile(r"\[([\d,]+)\](?:T\(([\d,]+)\)?)?")
_SLICES = re.compile(r'_xla_megascale_target="\{([\d,:]+)\}x\{([\d,:]+)\}"')
_AXIS = re.compile(r"'([^']+)'(?:=(\d+))?(?::\((\d+)\)(\d+))?")


def groups_of(attributes: str, devices: int) -> Groups:
    """Return the groups of a collective with these attributes; if they name none, all devices are one group."""
    if pairs := _PAIRS.search(attributes):
        return tuple(pair for pair in _lists(pairs[1]) if pair[0] != pair[1])
    if lists := _LISTS.search(attributes):
        return _lists(lists[1])
    if iota := _IOTA.search(attributes):
        return _rows(_counted(iota[2]).reshape(_ints(iota[1])))
    if mesh := _MESH.search(attributes):
        return _along(mesh[1], mesh[2], mesh[3])
    if slices := _SLICES.search(attributes):
        numbers, own = _spans(slices[1]), _spans(slices[2])
        return tuple(tuple((number - 1) * len(own) + device for number in numbers) for device in own)
    return (tuple(range(devices)),)


def _along(mesh: str, order: str | None, axes: str) -> Groups:
    """Return groups along the axes of a mesh. `(before)size` is the part of an axis with `before` devices before it."""
    sizes = {name: int(size) for name, size, _, _ in _AXIS.findall(mesh)}
    ids = _counted(order) if order else np.arange(math.prod(sizes.values()))
    used = {name: (int(before or 1), int(size or sizes[name])) for name, _, before, size in _AXIS.findall(axes)}
    dims, along = [], {}
    for name, size in sizes.items():
        before, part = used.get(name, (1, 1))
        along[name] = len(dims) + 1
        dims += [before, part, size // before // part]
    last = [along[name] for name in used]
    rest = [dim for dim in range(len(dims)) if dim not in last]
    width = math.prod(dims[dim] for dim in last)
    return _rows(ids.reshape(dims).transpose(rest + last).reshape(-1, width))


def _counted(text: str) -> np.ndarray:
    """Return the devices of an order such as `[4,2]T(1,0)` (0 to 7 in rows of 2, read by columns) or of a list."""
    found = _COUNTED.search(text)
    if found is None:
        return np.asarray(_ints(text))
    numbers = np.arange(math.prod(_ints(found[1]))).reshape(_ints(found[1]))
    return (numbers.transpose(_ints(found[2])) if found[2] else numbers).reshape(-1)


def _rows(array: np.ndarray) -> Groups:
    return tuple(map(tuple, array.tolist()))


def _lists(text: str) -> Groups:
    return tuple(_ints(part) for part in re.findall(r"\{([\d,]*)\}", text))


def _spans(text: str) -> list[int]:
    """Return the numbers of a list with spans: `1,4:6` is 1, 4, 5 and 6."""
    ends = [[int(end) for end in word.split(":")] for word in text.split(",")]
    return [number for first, *last in ends for number in range(first, (last or [first])[0] + 1)]


def _ints(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(",") if word)
