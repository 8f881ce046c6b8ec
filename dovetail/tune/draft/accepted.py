"""Simulate speculative decoding on rows whose tokens the target has generated.

B rows, T tokens, N draft tokens.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from dovetail.core.types import Batch


def answer_tokens(batch: Batch) -> jax.Array:
    """Return [B, T] whether a token is one of an answer and has a next one that is too: drafts may start there."""
    in_answer = batch.loss_mask > 0
    before = jnp.pad(in_answer[:, :-1], ((0, 0), (1, 0)))
    same = jnp.pad(batch.segment_ids[:, :-1], ((0, 0), (1, 0))) == batch.segment_ids
    return in_answer & before & same  # an answer's first token comes from the prompt's step


def decode(starts: jax.Array, accepted: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return (tokens that verify steps give, number of steps) of decoding every answer from its start to its end.

    Args:
        starts: [B, T] bool, from `answer_tokens`.
        accepted: [B, T], the accepted draft tokens of a step whose newest token is this one.
    """

    def token(left: jax.Array, column: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        start, gained = column
        steps = start & (left == 0)  # `left` tokens are known from the last step
        left = jnp.where(start, jnp.where(steps, gained, left - 1), 0)
        return left, steps

    columns = starts.T, accepted.T.astype(jnp.int32)
    _, steps = jax.lax.scan(token, jnp.zeros(starts.shape[0], jnp.int32), columns)
    return starts.sum().astype(jnp.float32), steps.sum().astype(jnp.float32)
