"""How many pages the KV pool gets: from what the spec says a token costs and what the compiler says a step needs."""

from __future__ import annotations

import os

import jax

from dovetail.models.config import ModelConfig
from dovetail.models.spec import kv_bytes_per_token

CPU_SHARE = 0.2  # of the memory that is free: the machine is somebody's laptop
SLACK = 512 * 2**20  # for what the allocator loses between pieces


def device_budget(fraction: float) -> int:
    """Bytes of the device that the engine may use in all, or on a CPU the bytes its pages may."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return int(stats["bytes_limit"] * fraction)
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(free * CPU_SHARE)


def num_pages(
    cfg: ModelConfig,
    page_size: int,
    itemsize: int,
    *,
    kv_bytes: int | None,
    fraction: float,
    weight_bytes: int,
    step_bytes: int,
    most: int,
) -> int:
    """Pages that fit, and no more than `most` (every sequence at its longest)."""
    page_bytes = kv_bytes_per_token(cfg, itemsize) * page_size
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
