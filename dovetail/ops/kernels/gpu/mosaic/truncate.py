"""Find the thresholds of min-p, top-k and top-p in a row of logits, for Hopper (Pallas, Mosaic GPU).

The FEW blocks with the greatest maxima are looked at first, in shared memory: they hold every token above the greatest
maximum of the others, the edge, and most thresholds lie above that. If one does not, passes over the row narrow it
down. Thresholds are exact either way.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from dovetail.ops.kernels.gpu.keys import LOWEST, TOP, greatest, key_of, value_of
from dovetail.ops.kernels.gpu.mosaic.line import Line, first_of
from dovetail.ops.kernels.gpu.mosaic.rows import iota, load_as
from dovetail.ops.kernels.gpu.noise import BLOCK

FEW = 64  # blocks that are looked at first, a multiple of 8
THRESHOLDS = 4  # tried in one pass over a row
ONE = 0x3F800000  # the key of 1
SLACK = 1 + 2.0**-20  # for exponentials that two instructions round differently


class Thresholds(NamedTuple):
    """Say which tokens of a row stay: those at least as great as `floor`, scaled, with a weight of at least `least`."""

    floor: jax.Array
    least: jax.Array
    in_few: jax.Array  # whether all of them are in the few blocks

    def weigh(self, scaled: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the scaled logits, -inf where a token does not stay, and their weights, 0 there."""
        weights = jnp.exp(scaled)
        stays = (scaled >= self.floor) & (weights >= self.least)
        return jnp.where(stays, scaled, -jnp.inf), jnp.where(stays, weights, 0.0)


def hold_few(line: Line, maxima: jax.Array, numbers: jax.Array, held_ref: Any, ids_ref: Any, barrier: Any) -> tuple:
    """Copy the few blocks into shared memory, in their order.

    Args:
        line: The row.
        maxima: Those of the blocks [Mp], scaled; -inf past the last block.
        numbers: 0 to Mp - 1.
        held_ref: Receives the blocks' logits [FEW, BLOCK].
        ids_ref: Receives their numbers [FEW].
        barrier: Awaits FEW copies.

    Returns:
        (edge, count): the greatest maximum of the other blocks, and the number of the few.
    """
    most = min(FEW, line.blocks)

    is_block = numbers < line.blocks

    def count(floor: Any) -> jax.Array:
        return jnp.sum(((maxima >= floor) & is_block).astype(jnp.int32))

    # the few are above the greatest number that too many reach
    floor = value_of(greatest(lambda key: count(value_of(key)) > most, jnp.int32(LOWEST), jnp.int32(TOP + 1)))
    chosen = ((maxima > floor) | (count(-jnp.inf) <= most)) & is_block
    found = jnp.sum(chosen.astype(jnp.int32))

    def copy(i: Any, last: Any) -> jax.Array:
        number = first_of(chosen & (numbers > last), numbers)
        number = jnp.where(number < line.blocks, number, 0)  # a place that stays empty has some block
        ids_ref[i] = number
        plgpu.copy_gmem_to_smem(line.ref.at[line.row, number], held_ref.at[i], barrier)
        return jnp.where(i < found, number, line.blocks)

    lax.fori_loop(0, FEW, copy, jnp.int32(-1))
    plgpu.barrier_wait(barrier)
    plgpu.commit_smem()
    return jnp.max(jnp.where(chosen, -jnp.inf, maxima)), found


def truncate(
    line: Line, total: jax.Array, edge: Any, found: Any, held_ref: Any, k: Any, p: Any, min_p: Any
) -> Thresholds:
    """Return what stays: `total` is the weight of the row, `edge` and `found` are from `hold_few`."""
    layout = plgpu.Layout.WG_STRIDED((FEW, BLOCK), vec_size=8)
    scaled = line.scale(load_as(held_ref, (slice(None), slice(None)), layout))
    scaled = jnp.where(iota(scaled.shape, 0, layout) < found, scaled, -jnp.inf)

    def count(floor: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(scaled >= floor, 1.0, 0.0))

    def by_count() -> jax.Array:
        def passed(floors: list) -> list[jax.Array]:
            return line.sum(lambda x: [jnp.where(line.scale(x) >= floor, 1.0, 0.0) for floor in floors], len(floors))

        first = key_of(edge) + 1  # of the tokens below it, some are in other blocks
        return value_of(_find(count, passed, k.astype(jnp.float32), jnp.int32(LOWEST), first, jnp.int32(TOP + 1)))

    has_k = (k > 0) & (k < line.blocks * BLOCK)
    floor = jnp.maximum(jnp.log(min_p), lax.cond(has_k, by_count, lambda: jnp.float32(-jnp.inf)))

    def by_weight() -> jax.Array:
        weights = jnp.where(scaled >= floor, jnp.exp(scaled), 0.0)

        def passed(leasts: list) -> list[jax.Array]:
            def measures(x: jax.Array) -> list[jax.Array]:
                x = line.scale(x)
                weight = jnp.where(x >= floor, jnp.exp(x), 0.0)
                return [jnp.where(weight >= least, weight, 0.0) for least in leasts]

            return line.sum(measures, len(leasts))

        # a branch that takes long to lower is the first one: jax lowers the other one twice
        def of_more() -> jax.Array:
            return lax.cond(floor > -jnp.inf, lambda: passed([jnp.float32(0)])[0], lambda: total)

        def reach(least: jax.Array) -> jax.Array:
            return jnp.sum(jnp.where(weights >= least, weights, 0.0))

        # the few have all tokens above the edge, or their sum would lack some
        target = p * lax.cond(floor <= edge, of_more, lambda: jnp.sum(weights))
        first = key_of(jnp.exp(edge) * SLACK) + 1
        return value_of(_find(reach, passed, target, jnp.int32(0), first, jnp.int32(ONE + 1)))

    least = lax.cond(p < 1, by_weight, lambda: jnp.float32(0))
    return Thresholds(floor, least, (floor > edge) | (jnp.exp(edge) * SLACK < least))


def _find(reach: Callable, passed: Callable, target: Any, low: Any, first: Any, high: Any) -> jax.Array:
    """Return the greatest key in [low, high) at or above which there is `target`; low is assumed to have it.

    At or above `first`, `reach` tells how much there is. Below, `passed` tells it for several keys' values at once, in
    a pass over the row.
    """
    is_near = (first < high) & (reach(value_of(first)) >= target)
    near = greatest(lambda key: reach(value_of(key)) >= target, first, jnp.where(is_near, high, first))
    return _search(passed, target, jnp.where(is_near, near, low), jnp.where(is_near, near + 1, first))


def _search(passed: Callable, target: Any, low: jax.Array, high: jax.Array) -> jax.Array:
    """Search for the greatest key in [low, high) that has `target` by passes over the row."""

    def narrow(_: Any, bounds: tuple) -> tuple:
        low, high = bounds
        step = jnp.maximum((high - low) // (THRESHOLDS + 1), 1)
        keys = [jnp.minimum(low + i * step, high - 1) for i in range(1, THRESHOLDS + 1)]

        def tried() -> tuple:
            reached, missed = low, high
            sums = passed([value_of(key) for key in keys])
            for key, total in zip(keys, sums, strict=True):
                reached = jnp.where(total >= target, key, reached)
            for key, total in reversed([*zip(keys, sums, strict=True)]):
                missed = jnp.where(total < target, key, missed)
            return reached, missed

        return lax.cond(high - low > 1, tried, lambda: (low, high))

    # so many passes find any key
    passes = math.ceil(32 / math.log2(THRESHOLDS + 1)) + 3
    return lax.fori_loop(0, passes, narrow, (low, high))[0]
