"""Choose the experts of few tokens and arrange the tokens by expert for Hopper (Pallas, Mosaic GPU), a kernel each.

XLA takes about ten kernels for both, of 2 to 3 us each and with next to nothing to do.

T tokens, E experts, k experts per token, M = T k pairs, I tiles, N tokens of a tile, R rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from dovetail.ops.kernels.gpu.mosaic.threads import THREADS, WARP, WARPS, launch

MOST_CHOSEN = 16  # experts per token
MOST_EXPERTS, MOST_PAIRS = 512, 8192  # whose loops are unrolled
NONE = -(2**31)  # a key below all others
BITS = 0x7FFFFFFF  # of an f32, without its sign


# --- the choice -------------------------------------------------------------------------------------------------------


def why_not_top_k(router: Any, logits: Any, bias: Any) -> str | None:
    """Return why the kernel cannot choose, or None."""
    if logits.ndim != 2 or logits.dtype != jnp.float32:
        return "logits are not a matrix of f32"
    if bias is not None or router.groups > 1:
        return "the choice is not by logits alone"
    if router.score != "chosen" and not (router.score == "softmax" and router.normalize):
        return "weights are not a softmax over the chosen experts"
    if router.top_k > MOST_CHOSEN:
        return f"more than {MOST_CHOSEN} experts per token"
    if router.experts % WARP or router.experts > MOST_EXPERTS:
        return f"{router.experts} experts, not a multiple of {WARP} up to {MOST_EXPERTS}"
    return None


@functools.partial(jax.jit, static_argnames="router")  # the layers of a model share one lowered function
def route_top_k(router: Any, logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return what ops.moe.route does for logits [T, E], without a gradient. With NaN, experts are in range."""
    T, k = len(logits), router.top_k
    program = functools.partial(choose, T=T, E=router.experts, k=k, scale=router.scale)
    out = [jax.ShapeDtypeStruct((T, k), dtype) for dtype in (jnp.float32, jnp.int32)]
    weights, chosen = launch("route_top_k", program, [logits], out, pl.cdiv(T, WARPS))
    return weights, chosen


