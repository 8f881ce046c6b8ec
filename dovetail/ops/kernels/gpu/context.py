"""Packed attention for queries that are the last of their keys (ops.context), through cuDNN's flash attention."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

from dovetail.core.types import Packed
from dovetail.ops.softmax import is_visible


def packed_attention(
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
    """As ops.packed.packed_attention. cuDNN's own causal mask takes the queries to be the first of their keys, so
    all of it is in the mask given."""
    assert softcap is None and sinks is None
    T, S = q.shape[1], k.shape[1]
    same = ctx.segment_ids[:, :, None] == key_segments[:, None, :]
    visible = same & is_visible(S - T + jnp.arange(T)[:, None], jnp.arange(S), window)
    return jax.nn.dot_product_attention(
        q, k, v, mask=visible[:, None], scale=scale, implementation=implementation
    ).astype(q.dtype)
