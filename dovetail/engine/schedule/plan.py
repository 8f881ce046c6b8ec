"""StepPlan: what the scheduler decided and the runner carries out. Plain data, no jax."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from dovetail.engine.request.sequence import Sequence
from dovetail.io.images.item import ImageItem

UNKNOWN = -1  # a token that only the device knows: the last one its slot sampled, or a draft model's
REJECTED = -1  # in place of a token that was sampled after a rejected draft token


@dataclass
class PlanRow:
    """`count` tokens of a sequence from position `start` on.

    With `samples`, the last of them is the sequence's newest token and the step samples the next one (one per device
    step of a plan with several). With `drafts`, the newest token is followed by these draft tokens, and the step
    samples after each of them; a draft model proposes those that are UNKNOWN. With `ahead`, `start` is the last that
    is possible: the step before, which has draft tokens too, is in flight, and only the device knows how many tokens it
    gains.
    """

    seq: Sequence
    start: int
    count: int
    samples: bool
    drafts: tuple[int, ...] = ()
    ahead: bool = False


@dataclass
class StepPlan:
    """Hold the rows of one dispatch to the device."""

    rows: list[PlanRow]
    steps: int = 1  # device steps; more than one only if every row decodes (count 1 and samples)
    preempted: list[Sequence] = field(default_factory=list)
    requested: int = 0  # draft tokens per row that were requested for it
    images: Mapping[bytes, np.ndarray] = field(default_factory=dict)  # rows of the features of its items, by key
    encode: Many[tuple[ImageItem, np.ndarray]] = ()  # the items to encode first, and the rows of their features

    @functools.cached_property
    def num_tokens(self) -> int:
        """Return the tokens of one device step."""
        return sum(row.count for row in self.rows)

    @functools.cached_property
    def is_decode(self) -> bool:
        """Return whether every row computes one token and samples the next."""
        return all(row.count == 1 and row.samples for row in self.rows)

    @functools.cached_property
    def num_drafts(self) -> int:
        """Return the most draft tokens of a row; more than 0 in a verify step, whose rows all sample."""
        return max((len(row.drafts) for row in self.rows), default=0)


class StepLimits(NamedTuple):
    """Limit a step, so that no stream waits for a long prompt or for a compiler."""

    tokens: int
    rows: int
    prompts: int  # rows of more than one token


class StepDemand(NamedTuple):
    """Hold what the scheduler would put into a step without limits."""

    decoding: int  # sequences that decode
    prompts: int = 0  # sequences with more than one token to compute
    tokens: int = 0  # of those
    scores: bool = False  # some of them request prompt log-probabilities, which only some programs compute
    images: bool = False  # some of them have image tokens to compute
    least: int = 0  # tokens that one of them must compute in one step: an image with a block mask

    @property
    def rows(self) -> int:
        """Return the rows of the step."""
        return self.decoding + self.prompts

    @property
    def least_tokens(self) -> int:
        """Return the tokens that a step must have room for; a row leaves a token for each that comes after it."""
        return self.rows + self.least if self.least else 0


Drafts = Mapping[Sequence, tuple[int, ...]]  # draft tokens by sequence
Gain = tuple[Sequence, list[int], int]  # a sequence, the tokens it kept, and the index of its row in the plan
