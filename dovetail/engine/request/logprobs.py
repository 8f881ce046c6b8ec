"""Log-probabilities of tokens: TokenLogprob describes one token, Logprobs holds those of many.

A rollout samples hundreds of thousands of tokens and needs one number of each. So the device's results are kept as they
come, one Scores per step, and an object per token is made only for callers that read tokens one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, repeat
from typing import Any, NamedTuple

import numpy as np

Top = tuple[list[int], list[float]]  # the most probable tokens and their log-probabilities
# Of consecutive tokens: log-probabilities, ranks, and the most probable tokens beside each (None: not requested).
Scores = tuple[list[float], list[int], list[Top] | None]


class TokenLogprob(NamedTuple):
    """Hold the log-probability of one token."""

    token: int
    logprob: float
    rank: int  # 1 is the most probable
    top: tuple[tuple[int, float], ...]  # (token, logprob) of the most probable, as many as requested


class Logprobs(Sequence[TokenLogprob]):
    """Hold a sequence of TokenLogprob whose entries are made when the first of them is read."""

    __slots__ = ("_entries", "_scores", "_tokens")

    def __init__(self, tokens: Sequence[int], scores: list[Scores]):
        """Hold the scores of all `tokens`, in as many parts as they came in."""
        self._tokens, self._scores = tokens, scores
        self._entries: tuple[TokenLogprob, ...] | None = None

    @property
    def array(self) -> np.ndarray:
        """Return the log-probabilities alone, [tokens] f32."""
        return np.fromiter(chain.from_iterable([part[0] for part in self._scores]), np.float32, len(self))

    @property
    def top(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the most probable tokens, [tokens, k] int32, and their log-probabilities, [tokens, k] f32."""
        tops = [top for _, _, tops in self._scores for top in tops or ()]
        shape = len(tops), len(tops[0][0]) if tops else 0
        ids, values = ([top[i] for top in tops] for i in (0, 1))
        return np.asarray(ids, np.int32).reshape(shape), np.asarray(values, np.float32).reshape(shape)

    @property
    def entries(self) -> tuple[TokenLogprob, ...]:
        """Return one TokenLogprob per token."""
        if self._entries is None:
            tokens = iter(self._tokens)
            self._entries = tuple(
                TokenLogprob(next(tokens), value, rank, tuple(zip(*top, strict=True)))
                for values, ranks, tops in self._scores
                for value, rank, top in zip(values, ranks, repeat(()) if tops is None else tops, strict=False)
            )
        return self._entries

    def __len__(self) -> int:
        return len(self._tokens)

    def __iter__(self) -> Iterator[TokenLogprob]:
        return iter(self.entries)

    def __getitem__(self, index: Any) -> Any:
        return self.entries[index]

    def __eq__(self, other: object) -> bool:
        return self.entries == tuple(other) if isinstance(other, Logprobs | tuple | list) else NotImplemented

    def __repr__(self) -> str:
        return repr(self.entries)
