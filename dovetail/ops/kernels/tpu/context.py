"""Packed attention for queries that are the last of their keys (ops.context), through upstream's splash kernel."""

from __future__ import annotations

from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

from dovetail.core.types import Packed
from dovetail.ops.kernels.tpu.packed import blocks, over_heads


def packed_attention(
    q, k, v, ctx: Packed, *, scale: float, window=None, softcap=None, sinks=None, key_segments, interpret: bool = False
):
    """As ops.packed.packed_attention, for T and S multiples of 128. The kernel's output and denominators are named
    `attention`, for ops.context to keep."""
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
