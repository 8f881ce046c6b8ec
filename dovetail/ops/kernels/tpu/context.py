"""Packed attention for queries that are the last of their keys (ops.context), through upstream's splash kernel."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

from dovetail.core.types import Packed
from dovetail.ops.kernels.tpu.packed import LANES, _blocks


def packed_attention(
    q, k, v, ctx: Packed, *, scale: float, window=None, softcap=None, sinks=None, key_segments, interpret: bool = False
):
    """As ops.packed.packed_attention, for T and S multiples of 128. The kernel's output and denominators are named
    `attention`, for ops.context to keep."""
    assert sinks is None
    B, T, N, H = q.shape
    S, K = k.shape[1:3]
    pad = ((0, 0), (0, 0), (0, 0), (0, -H % LANES))
    q_BKGTH = jnp.pad(q * jnp.asarray(scale, q.dtype), pad).reshape(B, T, K, N // K, -1).transpose(0, 2, 3, 1, 4)
    k_BKSH, v_BKSH = (jnp.pad(x, pad).transpose(0, 2, 1, 3) for x in (k, v))
    mask = masks.LocalMask((T, S), (window - 1 if window else None, 0), offset=S - T)
    kernel = splash.make_splash_mqa_single_device(
        mask=masks.MultiHeadMask([mask] * (N // K)),
        block_sizes=_blocks(T),
        attn_logits_soft_cap=softcap,
        residual_checkpoint_name="attention",
        interpret=interpret,
    )
    over_heads = jax.vmap(kernel, in_axes=(0, 0, 0, None))
    segments = splash.SegmentIds(ctx.segment_ids, key_segments)
    out: jax.Array = jax.vmap(over_heads)(q_BKGTH, k_BKSH, v_BKSH, segments)  # type: ignore  # [B, K, G, T, H]
    return out[..., :H].transpose(0, 3, 1, 2, 4).reshape(B, T, N, H)
