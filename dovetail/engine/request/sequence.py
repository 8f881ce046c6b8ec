"""Request, the scheduler's record of each of its sequences, and where a sequence ends (Stops).

V vocabulary, W = ceil(V / 32) words of a token mask.
"""

from __future__ import annotations

import enum
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from dovetail.engine.grammar import Grammar, Matcher
from dovetail.engine.request.logprobs import Scores, TokenLogprob
from dovetail.engine.request.params import SamplingParams
from dovetail.engine.request.text import OutputText
from dovetail.io.images.item import ImageSpan

# The numbers of SampleInputs that stay the same from a sequence's first token to its last.
FIXED = (
    "temperature", "top_p", "min_p", "presence", "frequency", "repetition", "seed_hi", "seed_lo", "top_k",
    "top_logprobs",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class SamplingPlan:
    """Hold the part of SamplingParams that is slow to prepare, made once in intake and shared by the n sequences."""

    mask: np.ndarray | None = None  # [W] uint32: allowed_token_ids and one-token bad words
    early: np.ndarray | None = None  # [W] uint32: applies until min_tokens are sampled
    bad: tuple[tuple[int, ...], ...] = ()  # bad words of several tokens
    grammar: Grammar | None = None


@dataclass(eq=False)
class SamplingState:
    """Hold the sampler's state of one sequence. The defaults are a greedy row without masks or penalties."""

    floats: tuple[float, ...] = (0.0, 1.0, 0.0, 0.0, 0.0, 1.0)  # temperature, top_p, min_p, presence, frequency, repet.
    ints: tuple[int, ...] = (0, 0, 0)  # top_k, seed_hi, seed_lo
    bias: Mapping[int, float] = field(default_factory=dict)
    penalized: bool = False
    mask: np.ndarray | None = None  # [W] uint32: applies to every token
    early: np.ndarray | None = None  # [W] uint32: applies until min_tokens are sampled
    early_until: int = 0  # the position at which `early` ends
    bad: tuple[tuple[int, ...], ...] = ()  # bad words of several tokens
    matcher: Matcher | None = None
    top_logprobs: int | None = None
    fed: int = 0  # output tokens that the matcher has consumed
    history_of: tuple[int | None, int] | None = None  # (slot, preemptions) for which the history row was written

    @property
    def needs_host(self) -> bool:
        """Return whether the host must see each token before the next one is sampled."""
        return self.matcher is not None or bool(self.bad) or (self.mask is not None and self.early is not None)

    @functools.cached_property
    def asks(self) -> bool:
        """Return whether the sequence needs more than the FIXED numbers: a mask, a bias or penalties."""
        masks = self.mask is not None or self.early is not None or self.bad or self.matcher
        return bool(self.penalized or self.bias or masks)

    @functools.cached_property
    def numbers(self) -> np.ndarray:
        """Return the bits of the FIXED numbers, [len(FIXED)] int32."""
        floats = np.array(self.floats, np.float32).view(np.int32)
        words = np.array(self.ints[1:], np.uint32).view(np.int32)
        top_logprobs = -1 if self.top_logprobs is None else self.top_logprobs
        return np.array([*floats, *words, self.ints[0], top_logprobs], np.int32)


class Status(enum.Enum):
    """Name the states of a sequence."""

    WAITING = "waiting"  # not started, or preempted: holds no pages
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True)
class Adapter:
    """Hold a loaded LoRA adapter (see engine.device.adapters)."""

    name: str
    version: int  # grows with every load of an engine, also of the same name
    number: int  # of its slot, from 1


@dataclass(frozen=True)
class Request:
    """Hold a checked prompt with its sampling parameters; `params.n` sequences answer it."""

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    arrival: float = 0.0
    priority: int = 0  # lower goes first
    adapter: Adapter | None = None  # None: the base model
    cache_salt: str | None = None
    seed: int = 0  # params.seed, or one drawn when the request arrived
    text: bool = True  # False: the caller detokenizes, and looks for `params.stop` itself
    sampling: SamplingPlan | None = None  # made from `params`; None: the sampler makes it with the first sequence
    spans: tuple[ImageSpan, ...] = ()  # of its images, in order
    # with images and multimodal RoPE: [prompt + 1, 3] rotary positions in time, height and width minus positions in the
    # sequence; the last is that of all generated tokens
    offsets: np.ndarray | None = field(default=None, compare=False)


@dataclass(slots=True)
class Times:
    """Timestamps of a sequence, from time.monotonic; None for what has not happened."""

    arrival: float
    scheduled: float | None = None  # of the first step with the sequence
    first_token: float | None = None
    finished: float | None = None


