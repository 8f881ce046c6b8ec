"""Stats: how the engine stands and what it has done, in numbers. Read it as often as you like: nothing is counted by
the token, and a snapshot costs one look at each running sequence."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Stats:
    """Counts are since the start. Tokens are tokens of sequences: a prompt sampled n times counts n times."""

    # now
    running: int  # sequences: n of a request
    waiting: int
    pages_used: int  # held by running sequences
    pages_cached: int  # held by none, but found again by a prompt that begins alike
    pages_total: int
    waste: float  # the share of the held slots that hold no token, because a sequence's last page is part-filled
    # since the start
    preemptions: int
    prompt_tokens: int  # of sequences that have been scheduled
    prefix_query_tokens: int
    prefix_hit_tokens: int
    generated_tokens: int = 0
    steps: int = 0  # of the device; one dispatch may take several
    computed_tokens: int = 0  # what the steps were for
    padding_tokens: int = 0  # what they computed beside that, to fill the shapes they are compiled for
    weights_version: int = 0
    sleeping: int = 0  # the level; 0: awake
    decode_seconds: float = 0.0  # of a decode step, lately; 0: none was taken
    predicted_least: float = (
        0.0  # seconds of one for what runs now, at best and at worst; 0: not known, or nothing runs
    )
    predicted_most: float = 0.0
    compiled: int = 0  # steps whose compilation has begun; those read from disk do not count
    compile_seconds: float = 0.0  # of those that have ended; several may be compiled at a time

    @property
    def pages_share(self) -> float:
        """How full the KV pool is, of what is held: cached pages are there for the taking."""
        return self.pages_used / self.pages_total

    @property
    def prefix_hit_rate(self) -> float:
        return self.prefix_hit_tokens / self.prefix_query_tokens if self.prefix_query_tokens else 0.0

    @property
    def padding(self) -> float:
        """The share of computed rows that were padding."""
        total = self.computed_tokens + self.padding_tokens
        return self.padding_tokens / total if total else 0.0
