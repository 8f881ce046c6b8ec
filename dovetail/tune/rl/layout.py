"""Layouts: where in the rows of a batch each episode is, to write its values there and to read them back.

An episode of n tokens takes n - 1 positions: a position holds a token, and values at it are about the next token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dovetail.core.types import Batch
from dovetail.tune.rl.episode import Episode


@dataclass(frozen=True)
class Layout:
    """Place episodes in rows."""

    rows: int
    length: int
    at: tuple[tuple[int, int, int], ...]  # of each episode: row, its number in the row from 1, first position
    sizes: tuple[int, ...]  # positions of each episode

    @property
    def documents(self) -> int:
        """Return the most episodes of a row."""
        return max((number for _, number, _ in self.at), default=1)

    def put(self, values: Sequence[np.ndarray], dtype: Any = np.float32, empty: float = 0) -> np.ndarray:
        """Return rows [R, T, ...] with the values [n, ...] of each episode's tokens.

        The value of an episode's first token is left out, because no position comes before it.
        """
        array = np.full((self.rows, self.length, *values[0].shape[1:]), empty, dtype)
        for (row, _, start), size, own in zip(self.at, self.sizes, values, strict=True):
            array[row, start : start + size] = own[1:]
        return array

    def take(self, array: np.ndarray) -> list[np.ndarray]:
        """Return the values [n] of each episode's tokens from rows: the inverse of `put`, with 0 at the first token."""
        return [
            np.concatenate([np.zeros(1, array.dtype), array[row, start : start + size]])
            for (row, _, start), size in zip(self.at, self.sizes, strict=True)
        ]

    def batch(
        self, episodes: Sequence[Episode], weights: Sequence[np.ndarray], **columns: Sequence[np.ndarray]
    ) -> Batch:
        """Return a batch of the episodes, with the loss weights and further columns of their tokens."""
        shape = self.rows, self.length
        tokens, positions, segments = (np.zeros(shape, np.int32) for _ in range(3))
        for (row, number, start), size, episode in zip(self.at, self.sizes, episodes, strict=True):
            span = slice(start, start + size)
            tokens[row, span], segments[row, span] = episode.tokens[:-1], number
            positions[row, span] = np.arange(size)
        targets = self.put([episode.tokens for episode in episodes], np.int32)
        put = {name: self.put(values) for name, values in columns.items()}
        if episodes and episodes[0].support is not None:
            put["support"] = self.put([_support(episode) for episode in episodes], np.int32, empty=-1)
        return Batch(tokens, targets, positions, segments, self.put(weights), put)  # type: ignore[arg-type]


def lay_out(episodes: Sequence[Episode], length: int, sizes: Sequence[int]) -> Layout:
    """Return a layout in the fewest rows that `sizes`, the allowed numbers of rows, has room in.

    Within these rows, episodes are spread evenly: every episode that a row may hold costs attention time.
    """
    needed = [len(episode.tokens) - 1 for episode in episodes]
    order = sorted(range(len(needed)), key=lambda i: -needed[i])
    tight = _first_fit(needed, order, length)
    used = max((row for row, _, _ in tight.values()), default=0) + 1
    rows = next((size for size in sizes if size >= used), used)
    assert rows <= sizes[-1], "a batch has room for the longest completions"
    at = _spread(needed, order, length, rows) or tight
    return Layout(rows, length, tuple(at[i] for i in range(len(needed))), tuple(needed))


def _first_fit(needed: Sequence[int], order: Sequence[int], length: int) -> dict[int, tuple[int, int, int]]:
    """Place each episode in the first row that has room for it."""
    room: list[int] = []
    counts: list[int] = []
    at: dict[int, tuple[int, int, int]] = {}
    for i in order:
        row = next((r for r, left in enumerate(room) if left >= needed[i]), len(room))
        if row == len(room):
            room.append(length)
            counts.append(0)
        counts[row] += 1
        at[i] = row, counts[row], length - room[row]
        room[row] -= needed[i]
    return at


def _spread(
    needed: Sequence[int], order: Sequence[int], length: int, rows: int
) -> dict[int, tuple[int, int, int]] | None:
    """Deal the episodes to the rows in turn, the longest to those with most room; return None if they do not fit."""
    room, at = [length] * rows, {}
    for number, first in enumerate(range(0, len(order), rows), 1):
        widest = sorted(range(rows), key=lambda row: -room[row])
        for row, i in zip(widest, order[first : first + rows], strict=False):
            if needed[i] > room[row]:
                return None
            at[i] = row, number, length - room[row]
            room[row] -= needed[i]
    return at


def row_sizes(batch: int, devices: int, accumulate: int) -> list[int]:
    """Return the numbers of rows that a step is compiled for: the whole batch, its half and its quarter.

    A part is left out unless it consists of whole microsteps, or is smaller than one and divides among the devices.
    """
    sizes = [batch]
    for part in (batch // 2, batch // 4):
        micro = batch // accumulate
        fits = part % micro == 0 if part >= micro else part % devices == 0
        if part >= devices and batch % part == 0 and fits:
            sizes.append(part)
    return sorted(sizes)


def _support(episode: Episode) -> np.ndarray:
    assert episode.support is not None
    return episode.support
