"""Best-fit-decreasing bin packing, by lengths and not by items.

Pieces of one length are alike, and so are rows with the same room left. Longest first, all pieces of a length are put
into the rows with the least room that takes them, many rows at a time: the work grows with the number of different
lengths, not of documents.
"""

from __future__ import annotations

import numpy as np


def best_fit(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, int]:
    """[n] the row of each piece, and the number of rows. Lengths are 1..capacity."""
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
    """Open rows by the room they have left; a bit mask finds the tightest fit."""

    def __init__(self, capacity: int):
        self._capacity = capacity
        self._rows: dict[int, list[np.ndarray]] = {}
        self._mask = 0
        self.count = 0

    def take(self, length: int, pieces: int) -> tuple[int, np.ndarray]:
        """Rows with the least room that takes `length`, as many as `pieces` need or all there are; else new ones."""
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
        """Back come `rows`, each filled with as many as it takes, except that the last may have got fewer."""
        each = left // length
        full = pieces // each
        self._put(left - each * length, rows[:full])
        self._put(left - (pieces - full * each) * length, rows[full:])

    def _put(self, left: int, rows: np.ndarray) -> None:
        if left and len(rows):
            self._rows.setdefault(left, []).append(rows)
            self._mask |= 1 << left