@dataclass(eq=False, slots=True)
class Sequence:
    """Hold the state of one of the n sequences of a request.

    `tokens` are known to the host. `pending` more have been sampled on the device and not fetched yet; scheduling needs
    only their number. `computed` tokens have their keys and values in pages, or will have once the launched steps have
    run.
    """

    request: Request
    index: int = 0  # which of the request's n
    tokens: list[int] = field(default_factory=list)
    pending: int = 0
    computed: int = 0
    pages: list[int] = field(default_factory=list)
    slot: int | None = None  # its row in the runner's tables while it runs
    status: Status = Status.WAITING
    finish_reason: str | None = None  # stop, length, abort or error
    stop_reason: int | str | None = None  # the stop token id or stop string
    preemptions: int = 0
    cached_tokens: int = 0  # prompt tokens found in the prefix cache
    block_hashes: list[bytes] = field(default_factory=list)  # of its full pages, as far as they are computed
    scores: list[Scores] | None = None  # log-probabilities of the output, one part per step, if requested
    prompt_logprobs: dict[int, TokenLogprob] = field(default_factory=dict)  # by position, as far as computed
    version: int | None = None  # version of the weights that sampled its last token; None: no token yet
    versions: list[tuple[int, int]] = field(default_factory=list)  # see CompletionOutput.weights_versions
    text: OutputText | None = None  # of the output; None: the caller detokenizes
    sampling: SamplingState | None = None
    single_step: bool = False  # the host must see each token before the next one is sampled (a grammar)
    draft_state: object = None  # of the drafter, which extends it as tokens come
    verifying: int = 0  # steps with draft tokens in flight: how many tokens they gain is not known yet
    num_draft_tokens: int = 0
    acceptance_histogram: list[int] = field(default_factory=list)  # at j: verify steps that accepted j draft tokens
    by_token: bool = False  # more than EOS and length can stop it, so each token is checked (see Stops)
    error: str | None = None  # why the engine ended it, such as a grammar that allows no further token
    limit: int = 0  # most tokens including the prompt; set by the scheduler
    images_end: int = 0  # the position after its last image token; 0 without images
    number: int = field(
        default_factory=itertools.count(1).__next__
    )  # unique; the runner remembers this and not the images
    times: Times = field(init=False)
    rank: tuple = ()  # its position in the scheduler's order: priority, arrival, order of adding

    def __post_init__(self):
        self.times = Times(self.request.arrival)
        if not self.tokens:
            self.tokens = list(self.request.prompt)
        if self.request.spans:
            self.images_end = self.request.spans[-1].end
        if self.request.params.logprobs is not None:
            self.scores = []

    @property
    def id(self) -> str:
        """Return the request's id with the index, for messages."""
        return f"{self.request.id}/{self.index}"

    @property
    def prompt_len(self) -> int:
        """Return the number of prompt tokens."""
        return len(self.request.prompt)

    @property
    def length(self) -> int:
        """Return the number of tokens, known or pending."""
        return len(self.tokens) + self.pending

    def offset_at(self, position: int) -> int:
        """Return the rotary position of the text token at `position` minus `position`."""
        offsets = self.request.offsets
        return 0 if offsets is None else int(offsets[min(position, len(offsets) - 1), 0])

    @property
    def output(self) -> list[int]:
        """Return the known tokens after the prompt."""
        return self.tokens[self.prompt_len :]

    def count_drafts(self, proposed: int, accepted: int) -> None:
        """Count a verify step with `proposed` draft tokens of this sequence."""
        found = self.acceptance_histogram
        found += [0] * (accepted + 1 - len(found))
        found[accepted] += 1
        self.num_draft_tokens += proposed


End = tuple[str, int | str | None]  # (finish_reason, stop_reason)


class Stops:
    """Find where sequences end.

    EOS tokens are found in all tokens of a step at once and lengths by arithmetic. A sequence that can also stop
    otherwise (stop ids, stop strings, a grammar, min_tokens) is `by_token` and checked token by token.

    Args:
        eos_ids: Tokens that end every sequence without `ignore_eos`.
        grammar_done: Return whether a sequence's grammar allows nothing more; called for sequences with a grammar.
    """

    def __init__(self, eos_ids: Iterable[int] = (), grammar_done: Callable[[Sequence], bool] | None = None):
        self.eos_ids, self._grammar_done = tuple(eos_ids), grammar_done

    def watch(self, seq: Sequence) -> None:
        """Set `by_token` of a new sequence, whose `text` is already set if it has one."""
        params = seq.request.params
        strings = params.stop if seq.text is not None else ()
        seq.by_token = bool(strings or params.stop_token_ids or params.structured_outputs or params.min_tokens)

    def find(self, sampled: np.ndarray) -> dict[int, int]:
        """Return the columns of `sampled` [steps, S] that have an EOS token, with the step of the first one."""
        found = np.zeros(sampled.shape, bool)
        for token in self.eos_ids:
            found |= sampled == token
        if not found.any():
            return {}
        columns = np.flatnonzero(found.any(axis=0))
        return dict(zip(columns.tolist(), found[:, columns].argmax(axis=0).tolist(), strict=True))

    def cut(self, seq: Sequence, tokens: list[int], eos: int | None) -> tuple[list[int], End | None]:
        """Return the new tokens that a sequence keeps and how it ends; `eos` is the position of the first EOS token."""
        room = seq.limit - len(seq.tokens)
        if eos is not None and eos < room and not seq.request.params.ignore_eos:
            return tokens[: eos + 1], ("stop", None)
        return (tokens[:room], ("length", None)) if len(tokens) >= room else (tokens, None)

    def append_each(self, seq: Sequence, tokens: list[int]) -> tuple[list[int], End | None]:
        """Append new tokens up to the one that ends the sequence; return the appended tokens and how it ends."""
        for count, token in enumerate(tokens, 1):
            seq.tokens.append(token)
            end = self._end_at(seq, token)
            if end is None and len(seq.tokens) >= seq.limit:
                end = ("length", None)
            if end is not None:
                return tokens[:count], end
        return tokens, None

    def _end_at(self, seq: Sequence, token: int) -> End | None:
        """Return how the token that was just appended ends the sequence; None if it does not."""
        params = seq.request.params
        early = len(seq.tokens) - seq.prompt_len < params.min_tokens
        if token in self.eos_ids and not params.ignore_eos and not early:
            return "stop", None
        if token in params.stop_token_ids and not early:
            return "stop", token
        if seq.text is not None:
            stop = seq.text.push(token, may_stop=not early)
            if stop is not None:
                return "stop", stop
        if params.structured_outputs and self._grammar_done is not None and self._grammar_done(seq):
            return "stop", seq.error  # set if the grammar could not continue
        return None
