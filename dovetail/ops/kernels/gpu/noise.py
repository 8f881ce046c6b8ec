"""Generate in a kernel the random numbers that the sampler's reference takes from jax.random."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

BLOCK, COLDEST = 128, 1e-5  # as in ops.sample, which a kernel may not import


@dataclass(frozen=True)
class Noise:
    """Generate a row's Gumbel noise, as in ops.sample: jax.random's bits of its seed and position.

    They are those with jax_threefry_partitionable, the default.
    """

    hi: Any
    lo: Any
    position: Any
    log1p: Callable = jnp.log1p

    def at(self, index: jax.Array) -> jax.Array:
        """Return the numbers of these indices."""
        key = threefry(self.hi, self.lo, jnp.uint32(0), self.position.astype(jnp.uint32))
        a, b = threefry(*key, jnp.zeros(index.shape, jnp.uint32), index.astype(jnp.uint32))
        u = jnp.minimum(((a ^ b).astype(jnp.float32) + 0.5) * 2.0**-32, 1 - 2.0**-24)
        return -jnp.log(-self.log1p(-u))


def threefry(k0: jax.Array, k1: jax.Array, x0: jax.Array, x1: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Compute Threefry-2x32 with 20 rounds (Salmon et al. 2011)."""
    keys = (k0, k1, k0 ^ k1 ^ jnp.uint32(0x1BD11BDA))
    x0, x1 = x0 + k0, x1 + k1
    for group in range(5):
        for turn in ((13, 15, 26, 6), (17, 29, 16, 24))[group % 2]:
            x0 = x0 + x1
            x1 = ((x1 << jnp.uint32(turn)) | (x1 >> jnp.uint32(32 - turn))) ^ x0
        x0, x1 = x0 + keys[(group + 1) % 3], x1 + keys[(group + 2) % 3] + jnp.uint32(group + 1)
    return x0, x1
