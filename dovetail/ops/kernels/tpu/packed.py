"""Packed attention on TPUs: upstream's splash kernel (sparse flash attention with segment ids) and tokamax's successor.

tokamax's knows sinks, and its backward pass is one kernel. It is imported from its private module: the public call has
no name for what a checkpoint is to keep, and would run the forward pass again.
"""

from __future__ import annotations

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
    return over_heads(kernel, q, k, v, segments, scale)


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
