"""A step's plan: what the scheduler decided and the runner carries out. Plain data, no jax."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

from dovetail.engine.sequence import Sequence


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
