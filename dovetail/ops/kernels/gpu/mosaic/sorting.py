"""Sort many pairs of token and expert by expert for Hopper (Pallas, Mosaic GPU), and divide the result into tiles.

The pairs are taken in blocks. One kernel counts the pairs of each expert in each block. With the counts of an expert's
blocks side by side, the sum of all counts before one is the place of its first pair; a second kernel, with a program
for each count, places the pairs in their order. XLA takes about fifteen kernels for this, and seven for the tiles.

M pairs, E experts, B blocks, I tiles.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from dovetail.ops.kernels.gpu.mosaic.threads import THREADS, WARP, WARPS, launch

BLOCK = 4096  # pairs
MOST_EXPERTS, MOST_COUNTS = 512, 32768  # whose loops are unrolled


def why_not_sort(group: Any, num_experts: int) -> str | None:
    """Return why the kernels cannot sort pairs of the experts `group` [M], or None."""
    if num_experts > MOST_EXPERTS:
        return f"more than {MOST_EXPERTS} experts"
    if num_experts * pl.cdiv(len(group), BLOCK) > MOST_COUNTS:
        return f"more than {MOST_COUNTS} counts"
    return None


@functools.partial(jax.jit, static_argnames="num_experts")  # the layers of a model share one lowered function
def sort_pairs(group: jax.Array, num_experts: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the place of each pair, the pair at each place [M], and the sizes of the groups [E].

    Args:
        group: The expert of each pair [M] int32, below E.
        num_experts: E.
    """
    M, E = len(group), num_experts
    B = pl.cdiv(M, BLOCK)
    array = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    counts = pl.cdiv(E + 1, THREADS) * THREADS
    (found,) = launch("count_pairs", functools.partial(count, M=M, E=E, B=B), [group], [array((E * B,))], B, (counts,))
    out = [array((M,)), array((M,)), array((E,))]
    place, pair, sizes = launch(
        "place_pairs", functools.partial(put, M=M, E=E, B=B), [group, found], out, E * B, (WARPS,) * 3
    )
    return place, pair, sizes


