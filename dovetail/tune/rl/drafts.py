"""Drafts: the turns that an engine is writing, given to the journal from time to time, and those found there."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from dovetail.engine.engine import Engine
from dovetail.engine.request.outputs import CompletionOutput
from dovetail.tune.rl.draft import Draft, Turn, turn_of
from dovetail.tune.rl.episode import Episode, Place

SECONDS = 2.0  # between two times, and so the most that a kill costs
SHARE = 0.01  # of the rollout's time, that it takes at most: where it takes long, it is done less often


@dataclass
class _Followed:
    """A turn that is being written, and how much of it the journal has."""

    episode: Episode
    tokens: int = 0
    parts: int = 0  # of its log-probabilities


class Drafts:
    def __init__(self, engine: Engine, found: Mapping[Turn, Draft], write: Callable[[list[Draft]], object] | None):
        """`found`: in the journal. `write`: puts more there; None: nobody asks for them."""
        self._engine, self._found, self._write = engine, found, write
        self._followed: dict[tuple[str, int], _Followed] = {}
        self._over: dict[Place, list[Draft]] = {}  # turns of episodes that go on, which the journal does not have whole
        self._due = time.monotonic() + SECONDS if write else float("inf")

    def of(self, episode: Episode) -> Draft | None:
        """What is known of the turn that the policy begins now."""
        return self._found.get(turn_of(episode)) if self._found else None

    def follow(self, id: str, index: int, episode: Episode) -> None:
        """The engine writes it now, from where its draft ended."""
        if self._write:
            draft = self.of(episode)
            known = (len(draft.written.tokens), len(draft.written.scores or ())) if draft else ()
            self._followed[id, index] = _Followed(episode, *known)

    def turn_over(self, id: str, index: int, completion: CompletionOutput, goes_on: bool) -> None:
        """Before the episode has it and the engine forgets it. `goes_on`: the episode may, and its turn is worth
        keeping.
        """
        followed = self._followed.pop((id, index), None)
        if followed and goes_on:
            rest = self._rest(id, index, followed, completion.finish_reason, completion.text)
            self._over.setdefault(rest.turn.place, []).append(rest)

    def ended(self, episode: Episode) -> None:
        """The journal has all of it."""
        self._over.pop(episode.place, None)

    def look(self) -> None:
        """Write what is new, where it is time to."""
        began = time.monotonic()
        if self._write is None or began < self._due:
            return
        drafts = [each for place in self._over.values() for each in place]
        drafts += [self._rest(*key, followed) for key, followed in self._followed.items()]
        self._over.clear()
        if drafts := [each for each in drafts if each.written.tokens]:
            self._write(drafts)
        now = time.monotonic()
        self._due = now + max(SECONDS, (now - began) / SHARE)

    def _rest(self, id: str, index: int, followed: _Followed, finish: str = "", text: str = "") -> Draft:
        first = followed.tokens
        written = self._engine.partial_output(id, index, first, followed.parts)
        followed.tokens += len(written.tokens)
        followed.parts += len(written.scores or ())
        return Draft(turn_of(followed.episode), written, first, finish, text)
