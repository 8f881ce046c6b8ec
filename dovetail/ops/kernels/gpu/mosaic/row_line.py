"""A row of logits as the 16 warps see it that truncate it, and the search for a threshold (Pallas, Mosaic GPU).

The distance of a token is that of its logit from the row's greatest, top - x; its bits are an integer in its order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from dovetail.ops.kernels.gpu.mosaic.row_ops import THREADS, WARPS, join_all
from dovetail.ops.kernels.gpu.mosaic.threads import WARP
from dovetail.ops.kernels.gpu.noise import BLOCK

LOADS = 4  # of four tokens that a thread has under way
FAR, PAST = 0x7F800000, 0x7FFFFFFF  # the distance of -inf, and of what is no token


class RowLine:
    """Access a program's row and its shared memory."""

    def __init__(self, on: Any, row: Any, given: Any, shared: Any, M: int, Mp: int) -> None:
        self.on, self.row, self.M, self.Mp = on, row, M, Mp
        self.maxima, self.masses, self.logits = given
        self.slots, self.sums, self.blocks = shared
        self.lane, self.warp = on.thread % WARP, on.thread // WARP

    def less(self, x: Any, y: Any) -> Any:
        """Return whether x < y, numbers that are not negative."""
        return self.on.as_integer(x) < self.on.as_integer(y)

    def distances(self, place: Any, top: Any) -> list[Any]:
        """Return the distances of the four tokens from `place` on."""
        return [
            self.on.as_integer(top - x) for x in self.on.floats(self.logits, self.row * (self.M * BLOCK) + place, 4)
        ]

    def over(self, top: Any, use: Callable, carry: Any) -> Any:
        """Return carry = use(distance, carry) over a thread's share of the row."""
        on, size, step = self.on, self.M * BLOCK, 4 * THREADS * LOADS

        def turn(first: Any, carry: Any) -> Any:
            places = [first + on.thread * 4 + i * (4 * THREADS) for i in range(LOADS)]
            read = [self.distances(on.at_most(at, size - 4), top) for at in places]  # all before the first use
            for at, found in zip(places, read, strict=True):
                for d in found:
                    carry = use(on.select(at < size, d, PAST), carry)
            return carry

        return on.loop(on.integer(0), on.integer(size), step, turn, carry)

    def maximum(self, x: Any) -> Any:
        """Return the greatest number of all threads."""
        return self._joined(x, self.on.maximum)

    def sum(self, xs: list[Any]) -> list[Any]:
        """Return the sums of up to four numbers over all threads, in every thread the same."""
        if len(xs) == 1:
            return [self._joined(xs[0], lambda x, y: x + y)]
        on, lane = self.on, self.lane
        is_odd, is_upper = lane % 2 > 0, lane % 4 > 1
        a, b, c, d = [*xs, *[on.constant(0.0)] * (4 - len(xs))]
        # exchanges take the longest: each lane goes on with one of the four sums
        kept, given = ([on.select(is_upper, *pair) for pair in pairs] for pairs in (((c, a), (d, b)), ((a, c), (b, d))))
        a, b = (x + on.other_lane(y, 2) for x, y in zip(kept, given, strict=True))
        x = on.select(is_odd, b, a) + on.other_lane(on.select(is_odd, a, b), 1)
        for bits in (4, 8, 16):
            x = x + on.other_lane(x, bits)
        on.store(self.sums, lane % 4 * WARPS + self.warp, on.as_integer(x))  # by all lanes: without a branch
        on.barrier()
        first = lane % 4 * WARPS + lane // 4
        x, y = (on.as_float(on.load(self.sums, first + at)) for at in (0, WARP // 4))
        x = x + y
        for bits in (4, 8, 16):
            x = x + on.other_lane(x, bits)
        y = on.other_lane(x, 1)
        a, b = on.select(is_odd, y, x), on.select(is_odd, x, y)
        c, d = on.other_lane(a, 2), on.other_lane(b, 2)
        on.barrier()
        found = [on.select(is_upper, *pair) for pair in ((c, a), (d, b), (a, c), (b, d))]
        return found[: len(xs)]

    def _joined(self, x: Any, join: Callable) -> Any:
        x = join_all(self.on, x, join, self.sums)
        self.on.barrier()
        return x

    def greatest(self, x: Any) -> Any:
        """Return the greatest integer of all threads."""
        on = self.on
        on.store(self.sums, self.warp, on.greatest(x))
        on.barrier()
        x = on.greatest(on.load(self.sums, self.lane % WARPS))
        on.barrier()
        return x

    def before(self, x: Any) -> tuple[Any, Any]:
        """Return the sum of the integers of the threads before, and of all."""
        on = self.on
        on.store(self.sums, self.warp, on.total(x))
        on.barrier()
        totals = on.select(self.lane < WARPS, on.load(self.sums, self.lane % WARPS), 0)
        before = on.total(on.select(self.lane < self.warp, totals, 0))
        found = before + on.below(x), on.total(totals)
        on.barrier()
        return found


class KeyBounds(NamedTuple):
    """Enclose a distance: within `low` there is less than the target, within `high` there may be enough."""

    low: Any
    high: Any
    at_low: Any  # what there is within them
    at_high: Any


def search(
    line: RowLine, measure: Callable, target: Any, bounds: KeyBounds, keys: Callable, goes_on: Callable
) -> KeyBounds:
    """Narrow the bounds by measures at some `keys` between them at a time, while there are any and `goes_on`."""
    on = line.on

    def turn(bounds: KeyBounds) -> KeyBounds:
        low, high, at_low, at_high = bounds
        tried = keys(high, high - low)
        sums = measure(tried)
        short = [line.less(x, target) for x in sums]
        for key, x, is_short in [*zip(tried, sums, short, strict=True)][::-1]:
            high, at_high = on.select(is_short, high, key), on.select(is_short, at_high, x)
        for key, x, is_short in zip(tried, sums, short, strict=True):
            low, at_low = on.select(is_short, key, low), on.select(is_short, x, at_low)
        return KeyBounds(low, high, at_low, at_high)

    return on.repeat(lambda bounds: (bounds.high - bounds.low > 1) & goes_on(bounds), turn, bounds)


def near(high: Any, gap: Any) -> list[Any]:
    """Return keys of which some are close to `high`, where most tokens are."""
    return [high - (gap >> shift) for shift in (1, 2, 4, 6)]


def even(high: Any, gap: Any) -> list[Any]:
    """Return keys at equal steps."""
    return [high - (gap >> 1) - (gap >> 2), high - (gap >> 1), high - (gap >> 2)]
