"""What other threads and processes know of a running engine: its controls, its statistics, and errors that they catch.

Plain data, no jax. An EngineLoop calls controls by name; a server's process passes name and arguments on to it. A
snapshot of the statistics costs one look at each running sequence.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, NamedTuple

# --- controls ---------------------------------------------------------------------------------------------------------


class EngineDied(RuntimeError):
    """Report that the engine has ended; `__cause__` is the cause if known, or None if the engine was stopped."""


class Later(Exception):
    """Signal that a control's method must wait for requests to end; an EngineLoop calls it again."""


@dataclass(frozen=True)
class Control:
    """Describe one control."""

    method: str  # of Engine; called on the engine's thread between two steps
    idle: bool = False  # whether steps in flight are committed first
    prepare: str | None = None  # of Engine; makes the method's arguments first, on the caller's thread
    change: str | None = None  # the message for requests that arrive meanwhile, if none is answered afterwards


CONTROLS = {
    "sleep": Control("sleep", idle=True, change="the engine is going to sleep"),
    "wake_up": Control("wake_up"),
    "pause": Control("pause", idle=True, change="the engine is being paused"),
    "resume": Control("resume"),
    "reset_prefix_cache": Control("reset_prefix_cache"),
    "update_weights": Control("swap_weights", idle=True, prepare="read_weights"),
    "load_adapter": Control("offer_adapter", prepare="read_adapter"),
    "unload_adapter": Control("drop_adapter"),
    "adapter_unused": Control("await_unused"),
    "adapter_place": Control("await_place"),
}


# --- statistics -------------------------------------------------------------------------------------------------------


@dataclass
class SpeculationCounts:
    """Counters of speculative decoding, under vLLM's names (`vllm:spec_decode_num_*`)."""

    drafts: int = 0  # rows of verify steps with draft tokens
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_per_pos: list[int] = field(default_factory=list)


class SpecDecodeMetrics(NamedTuple):
    """Counters of speculative decoding of one completion, under vLLM's names (`metrics.speculative_decoding`)."""

    acceptance_histogram: tuple[int, ...] = ()  # at j: verify steps that accepted j draft tokens
    num_draft_tokens: int = 0

    @property
    def num_spec_steps(self) -> int:
        """Return the verify steps with draft tokens of this completion."""
        return sum(self.acceptance_histogram)

    @property
    def num_accepted_draft_tokens(self) -> int:
        """Return the draft tokens that were accepted."""
        return sum(count * steps for count, steps in enumerate(self.acceptance_histogram))

    @property
    def mean_acceptance_length(self) -> float:
        """Return the tokens gained per verify step: the accepted draft tokens, and the token sampled after them."""
        return 1 + self.num_accepted_draft_tokens / self.num_spec_steps

    @property
    def draft_acceptance_rate(self) -> float:
        """Return the share of draft tokens that were accepted."""
        return self.num_accepted_draft_tokens / self.num_draft_tokens

    def __add__(self, other: SpecDecodeMetrics) -> SpecDecodeMetrics:  # type: ignore[override]
        """Return the counters of two completions together."""
        pairs = zip_longest(self.acceptance_histogram, other.acceptance_histogram, fillvalue=0)
        return SpecDecodeMetrics(tuple(map(sum, pairs)), self.num_draft_tokens + other.num_draft_tokens)

    def shown(self) -> dict[str, Any]:
        """Return the fields as vLLM shows them."""
        means = {name: getattr(self, name) for name in ("mean_acceptance_length", "draft_acceptance_rate")}
        counts = {name: getattr(self, name) for name in ("num_spec_steps", "num_accepted_draft_tokens")}
        return means | counts | self._asdict()


@dataclass(frozen=True)
class EngineStats:
    """Hold a snapshot of the engine; counters are since the start. A prompt sampled n times counts n times."""

    # now
    running: int  # sequences (a request has n)
    waiting: int
    pages_used: int  # held by running sequences
    pages_cached: int  # held by no sequence, but findable by a prompt with the same prefix
    pages_total: int
    waste: float  # share of held token slots without a token, because a sequence's last page is partly filled
    # counters
    preemptions: int
    prompt_tokens: int  # of sequences that have been scheduled
    prefix_query_tokens: int
    prefix_hit_tokens: int
    generated_tokens: int = 0
    steps: int = 0  # device steps; one dispatch may have several
    computed_tokens: int = 0  # without padding
    padding_tokens: int = 0  # computed to fill the shapes that steps are compiled for
    weights_version: int = 0
    sleeping: int = 0  # level of the sleep; 0: awake
    decode_seconds: float = 0.0  # of a decode step, recently; 0: none was taken
    predicted_least: float = 0.0  # best case of a decode step for what runs now, in seconds; 0: unknown
    predicted_most: float = 0.0  # worst case
    compiled: int = 0  # steps whose compilation has started; those read from disk do not count
    compile_seconds: float = 0.0  # of finished compilations; several may run at a time
    speculation: SpeculationCounts | None = None  # None: the engine does not speculate
    encoded_items: int = 0  # images, or tiles of images, that the vision tower has computed
    encoder_hits: int = 0  # those whose features were still there when a step needed them
    encoder_rows: int = 0  # rows of the encoder's buffer that hold features now

    @property
    def pages_share(self) -> float:
        """Return the held share of the KV pool; cached pages count as free."""
        return self.pages_used / self.pages_total

    @property
    def prefix_hit_rate(self) -> float:
        """Return the share of looked-up tokens that were found in the prefix cache."""
        return self.prefix_hit_tokens / self.prefix_query_tokens if self.prefix_query_tokens else 0.0

    @property
    def padding(self) -> float:
        """Return the share of computed tokens that were padding."""
        total = self.computed_tokens + self.padding_tokens
        return self.padding_tokens / total if total else 0.0
