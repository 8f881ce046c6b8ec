"""RMS norm and layer norm, always in f32: the one reduction where bf16 would show."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from dovetail.core.mesh import Placement
from dovetail.core.types import Packed, Paged
from dovetail.ops.dispatch import layer_norm_kernel, norm_kernel

MANY = 1024  # tokens from which the product that made a delta had better add it itself (cuBLAS can; XLA sees to it)


def rms_norm(x: jax.Array, weight: jax.Array | None, eps: float, offset: float = 0.0) -> jax.Array:
    """Return x / rms(x) * (offset + weight) over the last dim; Gemma 2 and 3 store weight - 1, so their offset is 1."""
    x32 = x.astype(jnp.float32)
    y = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    if weight is not None:
        y = y * (offset + weight.astype(jnp.float32))
    return y.astype(x.dtype)


def layer_norm(x: jax.Array, weight: jax.Array | None, bias: jax.Array | None, eps: float) -> jax.Array:
    """Return (x - mean(x)) / std(x) * weight + bias over the last dim."""
    x32 = x.astype(jnp.float32)
    x32 = x32 - jnp.mean(x32, axis=-1, keepdims=True)
    y = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    y = y if weight is None else y * weight.astype(jnp.float32)
    return (y if bias is None else y + bias.astype(jnp.float32)).astype(x.dtype)


def add_layer_norm(
    x: jax.Array,
    delta: jax.Array | None,
    weight: jax.Array,
    bias: jax.Array,
    eps: float,
    placement: Placement | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Return (x + delta, its layer norm) for x and delta [..., D]."""
    kernel = layer_norm_kernel(placement, x)
    if kernel is not None:
        return kernel(x, delta, weight, bias, eps)
    x = x if delta is None else x + delta
    return x, layer_norm(x, weight, bias, eps)


def add_rms_norm(
    ctx: Packed | Paged,
    x: jax.Array,
    delta: jax.Array | None,
    weight: jax.Array | None,
    eps: float,
    offset: float = 0.0,
) -> tuple[jax.Array, jax.Array]:
    """Return (x + delta, its norm) for x and delta [..., D]; a weight of None means no norm."""
    kernel = norm_kernel(ctx, x) if weight is not None else None
    if kernel is not None:
        if delta is not None and x.shape[0] >= MANY:
            x, delta = x + delta, None
        return kernel(x, delta, weight, eps, offset)
    x = x if delta is None else x + delta
    return x, x if weight is None else rms_norm(x, weight, eps, offset)
