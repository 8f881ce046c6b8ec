"""The messages between the HTTP process (parent) and the engine's process (child): msgpack structs, each preceded by
its length.

The parent sends StartEngine, then Add and Call. The child sends Progress, then EngineReady or EngineFailed; then Deltas
of every step, RequestRefused for an Add that the engine does not take, and one CallAnswer per Call. Every Add ends
exactly once: with RequestRefused, or with the finished delta of each of its n sequences. A closed socket means that the
other process has ended.
"""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import msgspec
from msgspec import Struct

from dovetail.core.errors import UserError
from dovetail.engine.options import EngineOptions
from dovetail.engine.request.params import SamplingParams

LENGTH = struct.Struct("<I")
T = TypeVar("T")


# --- to the engine ----------------------------------------------------------------------------------------------------


class StartEngine(Struct, tag="start", array_like=True):
    model: str
    options: EngineOptions = EngineOptions()
    log_level: int = 30

    def again(self, info: EngineInfo) -> StartEngine:
        """Return the start of an engine in the place of that one, with as many pages: its steps are compiled for them.
        Its adapters, which change, are loaded when it has started."""
        room: dict[str, Any] = dict(max_loras=info.max_loras, max_lora_rank=info.max_lora_rank)
        room |= dict(kv_cache_memory_bytes=info.kv_cache_memory_bytes)
        return msgspec.structs.replace(self, options=replace(self.options, lora_modules={}, **room))


class Add(Struct, tag="add", array_like=True):
    """A request, with its prompt in tokens. The parent finds its stop strings: the child makes no text."""

    id: str
    prompt: list[int]
    params: SamplingParams
    priority: int = 0
    cache_salt: str | None = None
    arrival: float | None = None  # of time.monotonic, which all processes of a machine share
    adapter: str | None = None  # by its name


class Call(Struct, tag="call", array_like=True):
    """A method of Commands. Number 0: no answer is sent."""

    number: int
    name: str
    args: list[Any] = []


ToEngine = StartEngine | Add | Call


# --- from the engine --------------------------------------------------------------------------------------------------


class LoadedAdapter(Struct, frozen=True):
    path: str
    version: int  # which of the engine's loads it is
    replaced: bool = False  # another is loaded in its place, and requests are not taken until it is there


class EngineInfo(Struct, frozen=True):
    """The engine that was started."""

    model: str
    max_model_len: int  # tokens of a prompt and its answer; less than the model's where the KV pool holds less
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
    adapters: dict[str, LoadedAdapter] = {}
    max_loras: int = 0
    max_lora_rank: int = 1
    prediction: str = ""  # how fast it should decode
    kv_cache_memory_bytes: int | None = None  # of the pages, on each device

    def describe(self) -> str:
        """What the engine has room for, in one line."""
        return self.description


class Logprob(NamedTuple):
    """As engine.sequence.TokenLogprob."""

    token: int
    logprob: float
    rank: int  # 1 is the most probable
    top: tuple[tuple[int, float], ...]  # (token, logprob) of the most probable, as many as were asked for


class DeltaTimes(Struct, array_like=True):
    """As engine.sequence.Times: seconds of time.monotonic, the same clock in both processes."""

    arrival: float
    scheduled: float | None = None
    first_token: float | None = None
    finished: float | None = None


class Delta(Struct, array_like=True, gc=False):
    """What one sequence of a request gained since its last delta."""

    id: str
    index: int  # which of the request's n sequences
    tokens: list[int]
    times: DeltaTimes
    logprobs: list[Logprob] | None = None  # of these tokens, where they were asked for
    finished: bool = False
    finish_reason: str | None = None  # stop, length, abort
    stop_reason: int | str | None = None
    cached_tokens: int = 0
    prompt_logprobs: list[Logprob | None] | None = None  # on the request's last delta, where they were asked for
    weights_version: int = 0
    error: str | None = None  # why it ended, where neither client nor model did it: a stuck grammar, say

    def then(self, later: Delta) -> Delta:
        """This delta and a later one joined, for a reader slower than the engine. Neither may be used afterwards."""
        self.tokens += later.tokens
        if self.logprobs is not None:
            self.logprobs += later.logprobs or []
        later.tokens, later.logprobs = self.tokens, self.logprobs
        return later

    def cut(self, count: int) -> Delta:
        """Take the first `count` tokens out of this delta, as a delta that does not end the sequence."""
        logprobs = None if self.logprobs is None else self.logprobs[:count]
        first = Delta(self.id, self.index, self.tokens[:count], self.times, logprobs, cached_tokens=self.cached_tokens)
        first.weights_version, self.tokens = self.weights_version, self.tokens[count:]
        self.logprobs = None if self.logprobs is None else self.logprobs[count:]
        return first


class Progress(Struct, tag="progress", array_like=True):
    what: str
    done: int
    total: int


class EngineReady(Struct, tag="ready", array_like=True):
    info: EngineInfo


class EngineFailed(Struct, tag="failed", array_like=True):
    """The engine could not be started, or died. `user`: the model or an option was wrong, and the sentence says how."""

    sentence: str
    user: bool = False


class RequestRefused(Struct, tag="refused", array_like=True):
    id: str
    sentence: str
    user: bool = True


class CallAnswer(Struct, tag="answer", array_like=True):
    number: int
    result: Any = None
    error: str | None = None
    user: bool = True


class Deltas(Struct, tag="deltas", array_like=True):
    """The deltas of one step, or of several if the parent reads slowly."""

    deltas: list[Delta]


FromEngine = Progress | EngineReady | EngineFailed | RequestRefused | CallAnswer | Deltas

# --- as bytes ---------------------------------------------------------------------------------------------------------

to_engine = msgspec.msgpack.Decoder(ToEngine)
from_engine = msgspec.msgpack.Decoder(FromEngine)


def frame(message: ToEngine | FromEngine) -> bytes:
    """The message with its length before it. ValueError for what cannot be encoded: a number beyond 64 bits, half of a
    surrogate pair, an object that is not a plain value."""
    try:
        payload = msgspec.msgpack.encode(message)
    except (OverflowError, TypeError, UnicodeEncodeError) as error:
        raise UserError(f"this cannot be sent to the engine: {error}") from None
    return LENGTH.pack(len(payload)) + payload


def plain(result: Any, kind: type[T]) -> T:
    """An answer's result, converted back to the type it was sent as."""
    return msgspec.convert(result, kind)
