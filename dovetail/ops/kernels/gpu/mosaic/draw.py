"""Draw tokens and score them, a warpgroup for each row, for Hopper (Pallas, Mosaic GPU).

Most rows need no more of their logits than a block: the maxima and sums of all blocks are known (`blocks`), and those
of what truncation keeps (`truncate`). A draw has the reference's noise and formulas; last bits may differ as in the
Triton kernel (kernels.gpu.sample).

S rows, M blocks of 128 tokens, Mp = M rounded up to a multiple of 128.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dovetail.ops.kernels.gpu.keys import NONE, key_of, value_of
from dovetail.ops.kernels.gpu.mosaic.line import Line, best_of, first_of
from dovetail.ops.kernels.gpu.mosaic.rows import BY_LANE, iota, layout, load, load_as
from dovetail.ops.kernels.gpu.mosaic.truncate import LISTED, KeptTokens
from dovetail.ops.kernels.gpu.noise import BLOCK, COLDEST, Noise

Scores = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


def draw(
    logits: jax.Array,  # [S, M, BLOCK] f32
    sums: list[jax.Array],  # of `block_sums`
    kept: KeptTokens,
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
        wanted_ref: Any, maxima_ref: Any, masses_ref: Any, weights_ref: Any,
        far_ref: Any, cut_ref: Any, count_ref: Any, blocks_ref: Any, kept_ref: Any, logits_ref: Any,
        token_ref: Any, value_ref: Any, rank_ref: Any, values_ref: Any, ids_ref: Any,
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
            k, p, min_p = k_ref[row], p_ref[row], min_p_ref[row]

            def everything() -> tuple[jax.Array, ...]:
                masses = of_blocks(masses_ref, 0.0) * jnp.exp(line.scale(maxima))
                return _from_all(masses, numbers, line.blocks, noise), jnp.float32(-jnp.inf), jnp.float32(-jnp.inf)

            def truncated() -> tuple[jax.Array, ...]:
                count = count_ref[row]

                def from_few() -> jax.Array:
                    place = iota((LISTED,), 0, layout(LISTED))
                    ids = load_as(blocks_ref, (row,), layout(LISTED), dtype=jnp.int32)
                    masses = load(kept_ref, (row, pl.ds(0, LISTED)), LISTED)
                    scores = jnp.where(place < count, jnp.log(masses) + noise.at(ids), -jnp.inf)
                    return blocks_ref[row, jnp.clip(best_of(scores, place), 0, LISTED - 1)]

                def from_row() -> jax.Array:
                    return _from_all(of_blocks(kept_ref, 0.0), numbers, line.blocks, noise)

                block = lax.cond(count > 0, from_few, from_row)
                return block, -far_ref[row] / line.heat, -cut_ref[row] / line.heat

            truncates = (min_p > 0) | ((k > 0) & (k < line.blocks * BLOCK)) | (p < 1)
            block, floor, cut = lax.cond(truncates, truncated, everything)
            return _draw(line, block, floor, cut, noise)

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
        inputs.top_logprobs, *sums, *kept, logits,
    ]  # fmt: skip
    tokens, value, rank, values, ids = plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes],
        grid=(S,),
        grid_names=("row",),
        compiler_params=BY_LANE,
        interpret=interpret,
    )(*given)
    return tokens, (value, rank, values[:, :top], ids[:, :top])


def _lanes() -> jax.Array:
    return iota((BLOCK,), 0, layout(BLOCK))


def _log1p(x: jax.Array) -> jax.Array:
    """Return log(1 + x) as precisely for a small x, of which Mosaic has no instruction (Goldberg 1991, theorem 4)."""
    y = 1.0 + x
    return jnp.where(y == 1.0, x, jnp.log(y) * (x / jnp.where(y == 1.0, 1.0, y - 1.0)))


def _from_all(masses: jax.Array, numbers: jax.Array, blocks: int, noise: Noise) -> jax.Array:
    """Draw a block by its weight."""
    return best_of(jnp.where(numbers < blocks, jnp.log(masses) + noise.at(numbers), -jnp.inf), numbers)


def _draw(line: Line, block: jax.Array, floor: jax.Array, cut: jax.Array, noise: Noise) -> jax.Array:
    """Draw a token of a block, as ops.sample.gumbel_argmax does.

    It is one of those not below `floor`, scaled, and of no less weight than one at `cut`.
    """
    scaled, lanes = line.scale(line.block(block)), _lanes()
    # by the same instruction: that of a scalar may round differently
    least = jnp.exp(jnp.where(lanes < 0, scaled, cut))
    stays = (scaled >= floor) & (jnp.exp(scaled) >= least)
    return block * BLOCK + best_of(jnp.where(stays, scaled, -jnp.inf) + noise.at(lanes + line.blocks), lanes)


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
