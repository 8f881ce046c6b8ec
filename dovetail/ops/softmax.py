"""Parts of a softmax computed block by block, which both attention references use."""

from __future__ import annotations

import jax
import jax.numpy as jnp

MASKED = -1e30  # not -inf: a row with nothing to see must give 0, never NaN


def cap_and_mask(scores: jax.Array, visible: jax.Array, softcap: float | None) -> jax.Array:
    """Return soft-capped f32 scores with invisible ones masked; `visible` broadcasts against them."""
    if softcap is not None:
        scores = jnp.tanh(scores / softcap) * softcap
    return jnp.where(visible, scores, MASKED)


def is_visible(q_pos: jax.Array, k_pos: jax.Array, window: int | None) -> jax.Array:
    """Return whether a key is causal and within the sliding window (which includes the token itself)."""
    distance = q_pos - k_pos
    return (distance >= 0) & (distance < window) if window else distance >= 0
