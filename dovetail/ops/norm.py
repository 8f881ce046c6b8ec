"""RMS norm, in f32 whatever the input: the one reduction where bf16 would show."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def rms_norm(x: jax.Array, weight: jax.Array | None, eps: float, offset: float = 0.0) -> jax.Array:
    """x / rms(x) * (offset + weight) over the last dim; Gemma 2 and 3 store weight - 1, so their offset is 1."""
    x32 = x.astype(jnp.float32)
    y = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    if weight is not None:
        y = y * (offset + weight.astype(jnp.float32))
    return y.astype(x.dtype)
