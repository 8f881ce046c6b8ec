"""A draft: what the policy has written of a turn that is not over, or of one whose episode is not, for the journal.

A run that is killed goes on from its drafts: what they hold is not sampled again. An environment is played anew, and a
draft counts where it says the same again.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from typing import Any, NamedTuple

import numpy as np

from dovetail.engine.request.logprobs import Logprobs, Scores
from dovetail.engine.request.outputs import CompletionOutput, PartialOutput
from dovetail.tune.rl.episode import Episode, Place, array_of, with_arrays


class Turn(NamedTuple):
    """Which turn of which episode."""

    place: Place
    before: int  # a checksum of the tokens that it follows
    version: int  # of the weights that write it


@dataclass(frozen=True)
class Draft:
    turn: Turn
    written: PartialOutput
    first: int = 0  # how many tokens of the turn came before these
    finish: str = ""  # how the turn ended; "": it goes on
    text: str = ""  # of all of it, where the engine made one and the turn is over

    @property
    def completion(self) -> CompletionOutput:
        """Of one that is over: as the engine gave it."""
        tokens, scores = tuple(self.written.tokens), self.written.scores or []
        return CompletionOutput(0, tokens, self.text, self.finish, logprobs=Logprobs(tokens, scores))

    def then(self, more: Draft) -> Draft:
        tokens, scores = [*self.written.tokens, *more.written.tokens], _joined(self.written.scores, more.written.scores)
        return replace(more, written=replace(more.written, tokens=tokens, scores=scores), first=self.first)


def turn_of(episode: Episode) -> Turn:
    """The one that begins now."""
    return Turn(episode.place, zlib.crc32(episode.tokens.tobytes()), episode.version)


def joined(drafts: Iterable[Draft]) -> dict[Turn, Draft]:
    """Whole ones, of the parts that were kept one after another."""
    found: dict[Turn, Draft] = {}
    for each in drafts:
        before = found.get(each.turn)
        if not each.first:
            found[each.turn] = each
        elif before and len(before.written.tokens) == each.first:
            found[each.turn] = before.then(each)
    return found


def _joined(before: list[Scores] | None, more: list[Scores] | None) -> list[Scores] | None:
    return None if before is None or more is None else before + more


# --- as JSON ----------------------------------------------------------------------------------------------------------


def to_json(drafts: Sequence[Draft]) -> str:
    """All in a few arrays: a fast engine writes a hundred thousand tokens per second, and this must not slow it
    down.
    """
    parts = [part for each in drafts for part in each.written.scores or ()]
    count = sum(len(each.written.tokens) for each in drafts)
    arrays = {
        "tokens": np.fromiter(chain.from_iterable(each.written.tokens for each in drafts), np.int32, count),
        "logprobs": np.fromiter(chain.from_iterable([part[0] for part in parts]), np.float32, count),
    }
    tops = [top for part in parts if part[2] for top in part[2]]
    if tops:
        arrays["top"] = np.asarray([ids for ids, _ in tops], np.int32)
        arrays["top_logprobs"] = np.asarray([values for _, values in tops], np.float32)
    told = {
        "turns": [(*each.turn.place, each.turn.before, each.turn.version) for each in drafts],
        "first": [each.first for each in drafts],
        "count": [len(each.written.tokens) for each in drafts],
        "ends": {str(i): (each.finish, each.text) for i, each in enumerate(drafts) if each.finish},
    }
    return with_arrays(told, arrays)


def from_json(entry: dict[str, Any]) -> list[Draft]:
    tokens, logprobs = array_of(entry, "tokens", np.int32).tolist(), array_of(entry, "logprobs", np.float32).tolist()
    top = [array_of(entry, name, dtype) for name, dtype in (("top", np.int32), ("top_logprobs", np.float32))]
    tops = [*zip(*(each.reshape(len(tokens), -1).tolist() for each in top), strict=True)] if top[0].size else None
    ends, found = [*accumulate(entry["count"])], []
    for i, (turn, end, count) in enumerate(zip(entry["turns"], ends, entry["count"], strict=True)):
        *place, before, version = turn
        part = slice(end - count, end)
        scores = logprobs[part], [0] * count, tops and tops[part]  # nobody asks for the ranks of what was sampled
        finish, text = entry["ends"].get(str(i), ("", ""))
        written = PartialOutput(tokens[part], [scores], ((0, version),))
        found.append(Draft(Turn(Place(*place), before, version), written, entry["first"][i], finish, text))
    return found
