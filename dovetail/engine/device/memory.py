"""How many pages the KV pool gets: from what is free on the devices now, and what a page and a step take there.

Free now, not the size of the card: a trainer in the same process, or another engine, may hold the rest.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax

from dovetail.core.errors import UserError
from dovetail.core.host import available_memory
from dovetail.engine.options import platform_default

SLACK = 512 * 2**20  # for what the allocator loses between pieces


def held_bytes(arrays: Any) -> int:
    """Bytes that a tree of arrays, or of their forms, takes on one of the devices it lies on."""

    def local(x: Any) -> tuple[int, ...]:
        return x.sharding.shard_shape(x.shape) if x.sharding else x.shape

    return sum(math.prod(local(x)) * x.dtype.itemsize for x in jax.tree.leaves(arrays))


def pool_bytes(fraction: float | None, weight_bytes: int, step_bytes: int, devices: Sequence[Any] = ()) -> int:
    """Bytes of each device (jax's first, unless given) that the pool may take, beside the engine's weights, which are
    there already, and the largest step. The engine may use `fraction` of the device in all, but no more than is free.

    On a CPU the pool may take `fraction` of the memory that is available, page cache included, within the limit of a
    container; steps take the rest."""
    share_of = functools.partial(platform_default, "gpu_memory_utilization")
    stats = [device.memory_stats() for device in devices or jax.local_devices()[:1]]
    if not all(each and "bytes_limit" in each for each in stats):
        return int((available_memory() or 0) * (fraction or share_of("cpu")))
    limit = min(each["bytes_limit"] for each in stats)
    free = min(each["bytes_limit"] - each.get("bytes_in_use", 0) for each in stats)
    share = int(limit * (fraction or share_of(""))) - weight_bytes
    return min(share, free) - step_bytes - SLACK


def num_pages(kv_bytes: int, page_bytes: int, page_size: int, most: int) -> int:
    """Pages that fit into these bytes, and no more than `most` (every sequence at its longest)."""
    pages = min(kv_bytes // page_bytes, most)
    if pages < 2:
        raise UserError(
            f"no room for the KV cache: {kv_bytes / 2**30:.2f} GiB are left for it and a page of {page_size} tokens "
            f"takes {page_bytes / 2**20:.2f} MiB. Raise gpu_memory_utilization or "
            "kv_cache_memory_bytes, lower max_num_batched_tokens, or free what else holds the device's memory"
        )
    return int(pages)


def bytes_beside(
    room: int, page_bytes: int, layer_bytes: int, most: int, step_bytes: Callable[[int], int]
) -> tuple[int, int]:
    """(bytes of the largest step, those it takes more with every page). `step_bytes(pages)` compiles it for a pool.

    It is measured with half the pool that would fit. A step that copies pages, of one layer (`layer_bytes` a page) at
    least, then needs as much as they take; where it does and that matters, a second pool tells how it grows.
    """
    pages = max(1, round_pages(min(room // page_bytes, most) // 2))
    measured = step_bytes(pages)
    fits_anyway = most * page_bytes + 2 * measured <= room
    if pages == 1 or fits_anyway or measured < pages * layer_bytes:
        return measured, 0
    copied = max(0, measured - step_bytes(pages // 2)) // (pages - pages // 2)
    return measured - copied * pages, copied


def round_pages(pages: int) -> int:
    """Round down, by 1.5% at most: steps are compiled for this number, and what is free differs from start to start."""
    step = 1 << max(0, pages.bit_length() - 7)
    return pages // step * step


def coarse_pages(pages: int) -> list[int]:
    """Return the page counts to choose from on a CPU, where what is free differs much from start to start: `pages`
    rounded down to a power of two or one and a half times that, then the counts next to it, which an earlier start may
    have compiled for."""
    steps = [size for power in range(pages.bit_length() + 1) for size in (2 << power, 3 << power)]
    own = max(i for i, size in enumerate(steps) if size <= max(2, pages))
    return [steps[own], steps[own + 1], *steps[max(0, own - 1) : own]]