def choose(on: Any, number: Any, logits: Any, weights: Any, chosen: Any, *, T: int, E: int, k: int, scale: float):
    """Choose the experts of four tokens, each by a warp, which holds its logits and takes the greatest k times."""
    lane, token = on.thread % WARP, number * WARPS + on.thread // WARP
    first = on.at_most(token, T - 1) * E  # warps without a token read the last one's
    places = [lane + i * WARP for i in range(E // WARP)]
    keys = [_key(on, on.load(logits, first + place)) for place in places]
    found = []
    for _ in range(k):
        best, at = keys[0], places[0]
        for key, place in zip(keys[1:], places[1:], strict=True):
            is_better = key > best  # of equal ones the first
            best, at = on.select(is_better, key, best), on.select(is_better, place, at)
        top = on.greatest(best)
        at = on.least(on.select(best == top, at, E))
        found.append((_value(on, top), at))
        keys = [on.select(place == at, NONE, key) for key, place in zip(keys, places, strict=True)]
    powers = [on.exp(value - found[0][0]) for value, _ in found]
    weight, expert = powers[0], found[0][1]
    for i in range(1, k):
        weight, expert = on.select(lane == i, powers[i], weight), on.select(lane == i, found[i][1], expert)
    weight = weight / functools.reduce(lambda a, b: a + b, powers)
    is_one = (lane < k) & (token < T)
    on.store(weights, token * k + lane, weight * scale, is_one)
    on.store(chosen, token * k + lane, expert, is_one)


def _key(on: Any, x: Any) -> Any:
    """Return an integer that is in the order of f32 numbers."""
    bits = on.as_integer(x + 0.0)  # -0.0 equals 0.0 and must tie with it
    return on.select(bits < 0, bits ^ BITS, bits)


def _value(on: Any, key: Any) -> Any:
    """Return the number of a key."""
    return on.as_float(on.select(key < 0, key ^ BITS, key))


# --- the order --------------------------------------------------------------------------------------------------------


class Sizes(NamedTuple):
    """Describe an arrangement of tokens."""

    T: int
    k: int
    E: int
    N: int
    chunk: int  # an expert's rows begin at a multiple of it

    @property
    def M(self) -> int:
        """Return the pairs."""
        return self.T * self.k

    @property
    def tiles(self) -> int:
        """Return I, as many tiles as there can be."""
        return min(self.E, self.M) + self.M // self.N

    @property
    def rows(self) -> int:
        """Return R, as many rows as there can be."""
        return pl.cdiv(self.M + (self.chunk - 1) * min(self.E, self.M), self.chunk) * self.chunk


def arrangement(sizes: Sizes, otherwise: Callable) -> Callable:
    """Return a function from chosen [T, k] to table [4, I], row [T, k] and token [R].

    It is the kernel on a GPU, or else `otherwise` (kernels.gpu.experts.places).
    """
    if sizes.M > MOST_PAIRS or sizes.E > MOST_EXPERTS:
        return otherwise
    kernel = functools.partial(arrange, sizes=sizes)
    return lambda chosen: jax.lax.platform_dependent(chosen, cuda=kernel, default=otherwise)


@functools.partial(jax.jit, static_argnames="sizes")
def arrange(chosen: jax.Array, sizes: Sizes) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return what kernels.gpu.experts.places does, by one kernel."""
    shapes = (4, sizes.tiles), (sizes.T, sizes.k), (sizes.rows,)
    out = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes]
    counts = pl.cdiv(sizes.E + 1, THREADS) * THREADS
    program = functools.partial(place, sizes=sizes)
    table, row, token = launch(
        "arrange_tokens", program, [chosen.astype(jnp.int32)], out, sizes.E, shared=(counts, WARPS)
    )
    return table, row, token


def place(on: Any, expert: Any, chosen: Any, table: Any, row: Any, token: Any, counts: Any, sums: Any, sizes: Sizes):
    """Arrange the pairs of one expert. Each program reads all pairs: it counts those of the experts before its own.

    A warp takes M / 4 pairs in a row, so that the order of its own pairs follows from ballots.
    """
    M, E, thread = sizes.M, sizes.E, on.thread
    lane, warp = thread % WARP, thread // WARP
    each = pl.cdiv(M, THREADS)
    pairs = [warp * (each * WARP) + i * WARP + lane for i in range(each)]
    chosen_ids = [on.load(chosen, on.at_most(pair, M - 1)) for pair in pairs]
    for i in range(pl.cdiv(E + 1, THREADS)):
        on.store(counts, thread + i * THREADS, 0)
    on.barrier()
    # what is no pair counts as of expert E, and so would an expert that does not exist
    ids = [on.at_most(on.select(p < M, x, E), E) for p, x in zip(pairs, chosen_ids, strict=True)]
    for x in ids:
        on.increment(counts, x)
    ballots = [on.ballot(x == expert) for x in ids]
    before: list[Any] = [0]  # of this expert's pairs in the warp
    for ballot in ballots:
        before.append(before[-1] + on.ones(ballot))
    on.store(sums, warp, before[-1])  # by all lanes: without a branch
    on.barrier()

    start, first_tile, used = _before(on, expert, lane, counts, sizes)
    size = on.load(counts, expert)
    earlier = [on.select(warp > i, on.load(sums, i), 0) for i in range(WARPS - 1)]
    first = functools.reduce(lambda a, b: a + b, earlier, start)
    for pair, ballot, count in zip(pairs, ballots, before[:-1], strict=True):
        to = first + count + on.ones(ballot & on.lanes_below(lane))
        is_own = ((ballot >> lane) & 1) == 1
        on.store(row, pair, to, is_own)
        on.store(token, to, pair // sizes.k, is_own)

    # rows of no pair: those up to the next expert's, and a part of those after the last one's
    up = start + size + thread
    on.store(token, up, 0, up < start + _chunks(size, sizes.chunk))
    up = used + expert * THREADS + thread
    on.store(token, up, 0, up < sizes.rows)

    # the last expert has the tiles that are not used, too
    end = on.select(expert == E - 1, sizes.tiles, first_tile + (size + (sizes.N - 1)) // sizes.N)
    for i in range(pl.cdiv(sizes.tiles, THREADS)):
        offset = (thread + i * THREADS) * sizes.N
        tile = first_tile + thread + i * THREADS
        left = on.select(offset < size, size - offset, 0)
        columns = expert, start + offset, start + offset, on.at_most(left, sizes.N)
        for at, value in enumerate(columns):
            on.store(table, tile + at * sizes.tiles, value, tile < end)


def _before(on: Any, expert: Any, lane: Any, counts: Any, sizes: Sizes) -> tuple[Any, Any, Any]:
    """Return the rows and the tiles of the experts before this one, and the rows of all."""
    start: Any = 0
    first_tile: Any = 0
    used: Any = 0
    for i in range(pl.cdiv(sizes.E, WARP)):
        each = lane + i * WARP
        size = on.select(each < sizes.E, on.load(counts, each), 0)
        rows, is_before = _chunks(size, sizes.chunk), each < expert
        used = used + rows
        start = start + on.select(is_before, rows, 0)
        first_tile = first_tile + on.select(is_before, (size + (sizes.N - 1)) // sizes.N, 0)
    return on.total(start), on.total(first_tile), on.total(used)


def _chunks(size: Any, chunk: int) -> Any:
    """Return the size rounded up."""
    return (size + (chunk - 1)) // chunk * chunk
