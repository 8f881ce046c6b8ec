"""Maxima and sums of exponentials of each block of a row's tokens, for Hopper (Pallas, Mosaic GPU).

The logits are read once. What a sampler asks of a row as a whole follows from these few numbers. The exponentials of a
block are relative to its own maximum, because that of the row is not known yet.

S rows, M blocks of 128 tokens, Mp = M rounded up to a multiple of 128: a row of as many numbers is loaded at once.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dovetail.ops.kernels.gpu.mosaic.rows import BY_LANE, THREADS, load_as, store_as, tiled
from dovetail.ops.kernels.gpu.noise import BLOCK, COLDEST

PART = 8  # blocks that a warpgroup holds at once
TILE = tiled(4, BLOCK)  # a warp reads a block at once, 16 bytes a thread
PROGRAMS = 16 * 132  # with fewer, a program takes one part; with more, up to MOST
MOST = 8


def block_sums(logits: jax.Array, inputs: Any, interpret: Any = None) -> list[jax.Array]:
    """Return for each block of [S, M, 128] its maximum and two sums, [S, Mp]; past M there is nothing.

    The sums are of the exponentials by the row's temperature, where it is not 0, and of those at temperature 1, where
    log-probabilities are wanted.
    """
    S, M, _ = logits.shape
    parts = pl.cdiv(M, PART)
    per = max(1, min(MOST, S * parts // PROGRAMS))

    def body(
        temperature_ref: Any, wanted_ref: Any, logits_ref: Any, maxima_ref: Any, masses_ref: Any, weights_ref: Any
    ) -> None:
        row, first = lax.axis_index("row"), lax.axis_index("program") * per
        temperature = temperature_ref[row]
        cooled = 1 / jnp.maximum(temperature, COLDEST)  # a division per token takes as long as its exponential

        @pl.loop(0, jnp.minimum(per, parts - first))
        def _(i: Any) -> None:
            # the last part begins early, so that it is a whole one; what it shares with another one they both write
            part = pl.ds(jnp.minimum((first + i) * PART, M - PART), PART)
            x = load_as(logits_ref, (row, part), TILE, optimized=False)
            maxima = jnp.max(x, axis=1)
            store_as(maxima_ref, (row, part), maxima)
            top = jnp.where(maxima > -jnp.inf, maxima, 0.0)
            x = x - plgpu.layout_cast(lax.broadcast_in_dim(top, x.shape, (0,)), TILE)

            @pl.when(temperature > 0)
            def _() -> None:
                store_as(masses_ref, (row, part), jnp.sum(jnp.exp(x * cooled), axis=1))

            @pl.when(wanted_ref[row] >= 0)
            def _() -> None:
                store_as(weights_ref, (row, part), jnp.sum(jnp.exp(x), axis=1))

    body.__name__ = "block_sums"
    numbers = jax.ShapeDtypeStruct((S, pl.cdiv(M, THREADS) * THREADS), jnp.float32)
    return plgpu.kernel(
        body,
        out_type=[numbers] * 3,
        grid=(S, pl.cdiv(parts, per)),
        grid_names=("row", "program"),
        compiler_params=BY_LANE,
        interpret=interpret,
    )(inputs.temperature, inputs.top_logprobs, logits)
