"""Packed attention through cuDNN's flash attention.

If the maximum number of documents per row is known, cuDNN gets the start and end of each: nothing is computed between
two of them and there is no mask in memory. Each possible document costs a little (8 x 4096 tokens of 32 heads, forward
and backward on an H200: 5.5 ms for one document, 6.6 ms for up to 16, 9.2 ms for up to 64), so callers should pass it;
otherwise a mask separates documents. Images whose tokens see each other need a mask too, [B, 1, T, T] in bf16, as do
its gradients, which cuDNN always writes: 256 MiB for a row of 8,192 tokens.
"""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp

from dovetail.core.types import Packed
from dovetail.ops.packed import is_visible, same_image


def packed_attention(q, k, v, ctx: Packed, *, scale: float, window: int | None = None, softcap=None, sinks=None):
    """Attend as ops.packed.packed_attention does; cuDNN has no soft caps and sinks (see choose_packed)."""
    assert softcap is None and sinks is None
    if ctx.image_ids is not None:
        return _masked(q, k, v, ctx.segment_ids, ctx.segment_ids, ctx.image_ids, scale, window)
    if ctx.documents is not None and ctx.documents > 1:
        return _with_bounds(q, k, v, ctx.segment_ids, ctx.documents + 1, scale, window)  # padding is one more
    mask = None  # one document: the padding behind it sees it, and the padding's results are not used
    if ctx.documents is None:
        mask = (ctx.segment_ids[:, :, None] == ctx.segment_ids[:, None, :])[:, None]
    return jax.nn.dot_product_attention(
        q, k, v, mask=mask, scale=scale, is_causal=True, local_window_size=(window - 1, 0) if window else None,
        implementation="cudnn",
    ).astype(jnp.result_type(q))  # fmt: skip


def _with_bounds(q, k, v, segment_ids: jax.Array, most: int, scale: float, window: int | None) -> jax.Array:
    # jax.nn.dot_product_attention has no argument for documents yet; the function below it has
    from jax._src.cudnn.fused_attention_stablehlo import MaskType, dot_product_attention

    lengths, offsets = documents(segment_ids, most)
    out: Any = dot_product_attention(
        q, k, v, None, None, lengths, lengths, offsets, offsets, scale=scale, mask_type=MaskType.PADDING_CAUSAL,
        sliding_window_length=window,
    )  # fmt: skip
    return out.astype(q.dtype)


def documents(segment_ids: jax.Array, most: int) -> tuple[jax.Array, jax.Array]:
    """Return (lengths [B, most], offsets [B, most + 1]) of each row's runs of equal ids; -1 past the last."""
    B = segment_ids.shape[0]
    new = jnp.concatenate([jnp.ones((B, 1), bool), segment_ids[:, 1:] != segment_ids[:, :-1]], axis=1)
    rank = jnp.cumsum(new, axis=1) - 1
    lengths = jnp.zeros((B, most), jnp.int32).at[jnp.arange(B)[:, None], rank].add(1, mode="drop")
    offsets = jnp.concatenate([jnp.zeros((B, 1), jnp.int32), jnp.cumsum(lengths, axis=1)], axis=1)
    place, count = jnp.arange(most + 1), rank[:, -1:] + 1
    return jnp.where(place[:most] < count, lengths, -1), jnp.where(place < count, offsets, -1)


def gathered_attention(
    q,
    k,
    v,
    ctx: Packed,
    *,
    scale: float,
    window: int | None = None,
    softcap=None,
    sinks=None,
    key_segments,
    implementation: Literal["cudnn", "xla"] = "cudnn",
):
    """Attend as ops.packed.packed_attention does, for queries that are the last of their keys (ops.context).

    cuDNN's own causal mask assumes that queries are the first of their keys, so all of it is in the mask given.
    """
    assert softcap is None and sinks is None
    return _masked(q, k, v, ctx.segment_ids, key_segments, None, scale, window, implementation)


def _masked(q, k, v, segments, key_segments, images, scale, window, implementation: Any = "cudnn"):
    """Attend with a mask in memory, [B, 1, T, S]; the queries are the last of their keys."""
    T, S = q.shape[1], k.shape[1]
    same = segments[:, :, None] == key_segments[:, None, :]
    also = None if images is None else same_image(images, images)
    visible = same & is_visible(S - T + jnp.arange(T)[:, None], jnp.arange(S), window, also)
    return jax.nn.dot_product_attention(
        q, k, v, mask=visible[:, None], scale=scale, implementation=implementation
    ).astype(q.dtype)
