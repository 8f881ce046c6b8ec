"""The engine's words: what was asked (Request), the scheduler's record of one answer (Sequence), what a step brought it
(Update), and the answer (Completion, RequestOutput)."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dovetail.engine.params import SamplingParams


class Status(enum.Enum):
    WAITING = "waiting"  # not begun, or preempted: holds no pages
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True)
class Request:
    """A prompt and what is wanted of it; `params.n` sequences answer it."""

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    arrival: float = 0.0
    priority: int = 0  # lower goes first
    adapter: str | None = None
    cache_salt: str | None = None
    seed: int = 0  # params.seed, or one drawn when the request came
    text: bool = True  # False: whoever asked makes the text of the tokens himself, and looks for `params.stop` in it


@dataclass(slots=True)
class Times:
    """When things happened to a sequence, in seconds of time.monotonic; None where they have not."""

    arrival: float
    scheduled: float | None = None  # when a step first took it up
    first_token: float | None = None
    finished: float | None = None


@dataclass(eq=False)
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
    logprobs: list[Any] = field(default_factory=list)
    versions: list[tuple[int, int]] = field(default_factory=list)  # see Completion.weights_versions
    extra: dict[str, Any] = field(default_factory=dict)  # what engine and runner keep with it: grammar, text
    limit: int = 0  # the most tokens it may reach, prompt included; set when the scheduler takes it
    rank: tuple = ()  # its place in the scheduler's order: its policy's priority, arrival, who was added first

    def __post_init__(self):
        self.times = Times(self.request.arrival)
        if not self.tokens:
            self.tokens = list(self.request.prompt)

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
    logprobs: tuple[Any, ...] | None = None
    weights_version: int = 0  # the last that sampled a token of it
    weights_versions: tuple[tuple[int, int], ...] = ()  # (from which token on, version), where they changed under way
    times: Times | None = None


@dataclass(frozen=True)
class RequestOutput:
    """A request with its n completions."""

    id: str
    prompt_token_ids: tuple[int, ...]
    completions: tuple[Completion, ...]
    cached_tokens: int = 0
    prompt_logprobs: tuple[Any, ...] | None = None


class Update(NamedTuple):
    """What a step brought one sequence. Of `seq`, the engine's thread may change whatever is not finished: another
    thread reads its request and times, and, once `finished`, how it ended. A tuple, because every sequence gets one at
    every step."""

    seq: Sequence
    tokens: list[int]
    text: str
    finished: bool
    logprobs: list[Any] | None = None  # of these tokens, where they were asked for
    time: float = 0.0  # when the engine had them, in seconds of time.monotonic
    output: RequestOutput | None = None  # in a request's last update from Engine.close or abort: the whole of it

    @property
    def id(self) -> str:
        """The request's."""
        return self.seq.request.id

    @property
    def index(self) -> int:
        return self.seq.index

    def then(self, later: Update) -> Update:
        """Both in one, for who takes them more slowly than they come."""
        logprobs = None if self.logprobs is None else self.logprobs + (later.logprobs or [])
        return later._replace(tokens=self.tokens + later.tokens, text=self.text + later.text, logprobs=logprobs)
