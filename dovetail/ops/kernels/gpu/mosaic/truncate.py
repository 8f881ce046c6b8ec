"""Find what min-p, top-k and top-p keep of rows of logits, 16 warps for each row, for Hopper (Pallas, Mosaic GPU).

A token's place is told by its distance from the row's greatest logit (`row_line`). The FEW blocks with the greatest
maxima are looked at first: they hold every token nearer than the nearest one of the others, the edge, and most
thresholds lie before that. Beyond it, passes over the row narrow a threshold down until the tokens that may be it fit
into shared memory. Thresholds are exact either way.

A thread keeps tokens in shared memory in slots of its own: nothing depends on the order in which threads run.

S rows, M blocks of 128 tokens, Mp = M rounded up to a multiple of 128.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dovetail.ops.kernels.gpu.mosaic.row_line import FAR, PAST, KeyBounds, RowLine, even, near, search
from dovetail.ops.kernels.gpu.mosaic.row_ops import THREADS, WARPGROUPS, WARPS, RowThreads
from dovetail.ops.kernels.gpu.mosaic.threads import launch
from dovetail.ops.kernels.gpu.noise import BLOCK, COLDEST

FEW = 64  # blocks that are looked at first, a multiple of the warps
ENOUGH = 56  # of them: a search for exactly FEW would take longer
LISTED = 128  # columns of the list of blocks, which a warpgroup reads at once
SLOTS = 32  # of a thread, at least BLOCK * FEW / THREADS
ROOM = SLOTS * THREADS * 3 // 8  # tokens that are expected to fit: threads have some more or less than others
LOG2E = math.log2(math.e)


class KeptTokens(NamedTuple):
    """Say which tokens of rows that truncate stay: those within `far` whose weight is not below that of `cut`."""

    far: jax.Array  # [S] f32, a distance
    cut: jax.Array  # [S] f32, too
    found: jax.Array  # [S] int32: the blocks that have all of them; 0 if they are all over the row
    blocks: jax.Array  # [S, LISTED] int32, these blocks
    masses: jax.Array  # [S, Mp] f32: what stays of the weight of these blocks, or of every block of the row


def keep(logits: jax.Array, maxima: jax.Array, masses: jax.Array, inputs: Any) -> KeptTokens:
    """Truncate rows [S, M, BLOCK] as ops.sample.truncate does. Of a row that asks for nothing, nothing is written."""
    (S, M, _), Mp = logits.shape, maxima.shape[1]
    given = [inputs.temperature, inputs.top_k, inputs.top_p, inputs.min_p, maxima, masses, logits]
    numbers, integers = (functools.partial(jax.ShapeDtypeStruct, dtype=dtype) for dtype in (jnp.float32, jnp.int32))
    out = [numbers((S,)), numbers((S,)), integers((S,)), integers((S, LISTED)), numbers((S, Mp))]
    shared = (SLOTS + 1) * THREADS, 4 * WARPS, FEW
    program = functools.partial(truncate, M=M, Mp=Mp)
    return KeptTokens(*launch("truncate_rows", program, given, out, S, shared, RowThreads(), WARPGROUPS))


def truncate(on: Any, row: Any, *refs: Any, M: int, Mp: int) -> None:
    """Write what stays of a row."""
    temperature, k, p, min_p = (on.load(ref, row) for ref in refs[:4])
    line = RowLine(on, row, refs[4:7], refs[12:], M, Mp)
    positive, one = on.constant(0.0), on.constant(1.0)
    has_k, has_p = (k > 0) & (k < M * BLOCK), line.less(p, one)
    asks = on.select(has_k, 1, on.select(has_p, 1, on.select(line.less(positive, min_p), on.integer(1), 0)))

    def run(_: Any) -> Any:
        heat = on.maximum(temperature, on.constant(COLDEST))
        Truncation(line, heat, on.number(k), p, min_p, has_k, has_p).write(refs[7:12])
        return on.integer(0)

    on.branch((asks > 0) & line.less(positive, temperature), run, on.integer(0))


class HeldTokens(NamedTuple):
    """Hold tokens of an interval in shared memory."""

    own: Any  # of the thread
    most: Any  # of any thread
    low: Any
    high: Any
    before: Any  # what there is up to `low`


class Truncation:
    """Truncate a row."""

    def __init__(self, line: RowLine, heat: Any, k: Any, p: Any, min_p: Any, has_k: Any, has_p: Any) -> None:
        self.line, self.on, self.heat = line, line.on, heat
        self.k, self.p, self.min_p, self.has_k, self.has_p = k, p, min_p, has_k, has_p
        self.cooled = self.on.constant(-LOG2E) / heat

    def write(self, out: Any) -> None:
        """Find thresholds and write what stays."""
        on, line = self.on, self.line
        self._choose_blocks()
        far = self._farthest(on.constant(0.0) - on.log(self.min_p))
        far, cut = on.loop(on.integer(0), on.integer(2), 1, self._stage, [far, on.integer(FAR)])
        edge_stays = on.select(line.less(self._weigh(self.edge), self._weigh(cut)), 0, on.integer(1))
        in_few = on.select(far < self.edge, on.integer(1), on.select(edge_stays > 0, on.integer(0), 1))
        in_few = on.select(self.found > 0, in_few, 0)
        for ref, x in zip(out, (on.as_float(far), on.as_float(cut), in_few * self.found), strict=False):
            on.store(ref, line.row, x)  # by all threads: without a branch
        self._write_masses(out[4], out[3], far, cut, in_few > 0)

    # --- blocks -------------------------------------------------------------------------------------------------------

    def _choose_blocks(self) -> None:
        """Choose the few blocks, find the edge, and the row's greatest logit and weight."""
        on, line = self.on, self.line
        numbers = [on.thread + i * THREADS for i in range(-(-line.M // THREADS))]
        places = [line.row * line.Mp + on.at_most(x, line.M - 1) for x in numbers]
        maxima = [on.load(line.maxima, at) for at in places]
        self.top = top = line.maximum(functools.reduce(on.maximum, maxima))
        differences = [on.at_most(on.as_integer(top - x), PAST) for x in maxima]  # of a NaN with a sign too
        distances = [on.select(x < line.M, d, PAST) for x, d in zip(numbers, differences, strict=True)]
        weights = [
            on.select(d < FAR, on.load(line.masses, at) * self._weigh(d), 0.0)
            for d, at in zip(distances, places, strict=True)
        ]
        (self.total,) = line.sum([functools.reduce(lambda x, y: x + y, weights)])
        limit = self._limit_of_few(distances)
        chosen = [on.select(d > limit, on.integer(0), 1) for d in distances]
        at, self.found = line.before(functools.reduce(lambda x, y: x + y, chosen))
        for number, is_chosen in zip(numbers, chosen, strict=True):
            on.store(line.blocks, at, number, is_chosen > 0)
            at = at + is_chosen
        others = [on.select(x > 0, 0, d ^ PAST) for x, d in zip(chosen, distances, strict=True)]
        self.edge = line.greatest(functools.reduce(lambda x, y: on.select(x > y, x, y), others)) ^ PAST

    def _limit_of_few(self, distances: list[Any]) -> Any:
        """Return a distance within which there are at most FEW blocks."""
        on, line = self.on, self.line
        if line.M <= FEW:
            return on.integer(PAST - 1)
        zero = on.constant(0.0)

        def count(keys: list[Any]) -> list[Any]:
            each = [[on.select(d > key, zero, 1.0) for d in distances] for key in keys]
            return line.sum([functools.reduce(lambda x, y: x + y, found) for found in each])

        bounds = KeyBounds(on.integer(-1), on.integer(FAR), zero, on.constant(float(line.M)))
        enough, target = on.constant(float(ENOUGH)), on.constant(FEW + 1.0)
        return search(line, count, target, bounds, near, lambda bounds: line.less(bounds.at_low, enough)).low

    # --- thresholds ---------------------------------------------------------------------------------------------------

    def _weigh(self, distance: Any, cooled: Any = None) -> Any:
        """Return the weight of a token; with `cooled` 0, 1 for each but that at -inf."""
        on = self.on
        exponent = on.as_float(distance) * (self.cooled if cooled is None else cooled)
        return on.exp2(on.maximum(exponent, on.constant(-200.0)))

    def _farthest(self, limit: Any) -> Any:
        """Return the greatest distance that, divided by the temperature, is at most `limit`."""
        on, line = self.on, self.line
        first = on.as_integer(limit * self.heat) - 2
        found = on.select(first < 0, 0, first)
        for i in range(1, 5):
            key = on.select(first + i < 0, 0, first + i)
            found = on.select(line.less(limit, on.as_float(key) / self.heat), found, key)
        return found

    def _stage(self, stage: Any, carry: list[Any]) -> list[Any]:
        """Find the threshold of top-k, then that of top-p."""
        on = self.on
        far, cut = carry
        is_k = stage < 1
        asks = on.select(is_k, on.select(self.has_k, on.integer(1), 0), on.select(self.has_p, on.integer(1), 0))
        cooled = on.select(is_k, 0.0, self.cooled)

        def find(carry: list[Any]) -> list[Any]:
            far, cut = carry
            found = self._find(is_k, cooled, far)
            # division may round several distances to one
            within = on.lesser(far, self._farthest(on.as_float(found) / self.heat))
            return [on.select(is_k, within, far), on.select(is_k, cut, found)]

        return on.branch(asks > 0, find, [far, cut])

    def _find(self, is_k: Any, cooled: Any, far: Any) -> Any:
        """Return the least distance within which there is the target, at most `far`."""
        on, line = self.on, self.line
        weigh = functools.partial(self._weigh, cooled=cooled)
        end = on.lesser(far, on.lesser(self.edge - 1, on.integer(FAR - 1)))
        held = self._hold_few(end)
        (at_end,) = self._in_slots(held, weigh)([end])
        total = self._total(is_k, weigh, far, end, at_end)
        target = on.select(is_k, self.k, self.p * total)

        def in_row(_: Any) -> tuple[HeldTokens, Any]:
            # beyond this distance all tokens of the row would weigh too little
            light = (on.constant(1.0) - self.p) * total / on.constant(float(line.M * BLOCK))
            bound = on.as_integer((on.log2(light) - 2.0) / self.cooled)
            high = on.select(is_k, far, on.lesser(far, bound))
            held = self._hold_row(weigh, target, KeyBounds(self.edge - 1, high, at_end, total))
            return held, self._in_slots(held, weigh)([held.high])[0]

        held, at_end = on.branch(line.less(at_end, target), in_row, (held, at_end))
        return self._find_held(weigh, held, target - held.before, at_end)

    def _total(self, is_k: Any, weigh: Callable, far: Any, end: Any, at_end: Any) -> Any:
        """Return what there is within `far`: of top-k, all tokens are assumed to be."""
        on, line = self.on, self.line
        of_row = on.select(is_k, on.constant(float(line.M * BLOCK)), self.total)
        apart = on.select(is_k, 0, on.select(far > end, on.select(far < FAR, on.integer(1), 0), 0))
        total = on.select(far > end, of_row, at_end)
        return on.branch(apart > 0, lambda _: self._in_row(weigh)([far])[0], total)

    def _in_slots(self, held: HeldTokens, weigh: Callable) -> Callable:
        """Return the function that measures the tokens held."""
        on, line = self.on, self.line

        def measure(keys: list[Any]) -> list[Any]:
            def turn(i: Any, sums: list[Any]) -> list[Any]:
                d = self._slot(i, held.own)
                weight = weigh(d)
                return [x + on.select(d > key, 0.0, weight) for x, key in zip(sums, keys, strict=True)]

            zeros = [on.constant(0.0) for _ in keys]
            return line.sum(on.loop(on.integer(0), held.most, 1, turn, zeros))

        return measure

    def _slot(self, i: Any, own: Any) -> Any:
        on = self.on
        return on.select(i < own, on.load(self.line.slots, i * THREADS + on.thread), PAST)

    def _in_row(self, weigh: Callable) -> Callable:
        """Return the function that measures all tokens."""
        on, line = self.on, self.line

        def measure(keys: list[Any]) -> list[Any]:
            def add(d: Any, sums: list[Any]) -> list[Any]:
                weight = weigh(d)
                return [x + on.select(d > key, 0.0, weight) for x, key in zip(sums, keys, strict=True)]

            return line.sum(line.over(self.top, add, [on.constant(0.0) for _ in keys]))

        return measure

    def _put(self, d: Any, own: Any, low: Any, high: Any) -> Any:
        """Hold a token if it is in the interval; the place of the next one is overwritten in any case."""
        on = self.on
        on.store(self.line.slots, on.at_most(own, SLOTS) * THREADS + on.thread, d)
        return own + on.select(d > low, on.select(d > high, on.integer(0), 1), 0)

    def _hold_few(self, end: Any) -> HeldTokens:
        """Hold the tokens of the few blocks up to `end`."""
        on, line = self.on, self.line
        own, low = on.integer(0), on.integer(-1)
        read = []
        for number in range(0, FEW, WARPS):
            is_block = line.warp + number < self.found
            block = on.select(is_block, on.load(line.blocks, line.warp + number), 0)
            found = line.distances(on.at_most(block, line.M - 1) * BLOCK + line.lane * 4, self.top)
            read += [on.select(is_block, d, PAST) for d in found]
        for d in read:
            own = self._put(d, own, low, end)
        return HeldTokens(own, line.greatest(own), low, end, on.constant(0.0))

    def _hold_row(self, weigh: Callable, target: Any, bounds: KeyBounds) -> HeldTokens:
        """Hold the tokens among which the threshold is; if they do not fit, narrow it down to the last bit."""
        on, line = self.on, self.line

        def too_many(bounds: KeyBounds) -> Any:
            return line.less(weigh(bounds.high) * float(ROOM), bounds.at_high - bounds.at_low)

        bounds = search(line, self._in_row(weigh), target, bounds, even, too_many)
        own = line.over(self.top, lambda d, own: self._put(d, own, bounds.low, bounds.high), on.integer(0))
        most = line.greatest(own)
        is_full = most > SLOTS
        # a loop that does not begin unless the tokens are too many
        bounds = search(line, self._in_row(weigh), target, bounds, even, lambda _: is_full)
        nothing = on.select(is_full, on.integer(0), 1)
        return HeldTokens(own * nothing, most * nothing, bounds.low, bounds.high, bounds.at_low)

    def _find_held(self, weigh: Callable, held: HeldTokens, target: Any, at_end: Any) -> Any:
        """Return the distance of the token held with which there is the target."""
        on, line = self.on, self.line

        def several(bounds: KeyBounds) -> Any:
            return line.less(weigh(bounds.high) * 1.5, bounds.at_high - bounds.at_low)

        bounds = KeyBounds(held.low, held.high, on.constant(0.0), at_end)
        high = search(line, self._in_slots(held, weigh), target, bounds, near, several).high

        def last(i: Any, found: Any) -> Any:
            d = self._slot(i, held.own)
            return on.select(d > high, found, on.select(d > found, d, found))

        found = line.greatest(on.loop(on.integer(0), held.most, 1, last, on.integer(-1)))
        return on.select(found < 0, high, found)

    # --- what stays ---------------------------------------------------------------------------------------------------

    def _write_masses(self, masses: Any, listed: Any, far: Any, cut: Any, in_few: Any) -> None:
        """Write what stays of the weight of the few blocks, or of all, a warp each."""
        on, line = self.on, self.line
        least = self._weigh(cut)
        each = FEW // WARPS

        def mass(block: Any) -> Any:
            weights = []
            for d in line.distances(on.at_most(block, line.M - 1) * BLOCK + line.lane * 4, self.top):
                weight = self._weigh(d)
                weights.append(on.select(d > far, 0.0, on.select(line.less(weight, least), 0.0, weight)))
            return (weights[0] + weights[1]) + (weights[2] + weights[3])

        def turn(first: Any, carry: Any) -> Any:
            places = [first + line.warp + i * WARPS for i in range(each)]
            known = [on.load(line.blocks, on.at_most(at, FEW - 1)) for at in places]
            blocks = [on.select(in_few, x, at) for x, at in zip(known, places, strict=True)]
            found = [mass(block) for block in blocks]
            for bits in (1, 2, 4, 8, 16):
                found = [x + on.other_lane(x, bits) for x in found]
            is_first = line.lane < 1
            for at, block, x in zip(places, blocks, found, strict=True):
                on.store(masses, line.row * line.Mp + at, x, is_first & (at < line.Mp))
                on.store(listed, line.row * LISTED + at, block, is_first & (at < FEW))
            return carry

        count = on.select(in_few, on.integer(FEW), line.M)
        on.loop(on.integer(0), count, FEW, turn, on.integer(0))
