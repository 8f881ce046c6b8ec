"""The engine's words: what was asked (Request), the scheduler's record of one answer (Sequence), what a step brought it
(Update), and the answer (Completion, RequestOutput)."""

from __future__ import annotations

import enum
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from dovetail.engine.grammar import Grammar, Matcher
from dovetail.engine.request.logprobs import Scores, TokenLogprob
from dovetail.engine.request.params import SamplingParams
from dovetail.engine.request.text import Text

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


class Status(enum.Enum):
    WAITING = "waiting"  # not begun, or preempted: holds no pages
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True)
class Adapter:
    """One that is loaded (see engine.adapters)."""

    name: str
    version: int  # counts an engine's loads: of one name, each is another
    number: int  # of its slot, from 1 on


@dataclass(frozen=True)
class Request:
    """A prompt and what is wanted of it; `params.n` sequences answer it."""

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    arrival: float = 0.0
    priority: int = 0  # lower goes first
    adapter: Adapter | None = None  # None: the model alone
    cache_salt: str | None = None
    seed: int = 0  # params.seed, or one drawn when the request came
    text: bool = True  # False: the caller makes the text of the tokens, and looks for `params.stop` in it
    sampling: SamplingPlan | None = None  # of `params`; None: the sampler makes it with the first sequence


@dataclass(slots=True)
class Times:
    """When things happened to a sequence, in seconds of time.monotonic; None where they have not."""

    arrival: float
    scheduled: float | None = None  # when a step first took it up
    first_token: float | None = None
    finished: float | None = None


@dataclass(eq=False, slots=True)
class Sequence:
    """One answer in the making.

    `tokens` are known to the host. `pending` more have been sampled on the device and are on their way; their number
    is all that scheduling needs. `computed` tokens have their keys and values in pages, or will once the steps that
    are under way have run.
    """

    request: Request
    index: int = 0  # which of the request's n
    tokens: list[int] = field(default_factory=list)
    pending: int = 0
    computed: int = 0
    pages: list[int] = field(default_factory=list)
    slot: int | None = None  # its row in the runner's tables while it runs
    status: Status = Status.WAITING
    finish_reason: str | None = None  # stop, length, abort
    stop_reason: int | str | None = None  # the token id or string that stopped it
    preemptions: int = 0
    cached_tokens: int = 0  # of the prompt, found in the prefix cache
    block_hashes: list[bytes] = field(default_factory=list)  # of its full pages, as far as they are known
    scores: list[Scores] | None = None  # of its output so far, a part for each step, where they were asked for
    prompt_logprobs: dict[int, TokenLogprob] = field(default_factory=dict)  # by position, as far as they are computed
    version: int | None = None  # of the weights that sampled its last token; None: it has none
    versions: list[tuple[int, int]] = field(default_factory=list)  # see Completion.weights_versions
    text: Text | None = None  # of its output so far; None: the caller makes the text
    sampling: SamplingState | None = None
    single_step: bool = False  # the host must see each token before the next is sampled (a grammar)
    by_token: bool = False  # each token may stop it: more can than end tokens and its length, which are found in arrays
    grammar_error: str | None = None  # why its grammar could not go on
    limit: int = 0  # the most tokens it may reach, prompt included; set when the scheduler takes it
    times: Times = field(init=False)
    rank: tuple = ()  # its place in the scheduler's order: its policy's priority, arrival, the order of adding

    def __post_init__(self):
        self.times = Times(self.request.arrival)
        if not self.tokens:
            self.tokens = list(self.request.prompt)
        if self.request.params.logprobs is not None:
            self.scores = []

    @property
    def id(self) -> str:
        return f"{self.request.id}/{self.index}"

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt)

    @property
    def length(self) -> int:
        """Tokens there are, known or pending."""
        return len(self.tokens) + self.pending

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_len :]
