"""Packed attention on TPUs: upstream's splash kernel (sparse flash attention with segment ids) and tokamax's successor.

tokamax's knows sinks, and its backward pass is one kernel. It is imported from its private module: the public call has
no name for what a checkpoint is to keep, and would run the forward pass again.

Images whose tokens see each other are in upstream's kernel as a mask that it computes, block by block, from one number
of each query: no mask is in memory, and blocks of keys that no query sees are skipped, as in a causal mask.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

from dovetail.core.types import Packed

LANES = 128


def packed_attention(
    q, k, v, ctx: Packed, *, scale: float, window: int | None = None, softcap=None, sinks=None, interpret: bool = False
):
    """Attend as ops.packed.packed_attention does, for T a multiple of 128.

    The kernel's output and denominators are named `attention`, for models.decoder.remember to keep.
    """
    assert sinks is None
    T, G = q.shape[1], q.shape[2] // k.shape[2]
    kernel = splash.make_splash_mqa_single_device(
        mask=masks.MultiHeadMask([_mask(T, window)] * G),
        block_sizes=splash.BlockSizes(**blocks(T)),
        attn_logits_soft_cap=softcap,
        residual_checkpoint_name="attention",
        interpret=interpret,
    )
    segments = splash.SegmentIds(ctx.segment_ids, ctx.segment_ids)
    if ctx.image_ids is not None:
        run, limits = _block_mask(kernel, last_seen(ctx.image_ids), window)
        return over_heads(run, q, k, v, (segments, limits), scale)
    return over_heads(kernel, q, k, v, segments, scale)


def last_seen(image_ids: jax.Array) -> jax.Array:
    """Return [B, T] the last token that each one sees: that of its image, a run of equal ids, or itself if it is text.

    It never falls along a row.
    """
    T = image_ids.shape[1]
    ends = jnp.pad(image_ids[:, 1:] != image_ids[:, :-1], ((0, 0), (0, 1)), constant_values=True) | (image_ids == 0)
    return jax.lax.cummin(jnp.where(ends, jnp.arange(T, dtype=jnp.int32), T - 1), axis=1, reverse=True)


def _block_mask(kernel: Any, last: jax.Array, window: int | None) -> tuple[Callable, jax.Array]:
    """Return a kernel that also takes limits [T] beside the segments of a row, and the limits [B, T] of all rows.

    They hold each query's place and how far ahead it sees. A block is skipped if no row has a query that sees a key of
    it: then the index of one that is seen stands for it, which is in memory already.
    """
    (B, T), size = last.shape, blocks(last.shape[1])["block_q"]
    block = jnp.arange(T // size)
    end = last.reshape(B, -1, size).max(axis=(0, 2)) // size  # of the keys' blocks that each of the queries' sees
    start = jnp.maximum(block * size - window + 1, 0) // size if window else jnp.zeros_like(block)
    seen = (start[:, None] <= block) & (block <= end[:, None])
    keys = jnp.clip(block, start[:, None], end[:, None])
    first = jnp.sum(end[:, None] < block, axis=0)  # of the queries' blocks that see each of the keys'
    queries = jnp.clip(block[:, None], first, jnp.sum(start[:, None] <= block, axis=0) - 1)
    small = jnp.int8 if len(block) <= 127 else jnp.int16  # they go to SMEM
    infos, options = kernel.tree_flatten()
    options = options | dict(mask_function=_sees(window))
    nexts = [(keys if info is not infos[-1] else queries).astype(small)[None] for info in infos]

    def run(q, k, v, given):
        segments, limits = given
        own = [
            info._replace(data_next=next, block_mask=seen.astype(small)[None], q_sequence=limits)
            for info, next in zip(infos, nexts, strict=True)
        ]
        return type(kernel)(*own, **options)(q, k, v, segments)

    place = jnp.arange(T, dtype=jnp.int32)
    return run, (place << AHEAD_BITS) | (last - place)


AHEAD_BITS = 16  # of a limit, for how far ahead a query sees; the others are for its place (see needs.IMAGE_ROW)


@functools.cache  # the same function for the same window: it is a static argument of the kernel
def _sees(window: int | None) -> Callable:
    """Return the mask of the limits of queries, and the places of keys."""

    def sees(limits: jax.Array, key: jax.Array) -> jax.Array:
        place = jax.lax.shift_right_logical(limits, jnp.full_like(limits, AHEAD_BITS))
        visible = key <= place + (limits & ((1 << AHEAD_BITS) - 1))
        return visible & (place - key < window) if window else visible

    return sees


def over_heads(kernel: Callable, q, k, v, segments: Any, scale: float, *of_heads: jax.Array) -> jax.Array:
    """Run a kernel for one row's key head, with the G query heads that share it, on all rows and heads.

    Heads that do not fill a TPU's lanes are padded. `of_heads` [N] are further arguments of each query head.
    """
    (B, T, N, _), K, V = q.shape, k.shape[2], v.shape[-1]
    q = _padded(q * jnp.asarray(scale, q.dtype)).reshape(B, T, K, N // K, -1).transpose(0, 2, 3, 1, 4)
    k, v = (_padded(x).transpose(0, 2, 1, 3) for x in (k, v))
    per_head = jax.vmap(kernel, in_axes=(0, 0, 0, None, *(0 for _ in of_heads)))
    per_row = jax.vmap(per_head, in_axes=(0, 0, 0, 0, *(None for _ in of_heads)))
    out: jax.Array = per_row(q, k, v, segments, *(x.reshape(K, N // K) for x in of_heads))  # [B, K, G, T, V]
    return out[..., :V].transpose(0, 3, 1, 2, 4).reshape(B, T, N, V)


def _padded(x: jax.Array) -> jax.Array:
    return jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, -x.shape[-1] % LANES)))


def _mask(T: int, window: int | None):
    if window is None:
        return masks.CausalMask((T, T))
    return masks.LocalMask((T, T), (window - 1, 0), offset=0)


def blocks(T: int) -> dict[str, Any]:
    """Return the largest tiles up to 512 that divide T: they fit the vector memory of every generation from v4 on."""
    size = next(size for size in (512, 384, 256, 128) if T % size == 0)
    names = "block_q block_kv block_kv_compute block_q_dkv block_kv_dkv block_kv_dkv_compute block_q_dq block_kv_dq"
    return dict.fromkeys(names.split(), size)


def gathered_attention(
    q, k, v, ctx: Packed, *, scale: float, window=None, softcap=None, sinks=None, key_segments, interpret: bool = False
):
    """Attend as ops.packed.packed_attention does, for queries that are the last of their keys (ops.context).

    T and S are multiples of 128. The kernel's output and denominators are named `attention`, for ops.context to keep.
    """
    assert sinks is None
    T, S, G = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    mask = masks.LocalMask((T, S), (window - 1 if window else None, 0), offset=S - T)
    kernel = splash.make_splash_mqa_single_device(
        mask=masks.MultiHeadMask([mask] * G),
        block_sizes=splash.BlockSizes(**blocks(T)),
        attn_logits_soft_cap=softcap,
        residual_checkpoint_name="attention",
        interpret=interpret,
    )
    return over_heads(kernel, q, k, v, splash.SegmentIds(ctx.segment_ids, key_segments), scale)


def tokamax_attention(
    q, k, v, ctx: Packed, *, scale: float, window=None, softcap=None, sinks=None, key_segments=None, interpret=False
):
    """Attend as ops.packed.packed_attention does, through tokamax, for T and S multiples of 128.

    With `key_segments` the queries are the last of their keys (ops.context). Output and denominators are named
    `attention`, for a checkpoint to keep.
    """
    from tokamax._src.ops.experimental.tpu.splash_attention import splash_attention_kernel as splash  # type: ignore
    from tokamax._src.ops.experimental.tpu.splash_attention import splash_attention_mask as masks  # type: ignore

    T, S = q.shape[1], k.shape[1]
    sizes = {name: size for name, size in blocks(T).items() if not name.endswith("_dq")}
    config = splash.SplashConfig(
        **sizes, attn_logits_soft_cap=softcap, residual_checkpoint_name="attention", interpret=interpret
    )
    if window is None and S == T:
        mask = masks.CausalMask((T, T))
    else:
        mask = masks.LocalMask((T, S), (window - 1 if window else None, 0), offset=S - T)
    kernel = splash.make_splash_mqa_single_device(mask, config=config)
    segments = splash.SegmentIds(ctx.segment_ids, ctx.segment_ids if key_segments is None else key_segments)
    return over_heads(kernel, q, k, v, segments, scale, *(() if sinks is None else (sinks,)))
