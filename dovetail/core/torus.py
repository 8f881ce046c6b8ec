"""Which devices of a torus each axis of a mesh takes: the one decision that meshes are made by and plans are timed by.

It is jax's (mesh_utils): the axis that talks most first, whole sides before parts of them.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator

from dovetail.core.errors import UserError


@functools.lru_cache(maxsize=8192)
def assign(shape: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """For each axis, the devices that it takes along each side of a torus of `shape`: as jax's mesh_utils decides."""
    whole = _assign_whole(shape, sizes)
    if whole is not None:
        return whole
    taken = [(1,) * len(shape)] * len(sizes)
    for i in reversed(range(len(sizes))):
        before = tuple(math.prod(later[side] for later in taken[i + 1 :]) for side in range(len(shape)))
        free = tuple(side // used for side, used in zip(shape, before, strict=True))
        ways = list(_ways(free, sizes[i]))
        if not ways:
            raise UserError(f"a mesh of {' x '.join(map(str, sizes))} cannot be laid along sides {shape}")
        taken[i] = max(ways, key=functools.partial(_preference, shape, before))
    return tuple(taken)


def _assign_whole(shape: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[tuple[int, ...], ...] | None:
    """Without cutting a side: the axis that talks most first, over as many sides as multiply to it."""
    free, taken = set(range(len(shape))), [(1,) * len(shape)] * len(sizes)
    for i in reversed(range(len(sizes))):
        found = next(
            (
                chosen
                for many in range(len(free), 0, -1)
                for chosen in itertools.combinations(sorted(free), many)
                if math.prod(shape[side] for side in chosen) == sizes[i]
            ),
            None,
        )
        if found is None and sizes[i] > 1:
            return None
        free -= set(found or ())
        taken[i] = tuple(shape[side] if side in (found or ()) else 1 for side in range(len(shape)))
    return tuple(taken)


def _ways(free: tuple[int, ...], size: int) -> Iterator[tuple[int, ...]]:
    """All parts of the free sides that multiply to `size`."""
    if not free:
        if size == 1:
            yield ()
        return
    for part in range(1, free[0] + 1):
        if free[0] % part == 0 and size % part == 0:
            for rest in _ways(free[1:], size // part):
                yield (part, *rest)


def _preference(shape: tuple[int, ...], before: tuple[int, ...], way: tuple[int, ...]) -> tuple:
    """jax's order: the most of whole sides, the more of them, sides that are cut already, the first sides."""
    whole = [part for part, side in zip(way, shape, strict=True) if part == side]
    cut = math.prod(part for part, used in zip(way, before, strict=True) if used > 1)
    return math.prod(whole), sum(part > 1 for part in whole), cut, way
