"""Several sources as one stream: which source row i comes from, and which of its rows, without counting up to i.

The schedule is a cycle in which each source's share of the first n rows is never off by a whole row (Tijdeman's
solution of the chairman assignment problem). Each source runs through its own epochs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction

import numpy as np

from dovetail.core.types import Batch
from dovetail.data.pack import Packing, Piece
from dovetail.data.shuffle import ranks

LONGEST_CYCLE = 1 << 16  # weights whose exact cycle is longer are rounded to shares of this: by less than 0.002%


class Mixture:
    def __init__(self, sources: Sequence[Packing], weights: Sequence[float], seed: int):
        self.sources, self.length = tuple(sources), sources[0].length
        shares = cycle_shares(weights)
        self._cycle = _schedule(shares, np.argsort(ranks(len(shares), seed)))
        self._counts = np.zeros((len(self._cycle) + 1, len(shares)), np.int64)  # rows of each source before each place
        np.cumsum(self._cycle[:, None] == np.arange(len(shares)), axis=0, out=self._counts[1:])

    @property
    def tokens(self) -> int:
        """Of all sources, each once."""
        return sum(source.tokens for source in self.sources)

    def locate(self, i: int) -> tuple[int, int]:
        """(source, its row): where row i of the run comes from."""
        source = int(self._cycle[i % len(self._cycle)])
        return source, int(self.taken(i)[source])

    def taken(self, rows: int) -> np.ndarray:
        """[sources] how many of the first `rows` rows come from each."""
        cycles, at = divmod(rows, len(self._cycle))
        return cycles * self._counts[-1] + self._counts[at]

    def row(self, i: int) -> Batch:
        source, row = self.locate(i)
        return self.sources[source].row(row)

    def empty(self) -> Batch:
        """Return a row of padding."""
        return self.sources[0].empty()

    def pieces(self, i: int) -> Iterator[Piece]:
        """Return the documents, or the parts of them, that row i of the run holds."""
        source, row = self.locate(i)
        return self.sources[source].pieces(row)


def cycle_shares(weights: Sequence[float]) -> list[int]:
    """Whole numbers in the proportion of the weights, at least 1 each."""
    exact = [Fraction(repr(float(weight))) for weight in weights]  # 0.1 as it was written, not as it is stored
    whole = [int(weight * math.lcm(*(w.denominator for w in exact))) for weight in exact]
    shares = [share // math.gcd(*whole) for share in whole]
    if sum(shares) <= LONGEST_CYCLE:
        return shares
    wanted = [Fraction(share * LONGEST_CYCLE, sum(shares)) for share in shares]
    shares = [max(1, int(share)) for share in wanted]
    for i in sorted(range(len(wanted)), key=lambda i: int(wanted[i]) - wanted[i])[: LONGEST_CYCLE - sum(shares)]:
        shares[i] += 1  # the largest remainders take what is left
    return shares


def _schedule(shares: list[int], preferred: np.ndarray) -> np.ndarray:
    """[sum(shares)] the source of each row of a cycle; where two have the same claim, the first of `preferred`.

    With K sources and N rows, after n rows source k should have had n shares[k] / N of them. It may take row n once it
    is behind by 1 / (2K - 2) or more; of those that may, the one that soonest would be too far behind does.
    """
    count, total = len(shares), sum(shares)
    if count == 1:
        return np.zeros(total, np.int64)
    taken, out, unit = [0] * count, np.empty(total, np.int64), 2 * count - 2
    for n in range(1, total + 1):
        behind = [(n * share - total * had) * unit for share, had in zip(shares, taken, strict=True)]
        may = [k for k in preferred if behind[k] >= total]
        chosen = min(may, key=lambda k: Fraction(total * (unit - 1) - behind[k], shares[k]))
        taken[chosen] += 1
        out[n - 1] = chosen
    return out