def count(on: Any, block: Any, group: Any, found: Any, counts: Any, *, M: int, E: int, B: int) -> None:
    """Count the pairs of each expert in a block."""
    for i in range(pl.cdiv(E + 1, THREADS)):
        on.store(counts, on.thread + i * THREADS, 0)
    on.barrier()
    for i in range(BLOCK // THREADS):
        pair = block * BLOCK + on.thread + i * THREADS
        expert = on.load(group, on.at_most(pair, M - 1))
        on.increment(counts, on.select(pair < M, expert, E))  # what is no pair counts as of expert E
    on.barrier()
    experts = [on.thread + i * THREADS for i in range(pl.cdiv(E, THREADS))]
    sums = [on.load(counts, expert) for expert in experts]
    for expert, total in zip(experts, sums, strict=True):
        on.store(found, expert * B + block, total, expert < E)


def put(
    on: Any, number: Any, group: Any, counts: Any, place: Any, pair: Any, sizes: Any,
    earlier: Any, with_own: Any, own: Any, *, M: int, E: int, B: int,
) -> None:  # fmt: skip
    """Place the pairs of an expert and a block, of which each warp has a quarter in a row."""
    expert, block, lane, warp = number // B, number % B, on.thread % WARP, on.thread // WARP
    each = BLOCK // THREADS
    pairs = [block * BLOCK + warp * (each * WARP) + i * WARP + lane for i in range(each)]
    found = [on.load(group, on.at_most(p, M - 1)) == expert for p in pairs]
    ballots = [on.ballot((p < M) & is_own) for p, is_own in zip(pairs, found, strict=True)]
    before: list[Any] = [0]  # of this expert's pairs in the warp
    for ballot in ballots:
        before.append(before[-1] + on.ones(ballot))
    sums = _sums_before(on, counts, E * B, (number, number - block + B))
    for shared, total in zip((earlier, with_own, own), (*sums, before[-1]), strict=True):
        on.store(shared, warp, total)  # by all lanes: without a branch
    on.barrier()

    start, end = (
        functools.reduce(lambda a, b: a + b, (on.load(s, i) for i in range(WARPS))) for s in (earlier, with_own)
    )
    of_warps = [on.select(warp > i, on.load(own, i), 0) for i in range(WARPS - 1)]
    first = functools.reduce(lambda a, b: a + b, of_warps, start)
    for p, ballot, done in zip(pairs, ballots, before[:-1], strict=True):
        to, is_own = first + done + on.ones(ballot & on.lanes_below(lane)), ((ballot >> lane) & 1) == 1
        on.store(place, p, to, is_own)
        on.store(pair, to, p, is_own)
    # the first block's program knows where the expert's pairs begin
    on.store(sizes, expert, end - start, (block == 0) & (on.thread == 0))


def _sums_before(on: Any, counts: Any, size: int, ends: tuple[Any, ...]) -> list[Any]:
    """Return a warp's part of the sums of the counts before each end."""
    sums: list[Any] = [0] * len(ends)
    for i in range(pl.cdiv(size, THREADS)):
        at = on.thread + i * THREADS
        value = on.select(at < size, on.load(counts, on.at_most(at, size - 1)), 0)
        sums = [x + on.select(at < end, value, 0) for x, end in zip(sums, ends, strict=True)]
    return [on.total(x) for x in sums]


# --- tiles ------------------------------------------------------------------------------------------------------------


class TileSizes(NamedTuple):
    """Describe tiles of rows: how many there are at most, their rows, and of what a tile's first row is a multiple."""

    tiles: int
    rows: int
    aligned: int


@functools.partial(jax.jit, static_argnames=("num_rows", "sizes_of_tiles"))
def tiles_of_groups(sizes: jax.Array, num_rows: int, sizes_of_tiles: TileSizes) -> tuple[jax.Array, ...]:
    """Return what kernels.gpu.grouped_parts.tiles_of does, by one kernel."""
    tiles = sizes_of_tiles
    out = [jax.ShapeDtypeStruct((n,), jnp.int32) for n in (*[tiles.tiles] * 4, 1)]
    program = functools.partial(divide, E=len(sizes), num_rows=num_rows, tiles=tiles)
    group, first, start, end, count = launch("tiles_of_groups", program, [sizes], out, len(sizes) + 1)
    return group, first, start, end, count


def divide(
    on: Any, number: Any, sizes: Any, group: Any, first: Any, start: Any, end: Any, count: Any,
    *, E: int, num_rows: int, tiles: TileSizes,
) -> None:  # fmt: skip
    """Write the tiles of a group; the last group, E, has the rows in no group, and the tiles that are not used."""
    lane = on.thread % WARP
    begin: Any = 0  # of the first group of the next 32
    own_begin: Any = 0
    own_size: Any = 0
    tiles_before: Any = 0
    for i in range(pl.cdiv(E, WARP)):
        each = lane + i * WARP
        size = on.select(each < E, on.load(sizes, on.at_most(each, E - 1)), 0)
        row = begin + on.below(size)
        own_begin, own_size = (x + on.select(each == number, y, 0) for x, y in ((own_begin, row), (own_size, size)))
        tiles_before = tiles_before + on.select(each < number, _tiles(on, row, size, tiles), 0)
        begin = begin + on.total(size)
    is_last = number == E
    own_begin = on.select(is_last, begin, on.total(own_begin))
    own_size = on.select(is_last, (begin - num_rows) * -1, on.total(own_size))
    tiles_before = on.total(tiles_before)
    own_tiles = _tiles(on, own_begin, own_size, tiles)

    own_first, own_end = own_begin // tiles.aligned * tiles.aligned, own_begin + own_size
    written = on.select(is_last, (tiles_before - tiles.tiles) * -1, own_tiles)
    for i in range(pl.cdiv(tiles.tiles, THREADS)):
        at = on.thread + i * THREADS
        tile, row, is_own = tiles_before + at, own_first + at * tiles.rows, at < written
        on.store(group, tile, number, is_own)
        on.store(first, tile, row, is_own)
        on.store(start, tile, on.select(row < own_begin, own_begin, row), is_own)
        on.store(end, tile, own_end, is_own)
    on.store(count, number - E, tiles_before + own_tiles, is_last & (on.thread == 0))


def _tiles(on: Any, begin: Any, size: Any, tiles: TileSizes) -> Any:
    """Return how many tiles a group from row `begin` on has."""
    rows = begin % tiles.aligned + size
    return on.select(size > 0, (rows + (tiles.rows - 1)) // tiles.rows, 0)
