"""How many pages the KV pool gets: from what a page takes on a device and what the compiler says a step needs."""

from __future__ import annotations

import math
import os
from typing import Any

import jax

SHARE = 0.9  # of a device's memory
CPU_SHARE = 0.2  # of the memory that is free: the machine is somebody's laptop
SLACK = 512 * 2**20  # for what the allocator loses between pieces


def held_bytes(arrays: Any) -> int:
    """Bytes that a tree of arrays takes on one of the devices it lies on."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(arrays))


def device_budget(fraction: float | None) -> int:
    """Bytes of the device that the engine may use in all, or on a CPU the bytes its pages may."""
    if fraction is not None and not 0 < fraction <= 1:
        raise ValueError(f"memory_fraction is above 0 and at most 1; got {fraction!r}")
    stats = jax.local_devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return int(stats["bytes_limit"] * (fraction or SHARE))
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(free * (fraction or CPU_SHARE))


def num_pages(
    page_bytes: int,
    page_size: int,
    *,
    kv_bytes: int | None,
    fraction: float | None,
    weight_bytes: int,
    step_bytes: int,
    most: int,
) -> int:
    """Pages that fit, and no more than `most` (every sequence at its longest). All bytes are one device's."""
    if kv_bytes is None:
        kv_bytes = device_budget(fraction)
        if jax.default_backend() != "cpu":
            kv_bytes -= weight_bytes + step_bytes + SLACK
    pages = min(kv_bytes // page_bytes, most)
    if pages < 2:
        raise ValueError(
            f"no room for the KV cache: {kv_bytes / 2**30:.2f} GiB are left for it and a page of {page_size} tokens "
            f"takes {page_bytes / 2**20:.2f} MiB. Raise memory_fraction or kv_bytes, or lower max_num_batched_tokens"
        )
    return int(pages)
