"""Draw tokens and score them, a warpgroup for each row, for Hopper (Pallas, Mosaic GPU).

Most rows need no more of their logits than a block or the few that `truncate` holds: the maxima and sums of all blocks
are known (`blocks`). A draw has the reference's noise and formulas; last bits may differ as in the Triton kernel
(kernels.gpu.sample).

S rows, M blocks of 128 tokens, Mp = M rounded up to a multiple of 128.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dovetail.ops.kernels.gpu.keys import NONE, key_of, value_of
from dovetail.ops.kernels.gpu.mosaic import truncate
from dovetail.ops.kernels.gpu.mosaic.blocks import TILE
from dovetail.ops.kernels.gpu.mosaic.line import Line, best_of, first_of
from dovetail.ops.kernels.gpu.mosaic.rows import BY_LANE, iota, layout, load, load_as, store_as
from dovetail.ops.kernels.gpu.noise import BLOCK, COLDEST, Noise

Scores = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


class Scratch(NamedTuple):
    """Hold a program's shared memory."""

    held: Any  # [FEW, BLOCK], the few blocks
    ids: Any  # [FEW], their numbers
    masses: Any  # [Mp]
    copied: Any


def draw(
    logits: jax.Array,  # [S, M, BLOCK] f32
    sums: list[jax.Array],  # of `block_sums`
    inputs: Any,
    top: int,
    interpret: Any = None,
) -> tuple[jax.Array, Scores]:
    """Return (tokens, scores) of adjusted logits, as ops.sample.sample does."""
    S, Mp = len(logits), sums[0].shape[1]
    listed = (S, max(1, top))
    shapes = [((S,), jnp.int32), ((S,), jnp.float32), ((S,), jnp.int32), (listed, jnp.float32), (listed, jnp.int32)]

    def body(
        temperature_ref: Any, k_ref: Any, p_ref: Any, min_p_ref: Any, hi_ref: Any, lo_ref: Any, position_ref: Any,
        wanted_ref: Any, maxima_ref: Any, masses_ref: Any, weights_ref: Any, logits_ref: Any,
        token_ref: Any, value_ref: Any, rank_ref: Any, values_ref: Any, ids_ref: Any, *scratch: Any,
    ) -> None:  # fmt: skip
        row, wanted = lax.axis_index("row"), wanted_ref[lax.axis_index("row")]
        temperature, numbers = temperature_ref[row], iota((Mp,), 0, layout(Mp))

        def of_blocks(ref: Any, otherwise: float) -> jax.Array:
            return jnp.where(numbers < logits_ref.shape[1], load(ref, (row,), Mp), otherwise)

        maxima = of_blocks(maxima_ref, -jnp.inf)
        best = jnp.max(maxima)
        line = Line(logits_ref, row, jnp.where(best > -jnp.inf, best, 0.0), jnp.maximum(temperature, COLDEST))

        def draw_one() -> jax.Array:
            noise = Noise(hi_ref[row], lo_ref[row], position_ref[row], _log1p)
            masses = of_blocks(masses_ref, 0.0) * jnp.exp(line.scale(maxima))
            return _draw(line, maxima, masses, numbers, noise, k_ref[row], p_ref[row], min_p_ref[row],
                         Scratch(*scratch))  # fmt: skip

        def likeliest() -> jax.Array:
            block = best_of(maxima, numbers)
            return block * BLOCK + best_of(line.block(block), _lanes())

        # of a row with nothing left to draw, the reference too takes the first
        token = lax.cond((temperature > 0) & (best > -jnp.inf), draw_one, likeliest)
        token = jnp.clip(token, 0, line.blocks * BLOCK - 1)  # a row of NaN has no greatest token
        token_ref[row] = token

        def score() -> tuple[jax.Array, jax.Array]:
            total = jnp.log(jnp.sum(of_blocks(weights_ref, 0.0) * jnp.exp(maxima - line.top))) + line.top
            keys = jnp.where(numbers < line.blocks, key_of(maxima), NONE)
            _list(line, keys, numbers, jnp.minimum(wanted, top), total, values_ref, ids_ref)
            chosen = logits_ref[row, token // BLOCK, token % BLOCK]
            return chosen - total, _rank(line, chosen, best)

        value, rank = lax.cond(wanted >= 0, score, lambda: (jnp.float32(0), jnp.int32(0)))
        value_ref[row] = value
        rank_ref[row] = rank

        @pl.loop(jnp.maximum(wanted, 0), listed[1])
        def _(i: Any) -> None:
            values_ref[row, i] = jnp.float32(0)
            ids_ref[row, i] = jnp.int32(0)

    body.__name__ = "draw_tokens"
    given = [
        inputs.temperature, inputs.top_k, inputs.top_p, inputs.min_p, inputs.seed_hi, inputs.seed_lo, inputs.position,
        inputs.top_logprobs, *sums, logits,
    ]  # fmt: skip
    few = truncate.FEW
    tokens, value, rank, values, ids = plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes],
        grid=(S,),
        grid_names=("row",),
        compiler_params=BY_LANE,
        scratch_types=Scratch(
            plgpu.SMEM((few, BLOCK), jnp.float32), plgpu.SMEM((few,), jnp.int32), plgpu.SMEM((Mp,), jnp.float32),
            plgpu.Barrier(num_arrivals=few),
        ),
        interpret=interpret,
    )(*given)  # fmt: skip
    return tokens, (value, rank, values[:, :top], ids[:, :top])


