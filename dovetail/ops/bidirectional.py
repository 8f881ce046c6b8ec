"""Bidirectional attention of vision towers: every patch of an item, or of a window of it, sees every other.

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


def window_attention(
    q: jax.Array,  # [N, P, K, H]
    k: jax.Array,  # [N, P, K, H]
    v: jax.Array,  # [N, P, K, H]
    *,
    scale: float,
    windows: jax.Array,  # [N, P] int32: the window of each patch; the patches of a window follow each other
    most: int,
) -> jax.Array:
    """Return [N, P, K, H]: patches attend to those of their window, which has `most` patches or fewer.

    Patches are cut into blocks of `most`: those of a window are in one block or in two neighbours, so that a block
    attends to itself, the block before and the block after.
    """
    N, P, *heads = q.shape
    blocks = -(-P // most)

    def cut(x: jax.Array, fill: int = 0) -> jax.Array:
        padded = jnp.pad(x, ((0, 0), (0, blocks * most - P), *((0, 0),) * (x.ndim - 2)), constant_values=fill)
        return padded.reshape(N, blocks, most, *x.shape[2:])

    def near(x: jax.Array, fill: int = 0) -> jax.Array:
        ends = jnp.pad(x, ((0, 0), (1, 1), *((0, 0),) * (x.ndim - 2)), constant_values=fill)
        wide = jnp.concatenate([ends[:, :-2], x, ends[:, 2:]], axis=2)
        return wide.reshape(N * blocks, 3 * most, *x.shape[3:])

    ids = cut(windows, fill=-1)
    segments = ids.reshape(N * blocks, most), near(ids, fill=-2)
    every = jnp.full(most, 3 * most), jnp.arange(3 * most)  # all keys are at or before a query
    rows = cut(q).reshape(N * blocks, most, *heads)
    options: dict = dict(scale=scale, window=None, softcap=None)
    out, _ = attend_block(rows, near(cut(k)), near(cut(v)), segments, every, **options)
    return out.astype(v.dtype).reshape(N, blocks * most, *heads)[:, :P]
