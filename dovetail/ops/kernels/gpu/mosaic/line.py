"""A row of logits, as the program that draws from it sees it (Pallas, Mosaic GPU).

Scaled, a logit is at most 0: it is relative to the row's greatest, and divided by the temperature.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from dovetail.ops.kernels.gpu.mosaic.blocks import PART, TILE
from dovetail.ops.kernels.gpu.mosaic.rows import iota, load, load_as
from dovetail.ops.kernels.gpu.noise import BLOCK

LOADS = 2  # parts of a row that are read before the first one is used


@dataclass(frozen=True)
class Line:
    """Access a program's row of the logits, M blocks."""

    ref: Any  # [S, M, BLOCK]
    row: Any
    top: Any  # the greatest logit
    heat: Any

    @property
    def blocks(self) -> int:
        """Return the number of blocks."""
        return self.ref.shape[1]

    def block(self, number: Any) -> jax.Array:
        """Return the logits of a block [BLOCK].

        In a row of NaN no number is the greatest, so that `number` may be past the last block.
        """
        return load(self.ref, (self.row, jnp.clip(number, 0, self.blocks - 1)), BLOCK)

    def scale(self, logits: jax.Array) -> jax.Array:
        """Scale logits of this row."""
        return (logits - self.top) / self.heat

    def sum(self, measures: Callable[[jax.Array], list[jax.Array]], count: int) -> list[jax.Array]:
        """Return the sums over the row of so many `measures` [PART, BLOCK] of logits; those of -inf must be 0."""

        def read(part: Any) -> jax.Array:
            # the last part begins early, so that it is a whole one; what it shares with another one counts there
            first = part * PART
            start = jnp.minimum(first, self.blocks - PART)
            x = load_as(self.ref, (self.row, pl.ds(start, PART)), TILE, optimized=False)
            return jnp.where(iota(x.shape, 0, TILE) + start >= first, x, -jnp.inf)

        def turn(i: Any, sums: tuple) -> tuple:
            for x in [read(i * LOADS + j) for j in range(LOADS)]:
                sums = tuple(a + b for a, b in zip(sums, measures(x), strict=True))
            return sums

        zeros = (jnp.where(iota((PART, BLOCK), 0, TILE) < 0, 1.0, 0.0),) * count
        sums = lax.fori_loop(0, pl.cdiv(self.blocks, PART * LOADS), turn, zeros)
        return [jnp.sum(jnp.sum(x, axis=1)) for x in sums]


def first_of(chosen: jax.Array, numbers: jax.Array) -> jax.Array:
    """Return the least of the chosen numbers, which are not negative: an integer maximum is one instruction."""
    # `jnp.where(.., scalar, array)` would be unsigned in jax 0.10
    return -jnp.max(jnp.where(chosen, -numbers, -(2**31 - 1)))


def best_of(values: jax.Array, numbers: jax.Array) -> jax.Array:
    """Return the number of the greatest value, the least number among equals."""
    return first_of(values == jnp.max(values), numbers)
