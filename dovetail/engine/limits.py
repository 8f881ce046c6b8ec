"""What the next step may take, so that no stream waits for another request: neither for a long prompt nor for a program
that is not compiled yet. Plain data, no jax."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from dovetail.engine.batch import Shape

MOST_PADDING = 4  # times a step's tokens: a program that is so much larger is used while its own is compiled


class Limits(NamedTuple):
    """Of one step."""

    tokens: int
    rows: int
    prompts: int  # rows of more than one token


class Demand(NamedTuple):
    """What the scheduler would put into a step without limits."""

    decoding: int  # sequences that decode
    prompts: int = 0  # sequences with more than one token to compute
    tokens: int = 0  # of those
    scores: bool = False  # some ask for log-probabilities of their prompt, which only some programs give

    @property
    def rows(self) -> int:
        return self.decoding + self.prompts


def limits_of(demand: Demand, budget: int, wanted: Shape, ready: Sequence[Shape]) -> Limits | None:
    """Return what a step of `budget` tokens may take of `demand` with programs that are `ready`, where `wanted` would
    be the program for all of it. None: nothing can go on before another program is compiled.

    All who decode come first: a program without a row for each of them is not used for prompts."""
    if demand.prompts:
        most_tokens = max(budget, MOST_PADDING * wanted.tokens)
        fit = [s for s in ready if not s.is_decode and s.keeps_hidden == demand.scores and s.tokens <= most_tokens]
        if any(s.holds(wanted) for s in fit):
            return Limits(budget, demand.rows, demand.prompts)
        if some := [s for s in fit if s.rows > demand.decoding]:
            largest = max(some, key=lambda s: (s.tokens, s.rows))
            return Limits(min(budget, largest.tokens), largest.rows, largest.rows - demand.decoding)
    rows = max((s.rows for s in ready if s.steps == 1), default=0)
    return Limits(budget, rows, 0) if demand.decoding and rows else None
