"""OutputText: the text of a growing sequence, without half characters and without what may become a stop string.

Only the end of the text is searched, so a token costs the same whether it is the tenth or the ten-thousandth.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import repeat

from dovetail.io.detokenize import Detokenizer


class OutputText:
    """Decode the text of one sequence.

    Args:
        detokenizer: Turns tokens into text.
        stops: Stop strings.
        include_stop: Whether the text ends with the stop string that was found.
    """

    def __init__(self, detokenizer: Detokenizer, stops: tuple[str, ...], include_stop: bool):
        self._detokenizer, self._stops, self._include_stop = detokenizer, stops, include_stop
        self._longest = max(map(len, stops), default=0)
        self._taken: list[str] = []  # what `take` has returned
        self._tail = ""  # certain text from `_start` on: not taken yet, or a stop string may begin in it
        self._start = 0  # where the tail begins in the text
        self._shown = 0  # how much of the text was taken
        self._limit: int | None = None  # where a stop string ends the text
        self._held = 0  # characters at the end that are the beginning of a stop string

    def push(self, token: int, may_stop: bool = True) -> str | None:
        """Add a token and return the stop string that it completed, if any; search for one only with `may_stop`."""
        return self._add(self._detokenizer.push(token), may_stop)

    def extend(self, tokens: Iterable[int]) -> None:
        """Add tokens of a sequence that has no stop strings."""
        self._tail += "".join(map(self._detokenizer.push, tokens))

    def flush(self) -> None:
        """End the text of a sequence that no stop string ended: the characters that were held back become text."""
        if self._limit is None:
            self._add(self._detokenizer.flush(), True)
            if self._limit is None:
                self._limit = self._start + len(self._tail)

    def take(self, ended: bool = False) -> str:
        """Return the text that became certain since the last call; with `ended`, all that is left."""
        if ended:
            self.flush()
        end = self._limit if self._limit is not None else self._start + len(self._tail) - self._held
        new = self._tail[self._shown - self._start : max(end - self._start, 0)]
        if new:
            self._taken.append(new)
            self._shown += len(new)
        cut = min(self._shown - self._start, max(len(self._tail) - self._longest, 0))
        self._tail, self._start = self._tail[cut:], self._start + cut
        return new

    @property
    def whole(self) -> str:
        """Return the whole text so far."""
        left = self._tail[self._shown - self._start :]
        return ("".join(self._taken) + left)[: self._limit]

    def _add(self, new: str, may_stop: bool) -> str | None:
        before = len(self._tail)
        self._tail += new
        stop = self._find_stop(before) if may_stop else None
        if stop is None and new and self._stops:
            self._held = self._find_held(len(new))
        return stop

    def _find_stop(self, before: int) -> str | None:
        """Return the first stop string in the text, searching where the new text may have completed one."""
        found = []
        for stop in self._stops:
            at = self._tail.find(stop, max(0, before - len(stop) + 1))
            found += [(at, stop)] if at >= 0 else []
        if not found:
            return None
        at, stop = min(found)
        self._limit = self._start + (at + len(stop) if self._include_stop else at)
        return stop

    def _find_held(self, new: int) -> int:
        """Return how many characters at the end are the beginning of a stop string.

        Without its last `new` characters that beginning was held before, so it is at most that much longer: over a
        whole text, a character costs a few comparisons per stop string.
        """
        for size in range(min(self._longest - 1, self._held + new, len(self._tail)), 0, -1):
            if any(map(str.startswith, self._stops, repeat(self._tail[-size:]))):
                return size
        return 0
