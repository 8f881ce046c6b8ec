"""Partial turns: what the policy has sampled of turns that are not over, or whose episodes are not, for the journal.

A killed run continues from them: their tokens are not sampled again. An environment runs again from its start, and a
partial turn is used if the same tokens come before it.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from typing import Any, NamedTuple

import numpy as np

from dovetail.engine.engine import Engine
from dovetail.engine.request.logprobs import Logprobs, Scores
from dovetail.engine.request.outputs import CompletionOutput, PartialOutput
from dovetail.tune.rl.episode import Episode, EpisodeId, array_of, with_arrays

WRITE_SECONDS = 2.0  # between two writes: a kill loses at most so much sampling
MAX_SHARE = 0.01  # of the rollout's time: if a write takes long, the next one comes later


class TurnId(NamedTuple):
    """Identify a turn of an episode."""

    episode: EpisodeId
    before: int  # a checksum of the tokens before it
    version: int  # version of the weights that sample it


@dataclass(frozen=True)
class PartialTurn:
    """Hold some tokens of a turn."""

    turn: TurnId
    written: PartialOutput
    first: int = 0  # the number of tokens of the turn before these
    finish: str = ""  # how the turn ended; "": it has not
    text: str = ""  # the text of the whole turn, if it has ended and the engine made one

    @property
    def completion(self) -> CompletionOutput:
        """The output of a turn that has ended, as the engine returned it."""
        tokens, scores = tuple(self.written.tokens), self.written.scores or []
        return CompletionOutput(0, tokens, self.text, self.finish, logprobs=Logprobs(tokens, scores))

    def then(self, more: PartialTurn) -> PartialTurn:
        """Return these tokens followed by those of `more`."""
        before, after = self.written, more.written
        scores = None if before.scores is None or after.scores is None else before.scores + after.scores
        written = replace(after, tokens=[*before.tokens, *after.tokens], scores=scores)
        return replace(more, written=written, first=self.first)


def next_turn(episode: Episode) -> TurnId:
    """Return the id of the turn that starts after the episode's tokens."""
    return TurnId(episode.id, zlib.crc32(episode.tokens.tobytes()), episode.version)


def joined(parts: Iterable[PartialTurn]) -> dict[TurnId, PartialTurn]:
    """Join the parts of each turn, which were written one after another."""
    found: dict[TurnId, PartialTurn] = {}
    for each in parts:
        before = found.get(each.turn)
        if not each.first:
            found[each.turn] = each
        elif before and len(before.written.tokens) == each.first:
            found[each.turn] = before.then(each)
    return found


# --- during a rollout -------------------------------------------------------------------------------------------------


@dataclass
class _Followed:
    """A turn that the engine samples, and how much of it the journal has."""

    episode: Episode
    tokens: int = 0
    scores: int = 0  # parts of its log-probabilities


