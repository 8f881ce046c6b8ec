"""A step's plan: what the scheduler decided and the runner carries out. Plain data, no jax."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import NamedTuple

from dovetail.engine.request.sequence import Sequence


@dataclass
class Row:
    """`count` tokens of a sequence from `start` on. With `samples`, the last of them is the sequence's newest and the
    step gives it a new token (one per step of a multi-step plan)."""

    seq: Sequence
    start: int
    count: int
    samples: bool


@dataclass
class StepPlan:
    rows: list[Row]
    steps: int = 1  # more than one only when every row decodes: count 1 and samples
    preempted: list[Sequence] = field(default_factory=list)

    @functools.cached_property
    def num_tokens(self) -> int:
        return sum(row.count for row in self.rows)

    @functools.cached_property
    def is_decode(self) -> bool:
        return all(row.count == 1 and row.samples for row in self.rows)


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


Gain = tuple[Sequence, list[int], int]  # the tokens kept, and the plan's row they came from
