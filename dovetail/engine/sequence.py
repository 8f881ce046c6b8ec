"""The engine's words: what was asked (Request), the scheduler's record of one answer (Sequence), what a step brought it
(Update), and the answer (Completion, RequestOutput)."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from dovetail.engine.params import SamplingParams
from dovetail.engine.sampling_state import SamplingPlan, SamplingState
from dovetail.engine.text import Text
from dovetail.engine.token_logprobs import Logprobs, Scores, TokenLogprob


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


@dataclass(frozen=True)
class Completion:
    """One finished answer."""

    index: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    stop_reason: int | str | None = None
    logprobs: Logprobs | None = None  # a TokenLogprob for each token, where they were asked for
    weights_version: int = 0  # the last that sampled a token of it
    weights_versions: tuple[tuple[int, int], ...] = ()  # (from which token on, version), where they changed under way
    times: Times | None = None

    @property
    def token_logprobs(self) -> np.ndarray | None:
        """[tokens] f32: the log-probabilities alone, with no object made for each."""
        return None if self.logprobs is None else self.logprobs.array


@dataclass(frozen=True)
class RequestOutput:
    """A request with its n completions."""

    id: str
    prompt_token_ids: tuple[int, ...]
    completions: tuple[Completion, ...]
    cached_tokens: int = 0
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    adapter: Adapter | None = None  # that answered it


class Update(NamedTuple):
    """What a step brought one sequence: a record for any thread. A tuple, because every sequence gets one per step."""

    id: str  # the request's
    index: int  # which of the request's n
    tokens: list[int]
    text: str
    time: float  # when the engine had them, in seconds of time.monotonic
    times: Times  # the sequence's own, which the engine fills in as things happen
    cached_tokens: int = 0  # of the prompt, found in the prefix cache
    weights_version: int = 0  # of the weights that sampled these tokens
    scores: list[Scores] | None = None  # of these tokens, where they were asked for; see `logprobs`
    finish_reason: str | None = None  # stop, length, abort; None: it goes on
    stop_reason: int | str | None = None  # the token id or string that stopped it
    error: str | None = None  # why it ended, where it was not asked to: a grammar that could not go on
    output: RequestOutput | None = None  # in a request's last update from Engine.close or abort: the whole of it

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def logprobs(self) -> Logprobs | None:
        """A TokenLogprob for each of these tokens, where they were asked for."""
        return None if self.scores is None else Logprobs(self.tokens, self.scores)

    def then(self, later: Update) -> Update:
        """Both in one, for a reader that takes them more slowly than they come."""
        scores = None if self.scores is None else self.scores + (later.scores or [])
        return later._replace(tokens=self.tokens + later.tokens, text=self.text + later.text, scores=scores)