class PartialTurns:
    """Write the turns that an engine samples to the journal from time to time, and look up those found there."""

    def __init__(
        self,
        engine: Engine,
        found: Mapping[TurnId, PartialTurn],
        write: Callable[[list[PartialTurn]], object] | None,
    ):
        """Take the turns found in the journal, and a function that writes more; None: nothing is written."""
        self._engine, self._found, self._write = engine, found, write
        self._followed: dict[tuple[str, int], _Followed] = {}
        # Ended turns of episodes that continue, where the journal does not have the whole turn.
        self._ended: dict[EpisodeId, list[PartialTurn]] = {}
        self._due = time.monotonic() + WRITE_SECONDS if write else float("inf")

    def find(self, episode: Episode) -> PartialTurn | None:
        """Return what the journal has of the episode's next turn."""
        return self._found.get(next_turn(episode)) if self._found else None

    def follow(self, id: str, index: int, episode: Episode) -> None:
        """Follow a sequence of a request, which continues where the journal's partial turn ends."""
        if self._write:
            known = self.find(episode)
            counts = (len(known.written.tokens), len(known.written.scores or ())) if known else ()
            self._followed[id, index] = _Followed(episode, *counts)

    def end_turn(self, id: str, index: int, completion: CompletionOutput, continues: bool) -> None:
        """Stop following a sequence, before its episode is extended and the engine forgets it.

        `continues`: the episode may have more turns, so that this one must be written.
        """
        followed = self._followed.pop((id, index), None)
        if followed and continues:
            rest = self._rest(id, index, followed, completion.finish_reason, completion.text)
            self._ended.setdefault(rest.turn.episode, []).append(rest)

    def end_episode(self, episode: Episode) -> None:
        """Forget the turns of an episode that has ended: the journal has all of it."""
        self._ended.pop(episode.id, None)

    def write_if_due(self) -> None:
        """Write what is new, if enough time has passed."""
        began = time.monotonic()
        if self._write is None or began < self._due:
            return
        parts = [each for turns in self._ended.values() for each in turns]
        parts += [self._rest(*key, followed) for key, followed in self._followed.items()]
        self._ended.clear()
        if parts := [each for each in parts if each.written.tokens]:
            self._write(parts)
        now = time.monotonic()
        self._due = now + max(WRITE_SECONDS, (now - began) / MAX_SHARE)

    def _rest(self, id: str, index: int, followed: _Followed, finish: str = "", text: str = "") -> PartialTurn:
        first = followed.tokens
        written = self._engine.partial_output(id, index, first, followed.scores)
        followed.tokens += len(written.tokens)
        followed.scores += len(written.scores or ())
        return PartialTurn(next_turn(followed.episode), written, first, finish, text)


# --- JSON -------------------------------------------------------------------------------------------------------------


def to_json(parts: Sequence[PartialTurn]) -> str:
    """Return partial turns as one JSON object with a few arrays.

    A fast engine samples a hundred thousand tokens per second, and this must not slow it down.
    """
    scores = [score for each in parts for score in each.written.scores or ()]
    count = sum(len(each.written.tokens) for each in parts)
    arrays = {
        "tokens": np.fromiter(chain.from_iterable(each.written.tokens for each in parts), np.int32, count),
        "logprobs": np.fromiter(chain.from_iterable([score[0] for score in scores]), np.float32, count),
    }
    tops = [top for score in scores if score[2] for top in score[2]]
    if tops:
        arrays["top"] = np.asarray([ids for ids, _ in tops], np.int32)
        arrays["top_logprobs"] = np.asarray([values for _, values in tops], np.float32)
    plain = {
        "turns": [(*each.turn.episode, each.turn.before, each.turn.version) for each in parts],
        "first": [each.first for each in parts],
        "count": [len(each.written.tokens) for each in parts],
        "ends": {str(i): (each.finish, each.text) for i, each in enumerate(parts) if each.finish},
    }
    return with_arrays(plain, arrays)


def from_json(entry: dict[str, Any]) -> list[PartialTurn]:
    """Return the partial turns that `to_json` wrote."""
    tokens, logprobs = array_of(entry, "tokens", np.int32).tolist(), array_of(entry, "logprobs", np.float32).tolist()
    top = [array_of(entry, name, dtype) for name, dtype in (("top", np.int32), ("top_logprobs", np.float32))]
    tops = [*zip(*(each.reshape(len(tokens), -1).tolist() for each in top), strict=True)] if top[0].size else None
    ends, found = [*accumulate(entry["count"])], []
    for i, (turn, end, count) in enumerate(zip(entry["turns"], ends, entry["count"], strict=True)):
        *episode, before, version = turn
        part = slice(end - count, end)
        scores: Scores = logprobs[part], [0] * count, tops and tops[part]  # ranks are not read, and not stored
        finish, text = entry["ends"].get(str(i), ("", ""))
        written = PartialOutput(tokens[part], [scores], ((0, version),))
        found.append(
            PartialTurn(TurnId(EpisodeId(*episode), before, version), written, entry["first"][i], finish, text)
        )
    return found
