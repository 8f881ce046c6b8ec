"""Decode attention by warps, for ops/kernels/gpu/decode.py: few queries per key head, on Hopper (Pallas, Mosaic GPU).

No warp waits for another one until the end. The four warps of a program take turns along the keys, CHUNK at a time:
S^T = K Q^T [16, C], then O^T = V^T P^T [H, C], in products of a warp (mma), whose operands decode_keys.py provides.
Chunks are copied ahead of time. Keys past the end are zeros, whose scores are hidden: what unused slots of a page hold
is never seen. At the end the warps' sums are joined in shared memory.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from dovetail.ops.kernels.gpu.decode_keys import (
    BLOCK,
    HIDDEN,
    QUAD,
    ROWS,
    WarpKeys,
    WarpPart,
    WarpShape,
    column_of,
    queries_of,
    value_pairs,
)
from dovetail.ops.kernels.gpu.mosaic.threads import THREADS, WARP, WARPS

LEAST = 1e-30  # sum of weights that is divided by


class Softmax(NamedTuple):
    """Hold what a warp has summed up, for the two columns of a thread in each block."""

    top: list  # maxima, in base 2
    total: list  # sums of the thread's own keys
    out: list  # for each block the sums of each product: 16 dims


def attend(on: Any, part: WarpPart, refs: list, shape: WarpShape) -> None:
    """Attend to a part of the keys and store the output and, if there are several parts, its log-sum-exp."""
    tables, q, pages, sinks, out, lse, held, stats = refs
    warp = WarpKeys(on, part, tables, pages, held, shape)
    first = part.begin + on.thread // WARP
    page = warp.pages(first)
    for ahead in range(shape.stages - 1):
        warp.copy(first + ahead * WARPS, page, ahead * shape.chunk_words + warp.memory)
        page = warp.pages(first + (ahead + 1) * WARPS)
    queries = queries_of(on, part, q, shape)
    zero = on.constant(0.0)
    pairs = 2 * len(shape.blocks)
    tiles = [[[zero] * 4 for _ in range(shape.dim // 16)] for _ in shape.blocks]
    start = Softmax([on.constant(HIDDEN)] * pairs, [zero] * pairs, tiles)

    def turn(chunk: Any, carry: tuple) -> tuple:
        sums, page, slot = carry
        ahead = chunk + (shape.stages - 1) * WARPS
        on.await_copies(shape.stages - 2)
        on.meet()  # threads read what others copied
        warp.copy(ahead, page, warp.memory + warp.before(slot) * shape.chunk_words)  # used in the last turn
        page = warp.pages(ahead + WARPS)
        here = warp.memory + slot * shape.chunk_words
        scores = warp.scores(chunk, warp.keys(here), queries)
        sums, weights = _weigh(on, sums, scores)
        sums = _add(on, sums, warp.values(here), weights, shape)
        return sums, page, warp.after(slot)

    sums, *_ = on.loop(first, part.end, WARPS, turn, (start, page, part.split * 0))
    places = _places(on, part, sinks, shape)
    on.await_copies(0)
    on.meet()
    _hold(on, sums, held, stats, shape)
    on.barrier()
    _store(on, part, places, out, lse, held, stats, shape)


def skip(on: Any, part: WarpPart, lse: Any, s: WarpShape) -> None:
    """Store that a part has no keys."""
    row, is_one = column_of(on, part, on.thread, s)
    on.store(lse, row + part.split * (s.tokens * s.heads), on.constant(HIDDEN), is_one)


# --- the softmax ------------------------------------------------------------------------------------------------------


def _weigh(on: Any, sums: Softmax, scores: list) -> tuple[Softmax, list]:
    """Return the sums, scaled to the new maxima and without the new values, and the weights as right operands."""
    tops, totals, outs, weights = [], [], [], []
    for block, own in enumerate(scores):
        shrinks, shares = [], []
        for i in (0, 1):
            old = sums.top[2 * block + i]
            top = on.maximum(old, _over_rows(on, on.maximum(own[i], own[2 + i]), on.maximum))
            shrinks.append(on.exp2(old - top))
            shares.append([on.exp2(own[2 * half + i] - top) for half in (0, 1)])
            tops.append(top)
            totals.append(on.fma(sums.total[2 * block + i], shrinks[i], shares[i][0] + shares[i][1]))
        outs.append([[x * shrinks[i % 2] for i, x in enumerate(tile)] for tile in sums.out[block]])
        weights.append([(shares[0][half], shares[1][half]) for half in (0, 1)])
    return Softmax(tops, totals, outs), weights


def _over_rows(on: Any, x: Any, join: Any) -> Any:
    """Return the join over the eight threads that share columns."""
    for bits in (4, 8, 16):
        x = join(x, on.other_lane(x, bits))
    return x


def _add(on: Any, sums: Softmax, values: list, weights: list, s: WarpShape) -> Softmax:
    """Add the values of a chunk by their weights."""
    right = [[on.transposed(on.pair(*pair, s.kind)) for pair in each] for each in weights]
    left = [tile for words in zip(*values, strict=True) for tile in value_pairs(on, list(words), s)]
    out = [
        [on.multiply(total, tile, right[block], s.kind) for total, tile in zip(sums.out[block], left, strict=True)]
        for block in s.blocks
    ]
    return sums._replace(out=out)


# --- the join of the warps --------------------------------------------------------------------------------------------


def _hold(on: Any, sums: Softmax, held: Any, stats: Any, s: WarpShape) -> None:
    """Store the sums of a warp: `held` [warp, column, s.held] and `stats` [2, warp, column]."""
    lane, warp = on.thread % WARP, on.thread // WARP
    tiles = s.value_dims // 2  # of a thread's neighbouring dims
    for at in range(2 * len(s.blocks)):
        block, i = divmod(at, 2)
        column = warp * s.columns + (lane % QUAD * 2 + (block * BLOCK + i))
        on.store(stats, column, sums.top[at])
        on.store(stats, column + WARPS * s.columns, _over_rows(on, sums.total[at], lambda x, y: x + y))
        for first in range(0, len(sums.out[block]), tiles):
            dims = [tile[i + 2 * j] for tile in sums.out[block][first : first + tiles] for j in (0, 1)]
            place = (
                warp * s.warp_words
                + (lane % QUAD * 2 + (block * BLOCK + i)) * s.held
                + (lane // QUAD + first // tiles * ROWS) * (s.value_dims + 4)
            )
            for x in range(0, len(dims), 4):
                on.store_all(held, place + x, dims[x : x + 4])


def _places(on: Any, part: WarpPart, sinks: Any, s: WarpShape) -> list[tuple]:
    """Return the thread's columns, their first dims, rows, whether they have one, and their sinks.

    A sink belongs to the first part. It is loaded before the barrier that all wait for.
    """
    found = []
    for run in range(s.columns * s.dim // (4 * THREADS)):
        place = on.thread * 4 + run * 4 * THREADS
        column = place // s.dim
        row, is_one = column_of(on, part, column, s)
        sink = None if sinks is None else on.select(part.split == 0, on.load(sinks, row % s.heads), HIDDEN)
        found.append((column, place % s.dim, row, is_one, sink))
    return found


def _store(on: Any, part: WarpPart, places: list, out: Any, lse: Any, held: Any, stats: Any, s: WarpShape) -> None:
    """Join the warps, and the sink with the first part; store four dims of a column at a time."""
    for column, dim, row, is_one, sink in places:
        weights, whole, most = _weights(on, column, stats, sink, s)
        total = [on.constant(0.0)] * 4
        for warp, weight in enumerate(weights):
            at = column * s.held + warp * s.warp_words + dim // s.value_dims * (s.value_dims + 4) + dim % s.value_dims
            total = [on.fma(x, weight, y) for x, y in zip(on.floats(held, at, 4), total, strict=True)]
        inverse = on.inverse(on.maximum(whole, on.constant(LEAST)))
        values = [x * inverse for x in total]
        row = row + part.split * (s.tokens * s.heads)
        if s.splits == 1:
            values = [on.pair(values[i], values[i + 1], "bf16") for i in (0, 2)]
        else:
            on.store(lse, row, most + on.log2(on.maximum(whole, on.constant(LEAST))), is_one & (dim == 0))
        on.store_all(out, row * s.dim + dim, values, is_one)


def _weights(on: Any, column: Any, stats: Any, sink: Any, s: WarpShape) -> tuple[list, Any, Any]:
    """Return the weights of the warps' sums of a column, the sum of all weights, and the greatest score."""
    tops, totals = ([on.load(stats, column + (i * WARPS + w) * s.columns) for w in range(WARPS)] for i in (0, 1))
    most = tops[0] if sink is None else on.maximum(tops[0], sink)
    for top in tops[1:]:
        most = on.maximum(most, top)
    weights = [on.exp2(top - most) for top in tops]
    whole = on.constant(0.0) if sink is None else on.exp2(sink - most)
    for weight, total in zip(weights, totals, strict=True):
        whole = on.fma(weight, total, whole)
    return weights, whole, most


