"""A sequence's text as it grows: no half characters, and nothing shown that may yet turn out to be a stop string."""

from __future__ import annotations

from collections.abc import Iterable

from dovetail.io.detokenize import Detokenizer


class Text:
    def __init__(self, detokenizer: Detokenizer, stops: tuple[str, ...], include_stop: bool):
        self._detokenizer, self._stops, self._include_stop = detokenizer, stops, include_stop
        self._text = ""  # all that is certain
        self._shown = 0  # how much of it was taken
        self._limit: int | None = None  # where a stop string ends the text
        self._longest = max(map(len, stops), default=0)

    def push(self, token: int, may_stop: bool = True) -> str | None:
        """Add a token; the stop string that it completed, if it did. Where it may not stop, it is text like any."""
        before = len(self._text)
        self._text += self._detokenizer.push(token)
        return self._find_stop(before) if may_stop else None

    def extend(self, tokens: Iterable[int]) -> None:
        """Add tokens where there are no stop strings to look for."""
        self._text += "".join(map(self._detokenizer.push, tokens))

    def flush(self) -> None:
        """The sequence has ended otherwise: what was held back is text after all."""
        if self._limit is None:
            before = len(self._text)
            self._text += self._detokenizer.flush()
            self._find_stop(before)
            if self._limit is None:
                self._limit = len(self._text)

    def take(self, ended: bool = False) -> str:
        """The text that has become certain since the last call; at the sequence's end, all that is left."""
        if ended:
            self.flush()
        end = self._limit if self._limit is not None else len(self._text) - self._held()
        new = self._text[self._shown : end]
        self._shown = max(self._shown, end)
        return new

    @property
    def whole(self) -> str:
        return self._text[: self._limit]

    def _find_stop(self, before: int) -> str | None:
        """The stop string that comes first in the text, looked for where the new text may have completed one."""
        found = []
        for stop in self._stops:
            at = self._text.find(stop, max(0, before - len(stop) + 1))
            found += [(at, stop)] if at >= 0 else []
        if not found:
            return None
        at, stop = min(found)
        self._limit = at + len(stop) if self._include_stop else at
        return stop

    def _held(self) -> int:
        """How much of the end is the beginning of a stop string."""
        for size in range(min(self._longest - 1, len(self._text)), 0, -1):
            if any(stop.startswith(self._text[-size:]) for stop in self._stops):
                return size
        return 0
