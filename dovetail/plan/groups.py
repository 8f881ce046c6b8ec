"""Who exchanges with whom in a collective, as XLA writes it: devices are numbered by their place in the mesh.

replica_groups={{0,1},{2,3}}                                  lists
replica_groups=[2,4]<=[4,2]T(1,0)                             counted up in [4,2], transposed, cut into [2,4]
replica_groups=mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b':(2)2}   along axes, or parts of them, of a mesh
source_target_pairs={{0,1},{1,0}}                             pairs
_xla_megascale_target="{1,2}x{0:3}"                           between slices 1 and 2, each device 0 to 3 with its like
"""

from __future__ import annotations

import math
import re

import numpy as np

Groups = tuple[tuple[int, ...], ...]
_PAIRS = re.compile(r"source_target_pairs=\{(\{.*?\})\}")
_LISTS = re.compile(r"replica_groups=\{(\{.*?\})\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)")
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\((.*?)\))? \{([^}]*)\}")
_COUNTED = re.compile(r"\[([\d,]+)\](?:T\(([\d,]+)\)?)?")
_SLICES = re.compile(r'_xla_megascale_target="\{([\d,:]+)\}x\{([\d,:]+)\}"')
_AXIS = re.compile(r"'([^']+)'(?:=(\d+))?(?::\((\d+)\)(\d+))?")


def groups_of(attributes: str, devices: int) -> Groups:
    """Of a collective with these attributes; where they name none, all devices are one group."""
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
    """Each group runs along the axes, of which a part `(before)size` leaves out those before and after it."""
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
    """[4,2]T(1,0): 0 to 7 in rows of 2, read by columns. Or the numbers themselves."""
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
    """1,4:6 is 1, 4, 5 and 6."""
    ends = [[int(end) for end in word.split(":")] for word in text.split(",")]
    return [number for first, *last in ends for number in range(first, (last or [first])[0] + 1)]


def _ints(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(",") if word)
