"""NgramDrafter: copy what followed the last tokens where they occurred before in the same sequence."""

from __future__ import annotations

from dataclasses import dataclass, field

from dovetail.engine.request.sequence import Sequence


@dataclass
class _Index:
    """Map each n-gram of a sequence to the position that followed it most recently."""

    done: int = 0  # tokens whose n-grams are in the index
    after: dict[tuple[int, ...], int] = field(default_factory=dict)  # n-gram -> position of the token after it


@dataclass(frozen=True)
class NgramDrafter:
    """Look up the longest of the last `least` to `most` tokens, and propose what followed it most recently."""

    least: int
    most: int

    runs_ahead = False

    def propose(self, seq: Sequence, most: int) -> tuple[int, ...]:
        """Return up to `most` tokens that followed the same n-gram."""
        tokens, index = seq.tokens, seq.draft_state
        if not isinstance(index, _Index):
            index = seq.draft_state = _Index()
        self._extend(index, tokens)
        for n in range(min(self.most, len(tokens) - 1), self.least - 1, -1):
            start = index.after.get(tuple(tokens[-n:]))
            if start is not None:
                return tuple(tokens[start : start + most])
        return ()

    def _extend(self, index: _Index, tokens: list[int]) -> None:
        for position in range(max(index.done, 1), len(tokens)):  # the newest n-gram has nothing after it yet
            for n in range(self.least, min(self.most, position) + 1):
                index.after[tuple(tokens[position - n : position])] = position
        index.done = len(tokens)

    def finish(self, seq: Sequence) -> None:
        """Drop the sequence's index."""
        seq.draft_state = None
