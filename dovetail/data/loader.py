"""Compute batches by number: `batch(step)` depends on the data, the seed and the step, on any number of hosts.

There is no position to save: a run that resumes at step k asks for batch k.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import numpy as np

from dovetail.core.errors import RecipeError
from dovetail.core.fingerprint import of_sources
from dovetail.core.reporter import Progress
from dovetail.core.types import Batch
from dovetail.data.pack import PACKINGS, Packing, Piece, key, ranks
from dovetail.data.settings import Data
from dovetail.data.tokenise import prepare

if TYPE_CHECKING:
    from dovetail.io.tokenizer import Tokenizer

AHEAD = 8  # batches prepared in advance
LONGEST_CYCLE = 1 << 16  # weights whose exact cycle is longer are rounded to shares of this: by less than 0.002%
_HELD_OUT = 0x6865_6C64  # names the shuffle of the hold-out split; not the seed's, so that runs can be compared


# --- batches ----------------------------------------------------------------------------------------------------------


class Loader:
    """Batches of `batch` rows over all hosts, of which this host gets a contiguous share."""

    def __init__(
        self,
        rows: Mixture,
        batch: int,
        host_index: int = 0,
        host_count: int = 1,
        *,
        vocab_size: int = 0,
        fingerprints: Mapping[str, str] = {},
    ):
        if batch < 1 or host_count < 1 or batch % host_count:
            raise RecipeError(
                f"batch must be a multiple of the {host_count} hosts, got {batch} rows: change batch", param="batch"
            )
        assert 0 <= host_index < host_count, (host_index, host_count)
        self.rows, self.length, self.vocab_size = rows, rows.length, vocab_size
        self.fingerprints = fingerprints  # of each source's documents, by name: see train.inputs
        self._batch, self._share = batch, batch // host_count
        self._first = host_index * self._share

    def batch(self, step: int) -> Batch:
        """Return this host's rows of a step's batch: numpy arrays [batch / hosts, T]."""
        assert step >= 0, step
        numbers = self.rows_of(step)[self._first : self._first + self._share]
        return jax.tree.map(lambda *column: np.stack(column), *(self._row(i) for i in numbers))

    def rows_of(self, step: int) -> Sequence[int | None]:
        """Return the numbers of the rows of a step's batch, over all hosts; None is a row of padding."""
        return range(step * self._batch, (step + 1) * self._batch)

    def _row(self, i: int | None) -> Batch:
        return self.rows.empty() if i is None else self.rows.row(i)

    def iterate(self, start_step: int = 0, threads: int = 0) -> Iterator[Batch]:
        """Yield batches from `start_step` on, without end, prepared by Grain's threads; close() ends them."""
        import grain

        threads = threads or min(4, os.cpu_count() or 1)
        steps = grain.MapDataset.range(start_step, sys.maxsize).map(self.batch)
        found = iter(steps.to_iter_dataset(grain.ReadOptions(threads, max(AHEAD, threads))))
        try:
            yield from found
        finally:
            found.close()

    def documents(self, step: int) -> int:
        """Return the largest number of documents in a row of the step's batch, over all hosts."""
        return max(sum(1 for _ in self.rows.pieces(i)) for i in self.rows_of(step) if i is not None)

    def notes(self, step: int) -> dict[str, float]:
        """Return the numbers to report for a step's batch; none here, because all rows are full."""
        return {}

    @property
    def tokens_per_epoch(self) -> int:
        """Return the tokens of all sources, each counted once."""
        return self.rows.tokens

    @property
    def rows_per_epoch(self) -> int:
        """Return the rows of all sources, each counted once."""
        return sum(source.count for source in self.rows.sources)

    @property
    def padding(self) -> tuple[float, ...]:
        """Return the share of positions without a token, for each source."""
        return tuple(source.padding for source in self.rows.sources)

    def epochs(self, step: int) -> tuple[float, ...]:
        """Return the number of passes over each source before `step`."""
        taken = self.rows.taken(step * self._batch)
        return tuple(int(n) / source.count for n, source in zip(taken, self.rows.sources, strict=True))


