"""Pack documents into rows of T tokens; any row can be computed by its number, in any order.

A row is a list of pieces (document, start, stop). A piece is a segment of the row, with positions from 0. The target of
a token is the next token of its document, also where that token lies in another row: in an epoch every token is read
once, and every token except a document's first is a target once.

Orders depend on (seed, epoch) alone: they are the same on every machine and with every version of numpy.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol, cast

import numpy as np

from dovetail.core.types import Batch

WINDOW = 1 << 20  # documents that are packed together: bounds the memory of planning
_ORDER, _ROWS = 1, 2  # which shuffle of a (seed, epoch): of documents, of rows
_GOLDEN, _FIRST, _SECOND = (np.uint64(x) for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


# --- orders -----------------------------------------------------------------------------------------------------------


def mix(x: np.ndarray) -> np.ndarray:
    """Apply splitmix64, a bijection of uint64: distinct inputs give distinct outputs."""
    with np.errstate(over="ignore"):
        x = x + _GOLDEN
        x = (x ^ (x >> np.uint64(30))) * _FIRST
        x = (x ^ (x >> np.uint64(27))) * _SECOND
        return x ^ (x >> np.uint64(31))


def key(*parts: int) -> int:
    """Return one 64-bit number for several small ones, such as (seed, epoch)."""
    out = np.zeros(1, np.uint64)
    for part in parts:
        out = mix(out ^ np.uint64(part))
    return int(out[0])


def ranks(count: int, *parts: int) -> np.ndarray:
    """Return [count] distinct pseudo-random uint64s; the rank of item i does not depend on `count`."""
    return mix(mix(np.arange(count, dtype=np.uint64)) ^ np.uint64(key(*parts)))


def permutation(count: int, *parts: int) -> np.ndarray:
    """Return the numbers below `count` in the order of `parts`, as an array."""
    return np.argsort(ranks(count, *parts))


def place(index: int, count: int, *parts: int) -> int:
    """Return the position of `index` in a permutation of `count`, without computing the whole of it."""
    from grain.experimental import index_shuffle

    return index_shuffle(index, max_index=count - 1, seed=key(*parts) & 0xFFFFFFFF, rounds=4)


# --- best fit ---------------------------------------------------------------------------------------------------------


def best_fit(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, int]:
    """Pack pieces by best fit decreasing.

    Pieces of one length are alike, and so are rows with the same room left: the work grows with the number of distinct
    lengths, not with the number of pieces.

    Args:
        lengths: [n] the tokens of each piece, 1 to `capacity`.
        capacity: The tokens of a row.

    Returns:
        [n] the row of each piece, and the number of rows.
    """
    order = np.argsort(-lengths, kind="stable")
    cuts = np.flatnonzero(np.diff(lengths[order])) + 1
    rows = np.empty(len(lengths), np.int64)
    room = _Room(capacity)
    for pieces in np.split(order, cuts) if len(order) else ():
        length = int(lengths[pieces[0]])
        while len(pieces):
            room_left, into = room.take(length, len(pieces))
            each = room_left // length
            chosen = np.repeat(into, each)[: len(pieces)]
            rows[pieces[: len(chosen)]] = chosen
            room.give(into, room_left, length, min(len(pieces), len(chosen)))
            pieces = pieces[len(chosen) :]
    return rows, room.count


class _Room:
    """Open rows by the room that they have left; a bit mask finds the tightest fit."""

    def __init__(self, capacity: int):
        self._capacity = capacity
        self._rows: dict[int, list[np.ndarray]] = {}
        self._mask = 0
        self.count = 0

    def take(self, length: int, pieces: int) -> tuple[int, np.ndarray]:
        """Return the rows with the least room that fits `length`, at most as many as `pieces` need; else new rows."""
        fitting = self._mask >> length
        if not fitting:
            need = -(-pieces // (self._capacity // length))
            self.count += need
            return self._capacity, np.arange(self.count - need, self.count)
        left = length + (fitting & -fitting).bit_length() - 1
        held = np.concatenate(self._rows.pop(left))
        self._mask &= ~(1 << left)
        need = -(-pieces // (left // length))
        self._put(left, held[need:])
        return left, held[:need]

    def give(self, rows: np.ndarray, left: int, length: int, pieces: int) -> None:
        """Put rows back after `pieces` were added: each row is filled, the last one perhaps only in part."""
        each = left // length
        full = pieces // each
        self._put(left - each * length, rows[:full])
        self._put(left - (pieces - full * each) * length, rows[full:])

    def _put(self, left: int, rows: np.ndarray) -> None:
        if left and len(rows):
            self._rows.setdefault(left, []).append(rows)
            self._mask |= 1 << left


# --- rows -------------------------------------------------------------------------------------------------------------


class Documents(Protocol):
    """Define what packing reads: a `TokenStore` or `Examples`."""

    @property
    def lengths(self) -> np.ndarray:
        """Return [documents] the tokens of each."""
        ...

    def read(self, document: int, start: int, stop: int) -> np.ndarray:
        """Return the tokens start..stop-1 of a document, fewer where it ends before."""
        ...


class Piece(NamedTuple):
    """Hold a part of a document: its tokens start..stop-1."""

    document: int
    start: int
    stop: int


def empty_row(length: int) -> Any:
    """Return a row [T] of padding: numpy arrays in the fields of a Batch."""
    tokens, targets, positions, segment_ids = np.zeros((4, length), np.int32)
    return Batch(*cast(Any, (tokens, targets, positions, segment_ids, np.zeros(length, np.float32))))


class Packing:
    """Rows of some of a store's documents. `count` rows are an epoch; row i of the run is in epoch i // count."""

    count: int

    def __init__(self, store: Documents, documents: np.ndarray, length: int, seed: int):
        self._store, self._documents, self.length, self._seed = store, documents, length, seed
        self._lengths = store.lengths[documents]
        self.tokens = int(self._lengths.sum())

    @property
    def documents(self) -> int:
        """Return the number of documents in an epoch."""
        return len(self._documents)

    @property
    def padding(self) -> float:
        """Return the share of an epoch's positions that hold no token."""
        return 1 - self.tokens / (self.count * self.length)

    def pieces(self, i: int) -> Iterator[Piece]:
        """Yield the pieces of row i."""
        raise NotImplementedError

    def row(self, i: int) -> Batch:
        """Return row i: numpy arrays [T]."""
        row = empty_row(self.length)
        at = 0
        for segment, (document, start, stop) in enumerate(self.pieces(i), 1):
            end = at + stop - start
            found = self._store.read(document, start, stop + 1)  # one more, if there is one: the last token's target
            row.tokens[at:end] = found[: stop - start]
            row.targets[at : at + len(found) - 1] = found[1:]
            row.loss_mask[at : at + len(found) - 1] = 1
            row.positions[at:end] = np.arange(stop - start)
            row.segment_ids[at:end] = segment
            at = end
        return row

    def empty(self) -> Batch:
        """Return a row of padding."""
        return empty_row(self.length)

    def _row_of_epoch(self, i: int) -> tuple[int, int]:
        """Return (epoch, row of the plan).

        The rows of an epoch are shuffled too, so that the rows of one long document do not meet in one batch.
        """
        epoch, index = divmod(i, self.count)
        return epoch, place(index, self.count, self._seed, epoch, _ROWS)


