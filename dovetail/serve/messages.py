"""What the HTTP process and the engine's process say to each other: structs as msgpack, each behind its length.

The parent sends Start, then Add and Call. The child answers with Progress, then Ready or Failed; from then on Deltas of
every step, Refused for an Add that the engine does not take, and an Answer to each Call. Every Add has exactly one end:
Refused, or the finished delta of each of its n sequences. The end of the socket is the end of the other side.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple, TypeVar

import msgspec
from msgspec import Struct

from dovetail.engine.params import SamplingParams

LENGTH = struct.Struct("<I")
T = TypeVar("T")


# --- to the engine ----------------------------------------------------------------------------------------------------


class Start(Struct, tag="start", array_like=True):
    """options: keyword arguments of LLM, of plain values."""

    model: str
    options: dict[str, Any] = {}
    log_level: int = 30


class Add(Struct, tag="add", array_like=True):
    """A request, its prompt in tokens. Its stop strings are the parent's to find: the child makes no text."""

    id: str
    prompt: list[int]
    params: SamplingParams
    priority: int = 0
    cache_salt: str | None = None
    arrival: float | None = None  # in time.monotonic, which all processes of a machine share


class Call(Struct, tag="call", array_like=True):
    """A method of Commands. Number 0 wants no answer."""

    number: int
    name: str
    args: list[Any] = []


ToEngine = Start | Add | Call


# --- from the engine --------------------------------------------------------------------------------------------------


class EngineInfo(Struct, frozen=True):
    """What was started."""

    model: str
    max_model_len: int
    vocab: int
    num_pages: int
    page_size: int
    max_num_seqs: int
    policy: str  # fcfs, or priority
    eos_ids: tuple[int, ...]
    has_tokenizer: bool  # without one there are neither grammars nor bad_words
    weights_version: int
    start_seconds: float
    pid: int
    description: str

    def describe(self) -> str:
        """What there is room for, in a line."""
        return self.description


class Logprob(NamedTuple):
    """As engine.logprobs.TokenLogprob."""

    token: int
    logprob: float
    rank: int  # 1 is the most probable
    top: tuple[tuple[int, float], ...]  # (token, logprob) of the most probable, as many as were asked for


class Times(Struct, array_like=True):
    """As engine.sequence.Times: seconds of time.monotonic, the same clock in both processes."""

    arrival: float
    scheduled: float | None = None
    first_token: float | None = None
    finished: float | None = None


class Delta(Struct, array_like=True, gc=False):
    """What one sequence of a request gained since its last delta."""

    id: str
    index: int  # which of the request's n
    tokens: list[int]
    times: Times
    logprobs: list[Logprob] | None = None  # of these tokens, where they were asked for
    finished: bool = False
    finish_reason: str | None = None  # stop, length, abort
    stop_reason: int | str | None = None
    cached_tokens: int = 0
    prompt_logprobs: list[Logprob | None] | None = None  # on the request's last delta, where they were asked for
    weights_version: int = 0
    error: str | None = None  # why it ended, where that is nobody's wish: a grammar that could not go on

    def then(self, later: Delta) -> Delta:
        """Both in one, for who takes them more slowly than they come. Takes both: neither is used any more."""
        self.tokens += later.tokens
        if self.logprobs is not None:
            self.logprobs += later.logprobs or []
        later.tokens, later.logprobs = self.tokens, self.logprobs
        return later


class Progress(Struct, tag="progress", array_like=True):
    what: str
    done: int
    total: int


class Ready(Struct, tag="ready", array_like=True):
    info: EngineInfo


class Failed(Struct, tag="failed", array_like=True):
    """The engine could not be started, or died. `user`: by what it was asked to do, and the sentence says how."""

    sentence: str
    user: bool = False


class Refused(Struct, tag="refused", array_like=True):
    id: str
    sentence: str
    user: bool = True


class Answer(Struct, tag="answer", array_like=True):
    number: int
    result: Any = None
    error: str | None = None
    user: bool = True


class Deltas(Struct, tag="deltas", array_like=True):
    """Of a step, or of several for a parent that reads slowly."""

    deltas: list[Delta]


FromEngine = Progress | Ready | Failed | Refused | Answer | Deltas

# --- as bytes ---------------------------------------------------------------------------------------------------------

to_engine = msgspec.msgpack.Decoder(ToEngine)
from_engine = msgspec.msgpack.Decoder(FromEngine)


def frame(message: ToEngine | FromEngine) -> bytes:
    """The message behind its length. ValueError for what the wire cannot carry: a number beyond 64 bits, half of a
    surrogate pair, an object that is no plain value."""
    try:
        payload = msgspec.msgpack.encode(message)
    except (OverflowError, TypeError, UnicodeEncodeError) as error:
        raise ValueError(f"this cannot be sent to the engine: {error}") from None
    return LENGTH.pack(len(payload)) + payload


def plain(result: Any, kind: type[T]) -> T:
    """An answer's result as what it was before it travelled."""
    return msgspec.convert(result, kind)