def open_data(
    data: Data,
    length: int,
    batch: int,
    tokenizer: Tokenizer | None = None,
    *,
    host_index: int = 0,
    host_count: int = 1,
    directory: str | Path = "",
    progress: Progress | None = None,
) -> tuple[Loader, Loader | None]:
    """Open the documents of pretraining; token caches that are missing or out of date are made first.

    Args:
        data: The settings.
        length: The tokens of a row.
        batch: The rows of a step, over all hosts.
        tokenizer: The model's own, for an empty `data.tokenizer`.
        host_index: The number of this host.
        host_count: The number of hosts.
        directory: The folder of the caches; default: `data.cache`.
        progress: Called with (what, done, total) while documents are tokenised.

    Returns:
        The training loader, and the loader of the held-out documents; None where `data.held_out` is 0.
    """
    check_length(length)
    stores = prepare(data, tokenizer, directory, progress)
    weights = [source.weight for source in data.sources]
    wanted = held_out_each(data.held_out, weights)
    apart = [held_out(store.lengths, each, length, store.meta.name) for store, each in zip(stores, wanted, strict=True)]
    both = zip(data.sources, stores, strict=True)
    fingerprints = of_sources((source.path, store.fingerprint) for source, store in both)

    def loader(held: bool) -> Loader:
        pack, each = PACKINGS[data.packing], enumerate(zip(stores, apart, strict=True))
        packed = [pack(store, np.flatnonzero(mask == held), length, key(data.seed, i)) for i, (store, mask) in each]
        rows, vocab_size = Mixture(packed, weights, data.seed), stores[0].meta.vocab_size
        return Loader(rows, batch, host_index, host_count, vocab_size=vocab_size, fingerprints=fingerprints)

    return loader(False), loader(True) if data.held_out else None


def check_length(length: int) -> None:
    """Refuse rows in which no token has a target."""
    if length < 2:
        raise RecipeError(f"length must be at least 2 tokens, got {length}", param="length")


# --- hold-out ---------------------------------------------------------------------------------------------------------


def held_out(
    lengths: np.ndarray, wanted: float, length: int, name: str, groups: np.ndarray | None = None
) -> np.ndarray:
    """Choose the documents that are held out for evaluation, by a hash of their numbers.

    Documents that are appended later do not change the choice among the earlier ones. A share that would hold out no
    document holds out one; a number of rows takes the lowest hashes, as many as fill the rows.

    Args:
        lengths: [documents] the tokens of each.
        wanted: A share of the documents (below 1), or a number of rows.
        length: The tokens of a row.
        name: The source, for an error.
        groups: [documents] the group of each, from 0; a group is held out as a whole. Default: each its own.

    Returns:
        [documents] whether each is held out.

    Raises:
        RecipeError: No document is left for training.
    """
    if groups is not None:
        return held_out(np.bincount(groups, weights=lengths).astype(np.int64), wanted, length, name)[groups]
    if not wanted:
        return np.zeros(len(lengths), bool)
    rank = ranks(len(lengths), _HELD_OUT)
    if wanted < 1:
        mask = rank < np.uint64(int(wanted * 2**64))
        mask[np.argmin(rank)] = True
    else:
        order = np.argsort(rank)
        filled = np.cumsum(lengths[order])
        mask = np.zeros(len(lengths), bool)
        mask[order[: int(np.searchsorted(filled, wanted * length)) + 1]] = True
    if mask.all():
        raise RecipeError(
            f"held_out={wanted:g} takes all {len(lengths)} documents of {name} and leaves none to train on: set it "
            "lower, or give the text as more documents",
            param="data.held_out",
        )
    return mask


def held_out_each(wanted: float, weights: Sequence[float]) -> list[float]:
    """Return `held_out` for each source: a share is the same for all, rows are divided by weight."""
    if wanted < 1:
        return [wanted for _ in weights]
    return [float(np.ceil(wanted * weight / sum(weights))) for weight in weights]


# --- several sources --------------------------------------------------------------------------------------------------


class Mixture:
    """Several sources as one stream of rows.

    The schedule is a cycle in which each source's share of the first n rows is never wrong by a whole row (Tijdeman's
    solution of the chairman assignment problem). Each source has its own epochs.
    """

    def __init__(self, sources: Sequence[Packing], weights: Sequence[float], seed: int):
        self.sources, self.length = tuple(sources), sources[0].length
        shares = cycle_shares(weights)
        self._cycle = _schedule(shares, np.argsort(ranks(len(shares), seed)))
        self._counts = np.zeros((len(self._cycle) + 1, len(shares)), np.int64)  # rows of each source before each place
        np.cumsum(self._cycle[:, None] == np.arange(len(shares)), axis=0, out=self._counts[1:])

    @property
    def tokens(self) -> int:
        """Return the tokens of all sources, each counted once."""
        return sum(source.tokens for source in self.sources)

    def locate(self, i: int) -> tuple[int, int]:
        """Return (source, its row): where row i of the run comes from."""
        source = int(self._cycle[i % len(self._cycle)])
        return source, int(self.taken(i)[source])

    def taken(self, rows: int) -> np.ndarray:
        """Return [sources] how many of the first `rows` rows come from each."""
        cycles, at = divmod(rows, len(self._cycle))
        return cycles * self._counts[-1] + self._counts[at]

    def row(self, i: int) -> Batch:
        """Return row i of the run."""
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
    """Return whole numbers in the proportion of the weights, at least 1 each."""
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
    """Return [sum(shares)] the source of each row of a cycle; ties go to the first of `preferred`.

    With K sources and N rows, after n rows source k should have had n shares[k] / N of them. It may take row n once it
    is behind by 1 / (2K - 2) or more; of those that may, the one that would soonest be too far behind takes it.
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
