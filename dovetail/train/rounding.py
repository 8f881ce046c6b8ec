"""Adding an update to a weight. A bf16 weight has 8 bits of mantissa: an update below 1/512 of it would vanish in
rounding, at each step, for good. Rounded up with the probability of what is cut off, it is kept in the mean."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def apply(params: Any, updates: Any, key: jax.Array) -> Any:
    """params + updates, each in its weight's dtype: bf16 by stochastic rounding, f32 as it is.

    The draw is a function of the key and the element's place in the tree; how a mesh splits it changes nothing.
    """
    flat, tree = jax.tree.flatten(params)
    seeds = jax.random.bits(key, (len(flat), 2), jnp.uint32)
    return tree.unflatten([_add(*each) for each in zip(flat, tree.flatten_up_to(updates), seeds, strict=True)])


def _add(param: jax.Array, update: jax.Array, seed: jax.Array) -> jax.Array:
    total = param.astype(jnp.float32) + update.astype(jnp.float32)
    return _round(total, seed) if param.dtype == jnp.bfloat16 else total.astype(param.dtype)


def _round(x: jax.Array, seed: jax.Array) -> jax.Array:
    """f32 -> bf16, unbiased: bf16 is the upper half of f32's bits, so a random lower half is added and cut off."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32) + (_noise(x.shape, seed) >> 16)
    rounded = jax.lax.bitcast_convert_type((bits >> 16).astype(jnp.uint16), jnp.bfloat16)
    return jnp.where(jnp.isfinite(x), rounded, x.astype(jnp.bfloat16))  # a carry must not make a number of NaN


def _noise(shape: tuple[int, ...], seed: jax.Array) -> jax.Array:
    """Random u32s by hashing each element's index with two words of seed.

    Not jax.random.bits: this fuses with the addition (no array of noise), and 300 weights compile at once where as
    many threefry generators take minutes.
    """
    index = jnp.zeros(shape, jnp.uint32)
    for dim, size in enumerate(shape):
        index = index * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, shape, dim)
    return _mix(_mix(index ^ seed[0]) + seed[1])


def _mix(x: jax.Array) -> jax.Array:
    """Every bit of the result hangs on every bit of x (the constants are lowbias32's, found by search)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)
