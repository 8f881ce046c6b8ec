"""SamplingPlan: what a request asks of the sampler, made once in intake. SamplingState: what the sampler keeps with
each of its sequences."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from dovetail.engine.grammar import Grammar, Matcher

# the numbers of SampleInputs that stay as they are from a sequence's first token to its last
FIXED = (
    "temperature", "top_p", "min_p", "presence", "frequency", "repetition", "seed_hi", "seed_lo", "top_k",
    "top_logprobs",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class SamplingPlan:
    """What takes long to make of SamplingParams (words tokenized, masks, a grammar compiled), for all n sequences.
    W = ceil(V / 32) words of mask, V vocabulary."""

    mask: np.ndarray | None = None  # [W] uint32: allowed_token_ids and bad words of one token
    early: np.ndarray | None = None  # [W] uint32: what holds until min_tokens are there
    bad: tuple[tuple[int, ...], ...] = ()  # bad words of several tokens
    grammar: Grammar | None = None


@dataclass(eq=False)
class SamplingState:
    """The defaults are a greedy row that asks for nothing. W = ceil(V / 32) words of mask, V vocabulary."""

    floats: tuple[float, ...] = (0.0, 1.0, 0.0, 0.0, 0.0, 1.0)  # temperature, top_p, min_p, presence, frequency, repet.
    ints: tuple[int, ...] = (0, 0, 0)  # top_k, seed_hi, seed_lo
    bias: Mapping[int, float] = field(default_factory=dict)
    penalized: bool = False
    mask: np.ndarray | None = None  # [W] uint32: what holds throughout
    early: np.ndarray | None = None  # [W] uint32: what holds until min_tokens are there
    early_until: int = 0  # the position at which `early` ends
    bad: tuple[tuple[int, ...], ...] = ()  # bad words of several tokens
    matcher: Matcher | None = None
    top_logprobs: int | None = None
    fed: int = 0  # output tokens the matcher has seen
    history_of: tuple[int | None, int] | None = None  # (slot, preemptions) for which the history row was written

    @property
    def needs_host(self) -> bool:
        return self.matcher is not None or bool(self.bad) or (self.mask is not None and self.early is not None)

    @functools.cached_property
    def asks(self) -> bool:
        """Whether it asks for more than numbers that stay as they are."""
        masks = self.mask is not None or self.early is not None or self.bad or self.matcher
        return bool(self.penalized or self.bias or masks)

    @functools.cached_property
    def numbers(self) -> np.ndarray:
        """[FIXED] int32: their bits."""
        floats = np.array(self.floats, np.float32).view(np.int32)
        words = np.array(self.ints[1:], np.uint32).view(np.int32)
        top_logprobs = -1 if self.top_logprobs is None else self.top_logprobs
        return np.array([*floats, *words, self.ints[0], top_logprobs], np.int32)
