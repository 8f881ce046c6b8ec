"""Packed attention through upstream's splash kernel: sparse flash attention with segment ids, forward and backward."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

from dovetail.core.types import Packed

LANES = 128


def packed_attention(
    q, k, v, ctx: Packed, *, scale: float, window: int | None = None, softcap=None, sinks=None, interpret: bool = False
):
    """As ops.packed.packed_attention, for T a multiple of 128. Heads narrower than a TPU's lanes are padded."""
    assert sinks is None
    B, T, N, H = q.shape
    K = k.shape[2]
    pad = ((0, 0), (0, 0), (0, 0), (0, -H % LANES))
    q_BKGTH = jnp.pad(q * jnp.asarray(scale, q.dtype), pad).reshape(B, T, K, N // K, -1).transpose(0, 2, 3, 1, 4)
    k_BKTH, v_BKTH = (jnp.pad(x, pad).transpose(0, 2, 1, 3) for x in (k, v))
    kernel = splash.make_splash_mqa_single_device(
        mask=masks.MultiHeadMask([_mask(T, window)] * (N // K)),
        block_sizes=_blocks(T),
        attn_logits_soft_cap=softcap,
        interpret=interpret,
    )
    over_heads = jax.vmap(kernel, in_axes=(0, 0, 0, None))
    segments = splash.SegmentIds(ctx.segment_ids, ctx.segment_ids)
    out: jax.Array = jax.vmap(over_heads)(q_BKGTH, k_BKTH, v_BKTH, segments)  # type: ignore  # [B, K, G, T, H]
    return out[..., :H].transpose(0, 3, 1, 2, 4).reshape(B, T, N, H)


def _mask(T: int, window: int | None):
    if window is None:
        return masks.CausalMask((T, T))
    return masks.LocalMask((T, T), (window - 1, 0), offset=0)


def _blocks(T: int) -> splash.BlockSizes:
    """The largest tiles up to 512 that divide T: they fit the vector memory of every generation from v4 on."""
    b = next(size for size in (512, 384, 256, 128) if T % size == 0)
    return splash.BlockSizes(
        block_q=b, block_kv=b, block_kv_compute=b, block_q_dkv=b, block_kv_dkv=b, block_kv_dkv_compute=b,
        block_q_dq=b, block_kv_dq=b,
    )  # fmt: skip
