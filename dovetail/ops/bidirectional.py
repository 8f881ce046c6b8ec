"""Bidirectional attention of vision towers: every patch of an item sees every other.

N items, P patches of an item, K heads, H head dim.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from dovetail.ops.dispatch import choose_bidirectional, log_once
from dovetail.ops.packed import attend_block


def bidirectional_attention(
    q: jax.Array,  # [N, P, K, H]
    k: jax.Array,  # [N, P, K, H]
    v: jax.Array,  # [N, P, K, H]
    *,
    scale: float,
    lengths: jax.Array | None = None,  # [N] int32: the patches of each item; padding follows them
    platform: str | None = None,
) -> jax.Array:
    """Return [N, P, K, H]; the rows of padding are undefined."""
    name = choose_bidirectional(platform, q)
    log_once("bidirectional attention", name)
    if name == "cudnn":
        out = jax.nn.dot_product_attention(
            q, k, v, scale=scale, query_seq_lengths=lengths, key_value_seq_lengths=lengths, implementation="cudnn"
        )
        return out.astype(q.dtype)
    return reference(q, k, v, scale=scale, lengths=lengths)


def reference(q: jax.Array, k: jax.Array, v: jax.Array, *, scale: float, lengths: jax.Array | None) -> jax.Array:
    """Attend exactly, some queries at a time, so that scores are never [P, P]."""
    N, P = q.shape[:2]
    patch = jnp.arange(P)
    real = jnp.ones((N, P), bool) if lengths is None else patch < lengths[:, None]
    chunk = max(256, -(-P // 16))
    one = jax.checkpoint(functools.partial(attend_block, scale=scale, window=None, softcap=None))
    outputs = []
    for start in range(0, P, chunk):
        rows = q[:, start : start + chunk]
        last, every = jnp.full(rows.shape[1], P - 1), jnp.ones(rows.shape[:2], bool)
        outputs.append(one(rows, k, v, (every, real), (last, patch))[0].astype(v.dtype))
    return jnp.concatenate(outputs, axis=1) if len(outputs) > 1 else outputs[0]
