"""Search for a float bit by bit, in the order of its key: an int32 that is in the order of floats."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

NONE = -(2**31)  # a key below all others
LOWEST = -2139095041  # the key of -inf
TOP = 0  # the key of 0, which the greatest of a scaled row is


def key_of(x: jax.Array) -> jax.Array:
    """Return the key of floats."""
    bits = lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.int32)  # -0.0 equals 0.0 and must tie with it
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def value_of(key: jax.Array) -> jax.Array:
    """Return the float of a key."""
    return lax.bitcast_convert_type(jnp.where(key < 0, key ^ 0x7FFFFFFF, key), jnp.float32)


def halve(holds: Callable, low: jax.Array, high: jax.Array, turns: int) -> tuple[jax.Array, jax.Array]:
    """Narrow the interval between low, which holds or is assumed to, and high, which does not."""

    def turn(_, bounds):
        low, high = bounds
        middle = low + ((high - low) >> 1)
        yes = holds(middle)
        return jnp.where(yes, middle, low), jnp.where(yes, high, middle)

    return lax.fori_loop(0, turns, turn, (low, high))


def greatest(holds: Callable, low: jax.Array, high: jax.Array) -> jax.Array:
    """Return the greatest key in [low, high) that holds; low is assumed to."""
    return halve(holds, low, high, 31)[0]