def _lanes() -> jax.Array:
    return iota((BLOCK,), 0, layout(BLOCK))


def _log1p(x: jax.Array) -> jax.Array:
    """Return log(1 + x) as precisely for a small x, of which Mosaic has no instruction (Goldberg 1991, theorem 4)."""
    y = 1.0 + x
    return jnp.where(y == 1.0, x, jnp.log(y) * (x / jnp.where(y == 1.0, 1.0, y - 1.0)))


def _draw(
    line: Line, maxima: jax.Array, masses: jax.Array, numbers: jax.Array, noise: Noise, k: Any, p: Any, min_p: Any,
    scratch: Scratch,
) -> jax.Array:  # fmt: skip
    """Draw a token, as ops.sample.gumbel_argmax does after truncate: a block by its weight, then a token of it."""
    of_blocks = noise.at(numbers)

    def from_all(masses: jax.Array) -> jax.Array:
        scores = jnp.where(numbers < line.blocks, jnp.log(masses) + of_blocks, -jnp.inf)
        return best_of(scores, numbers)

    def truncated() -> tuple[jax.Array, jax.Array, jax.Array]:
        edge, found = truncate.hold_few(line, line.scale(maxima), numbers, scratch.held, scratch.ids, scratch.copied)
        kept = truncate.truncate(line, jnp.sum(masses), edge, found, scratch.held, k, p, min_p)

        def from_few() -> jax.Array:
            held = load_as(scratch.held, (slice(None), slice(None)), TILE, optimized=False)
            of_rows = TILE.reduce(1)
            place = iota(held.shape[:1], 0, of_rows)
            ids = load_as(scratch.ids, (slice(None),), of_rows, optimized=False, dtype=jnp.int32)
            mass = jnp.sum(kept.weigh(line.scale(held))[1], axis=1)
            scores = jnp.where(place < found, jnp.log(mass) + noise.at(ids), -jnp.inf)
            return scratch.ids[jnp.clip(best_of(scores, place), 0, truncate.FEW - 1)]

        def from_row() -> jax.Array:
            def weigh(start: Any, logits: jax.Array) -> None:
                mass = jnp.sum(kept.weigh(line.scale(logits))[1], axis=1)
                store_as(scratch.masses, (pl.ds(start, logits.shape[0]),), mass)

            line.each_part(weigh)
            plgpu.commit_smem()
            return from_all(load(scratch.masses, (slice(None),), numbers.shape[0]))

        return lax.cond(kept.in_few, from_few, from_row), kept.floor, kept.least

    def everything() -> tuple[jax.Array, jax.Array, jax.Array]:
        return from_all(masses), jnp.float32(-jnp.inf), jnp.float32(0)

    truncates = (min_p > 0) | ((k > 0) & (k < line.blocks * BLOCK)) | (p < 1)
    block, floor, least = lax.cond(truncates, truncated, everything)
    kept = truncate.Thresholds(floor, least, truncates)
    scaled, _ = kept.weigh(line.scale(line.block(block)))
    return block * BLOCK + best_of(scaled + noise.at(_lanes() + line.blocks), _lanes())


def _rank(line: Line, chosen: jax.Array, best: jax.Array) -> jax.Array:
    """Return the token's rank; only of the greatest it is known without a pass over the row."""

    def pass_over() -> jax.Array:
        return 1 + line.sum(lambda x: [jnp.where(x > chosen, 1.0, 0.0)], 1)[0].astype(jnp.int32)

    return lax.cond(chosen < best, pass_over, lambda: jnp.int32(1))


def _list(line: Line, keys: jax.Array, numbers: jax.Array, count: Any, total: Any, values_ref: Any, ids_ref: Any):
    """Store the most probable tokens, the lower id first among equals.

    keys [Mp] are those of the greatest token in each block that has not been listed.
    """

    def left(tokens: jax.Array, at: jax.Array, last: Any, last_id: Any) -> jax.Array:
        return jnp.where((tokens < last) | ((tokens == last) & (at > last_id)), tokens, NONE)

    def turn(i: Any, carry: tuple) -> tuple:
        keys, last, last_id = carry
        key = jnp.max(keys)
        block = first_of(keys == key, numbers)
        at, tokens = _lanes() + block * BLOCK, key_of(line.block(block))
        token = first_of(left(tokens, at, last, last_id) == key, at)
        values_ref[line.row, i] = value_of(key) - total
        ids_ref[line.row, i] = token
        return jnp.where(numbers != block, keys, jnp.max(left(tokens, at, key, token))), key, token

    lax.fori_loop(0, count, turn, (keys, jnp.int32(2**31 - 1), jnp.int32(-1)))
