"""The contexts of draft models that pair a token with what was computed for an earlier one.

An entry of such a draft model's pages is made of the feature at its position and the token after it, so that a call's
tokens at positions a to b write the entries a - 1 to b - 1. The first of a sequence's tokens writes none.

T tokens, S sequences, F the width of a feature.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from dovetail.core.types import Paged
from dovetail.ops.paged import token_rows

MOST = 16  # draft tokens of one call: each is a pass of the draft model, and late ones are rarely accepted


def shifted(ctx: Paged, num_tokens: int, drop: jax.Array, by: int = 1) -> tuple[Paged, jax.Array]:
    """Return the context of the entries that a call writes, and the index of each entry's token in the call.

    Args:
        ctx: The context of the call.
        num_tokens: T.
        drop: [S], how many entries at each row's start are not written.
        by: How far an entry lies before its token. Tokens at positions below have none.

    Returns:
        The context and [T] indices; those of padding are 0.
    """
    first = ctx.kv_lens - jnp.diff(ctx.cu_q_lens)  # the position of each row's first token
    exists = jnp.arange(ctx.kv_lens.shape[0]) < ctx.num_seqs[0]
    q_lens = jnp.where(exists, jnp.diff(ctx.cu_q_lens), 0)
    skipped = jnp.minimum(jnp.maximum(by - first, drop), q_lens)
    starts = jnp.pad(jnp.cumsum(q_lens - skipped), (1, 0)).astype(ctx.cu_q_lens.dtype)
    moved = dataclasses.replace(ctx, kv_lens=jnp.maximum(ctx.kv_lens - by, 0), cu_q_lens=starts)
    seq, _, real = token_rows(moved, num_tokens)
    index = (ctx.cu_q_lens[:-1] + skipped - starts[:-1])[seq] + jnp.arange(num_tokens)
    return moved, jnp.where(real, index, 0)


def features_before(ctx: Paged, index: jax.Array, features: jax.Array, carried: jax.Array) -> jax.Array:
    """Return the features [T, F] of the tokens before those at `index`: of the call's own, or carried [S, F]."""
    seq, _, _ = token_rows(ctx, features.shape[0])
    is_first = index == ctx.cu_q_lens[seq[index]]
    before = features[jnp.maximum(index - 1, 0)]
    return jnp.where(is_first[:, None], carried[seq[index]].astype(features.dtype), before)


def of_rows(moved: Paged, values: jax.Array) -> jax.Array:
    """Return for each sequence of a shifted context of one token per row its value, of values [S, ...].

    A row without an entry gets that of another one.
    """
    return values[jnp.minimum(moved.cu_q_lens[:-1], values.shape[0] - 1)]