class Concat(Packing):
    """Concatenate all documents, in another order each epoch, and cut every T tokens: only the last row is padded."""

    def __init__(self, store: Documents, documents: np.ndarray, length: int, seed: int):
        super().__init__(store, documents, length, seed)
        self.count = -(-self.tokens // length)
        self._plans: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._lock = threading.Lock()

    def pieces(self, i: int) -> Iterator[Piece]:
        """Yield the pieces of row i."""
        epoch, cut = self._row_of_epoch(i)
        order, starts = self._plan(epoch)
        begin, end = cut * self.length, min((cut + 1) * self.length, self.tokens)
        at = int(np.searchsorted(starts, begin, "right")) - 1
        while begin < end:
            first, stop = int(starts[at]), min(end, int(starts[at + 1]))
            yield Piece(int(order[at]), begin - first, stop - first)
            begin, at = stop, at + 1

    def _plan(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the order of documents and where each starts: 16 bytes per document.

        The plans of two epochs are kept, for batches in which epochs meet.
        """
        with self._lock:  # the loader's threads all ask at once when an epoch begins
            if epoch not in self._plans:
                order = permutation(len(self._documents), self._seed, epoch, _ORDER)
                starts = np.concatenate([[0], np.cumsum(self._lengths[order])])
                kept = sorted(self._plans, key=lambda e: abs(e - epoch))[:1]
                self._plans = {e: self._plans[e] for e in kept} | {epoch: (self._documents[order], starts)}
            return self._plans[epoch]


class BestFit(Packing):
    """Keep documents whole, as many per row as fit; only documents longer than T are cut.

    The seed decides once which documents share a row; each epoch takes the rows in another order.
    """

    def __init__(self, store: Documents, documents: np.ndarray, length: int, seed: int):
        super().__init__(store, documents, length, seed)
        order = permutation(len(documents), seed, _ORDER)
        windows = [self._window(order[at : at + WINDOW]) for at in range(0, len(order), WINDOW)]
        self._document, self._start, self._stop, sizes = (np.concatenate(parts) for parts in zip(*windows, strict=True))
        self._first = np.concatenate([[0], np.cumsum(sizes)])  # of each row, among the pieces
        self.count = len(sizes)

    def _window(self, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return the document, start and stop of each piece in order of rows, and the number of pieces of each row."""
        lengths = self._lengths[chosen]
        cuts = -(-lengths // self.length)
        which = np.repeat(np.arange(len(chosen)), cuts)
        number = np.arange(len(which)) - np.repeat(np.cumsum(cuts) - cuts, cuts)
        start = number * self.length
        stop = np.minimum(lengths[which], start + self.length)
        rows, count = self._assign(stop - start)
        by_row = np.argsort(rows, kind="stable")
        sizes = np.bincount(rows, minlength=count)
        return self._documents[chosen[which[by_row]]], start[by_row], stop[by_row], sizes

    def _assign(self, sizes: np.ndarray) -> tuple[np.ndarray, int]:
        """Return the row of each piece, and the number of rows."""
        return best_fit(sizes, self.length)

    def pieces(self, i: int) -> Iterator[Piece]:
        """Yield the pieces of row i."""
        _, row = self._row_of_epoch(i)
        for at in range(self._first[row], self._first[row + 1]):
            yield Piece(int(self._document[at]), int(self._start[at]), int(self._stop[at]))


PACKINGS: dict[str, type[Packing]] = {"concat": Concat, "best_fit": BestFit}