# --- the join of the parts --------------------------------------------------------------------------------------------


def join(on: Any, number: Any, parts: Any, lse: Any, out: Any, *, rows: int, dim: int, splits: int) -> None:
    """Join the parts [splits, rows, dim] of four rows, each by a warp. Only parts with keys are read."""
    own = number * WARPS + on.thread // WARP
    row, lane, per = on.at_most(own, rows - 1), on.thread % WARP, min(4, dim // WARP)
    tops = [on.load(lse, row + i * rows) for i in range(splits)]
    most = functools.reduce(on.maximum, tops)
    weights = [on.exp2(top - most) for top in tops]
    inverse = on.inverse(functools.reduce(lambda x, y: x + y, weights))
    for start in range(0, dim, per * WARP):
        total = [on.constant(0.0)] * per
        for i, weight in enumerate(weights):
            place = on.select(on.as_integer(weight) > 0, row + i * rows, row)  # of a float above 0, too
            found = on.floats(parts, place * dim + lane * per + start, per)
            total = [on.fma(x, weight, y) for x, y in zip(found, total, strict=True)]
        words = [on.pair(total[i] * inverse, total[i + 1] * inverse, "bf16") for i in range(0, per, 2)]
        on.store_all(out, row * dim + lane * per + start, words, own < rows)
