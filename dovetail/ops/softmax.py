"""The pieces of a softmax taken block by block: what both attention references are made of."""

from __future__ import annotations

import jax
import jax.numpy as jnp

MASKED = -1e30  # not -inf: a row with nothing to see must give 0, never NaN


def cap_and_mask(scores: jax.Array, visible: jax.Array, softcap: float | None) -> jax.Array:
    """Soft-capped f32 scores with what may not be seen pushed out; `visible` broadcasts against them."""
    if softcap is not None:
        scores = jnp.tanh(scores / softcap) * softcap
    return jnp.where(visible, scores, MASKED)


def is_visible(q_pos: jax.Array, k_pos: jax.Array, window: int | None) -> jax.Array:
    """Causal, and within the sliding window (the token itself counts as one of its `window`)."""
    distance = q_pos - k_pos
    return (distance >= 0) & (distance < window) if window else distance >= 0
