"""Ragged paged attention for TPUs: upstream's Pallas kernel, which takes our pages and tables unchanged.

Upstream looks up its block sizes by the device it finds, which fails when another machine lowers for a TPU: they are
given here. T tokens, N query heads, K key heads, H head dim.
"""

from __future__ import annotations

import jax
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

from dovetail.core.types import Paged
from dovetail.ops.kernels.tpu.needs import room_of, tpu_kind

KEYS = 256  # a turn of the kernel's loop looks at
QUERIES = 32
VMEM_BYTES = 32 * 2**20  # at most; a core of v4 has half of it, later ones at least twice as much


def paged_attention(
    ctx: Paged,
    q: jax.Array,  # [T, N, H]
    pages: jax.Array,  # [P, page, 2K, H]
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Attend as ops.paged.paged_attention does."""
    assert sinks is None, "choose_paged gives sinks to another"
    room = room_of(tpu_kind(None))
    pages_a_block = min(ctx.block_tables.shape[1], max(1, KEYS // pages.shape[1]))
    return ragged_paged_attention(
        q, pages, ctx.kv_lens, ctx.block_tables, ctx.cu_q_lens, ctx.num_seqs, sm_scale=scale, sliding_window=window,
        soft_cap=softcap, num_kv_pages_per_block=pages_a_block, num_queries_per_block=min(QUERIES, q.shape[0]),
        vmem_limit_bytes=min(VMEM_BYTES, room.vmem) if room else VMEM_BYTES,
    )  # fmt: skip
