"""The messages between the HTTP process (parent) and the engine's process (child): msgpack with a length prefix.

The parent sends StartEngine, then Add and Call. The child sends Progress, then EngineReady or EngineFailed; then the
Deltas of every step, RequestRefused for an Add that the engine does not accept, and one CallAnswer per Call. Every Add
ends exactly once: with RequestRefused, or with the finished delta of each of its n sequences. A closed socket means
that the other process has ended.

The other child processes of the server (long bodies, templates of requests) are started and framed in the same way.
"""

from __future__ import annotations

import socket
import struct
import subprocess
from dataclasses import replace
from typing import IO, Any, NamedTuple, TypeVar

import msgspec
import numpy as np
from msgspec import Struct

from dovetail.core import errors
from dovetail.core.errors import RequestError, UserError, as_user_error
from dovetail.engine.interface import SpecDecodeMetrics
from dovetail.engine.options import EngineOptions
from dovetail.engine.request.params import SamplingParams
from dovetail.io.images.item import ImageItem, ImageSpan

LENGTH = struct.Struct("<I")
T = TypeVar("T")


# --- to the engine ----------------------------------------------------------------------------------------------------


class StartEngine(Struct, tag="start", array_like=True):
    """Start the engine; the first message of the parent."""

    model: str
    options: EngineOptions = EngineOptions()
    log_level: int = 30

    def again(self, info: EngineInfo) -> StartEngine:
        """Return the message that starts a replacement of the engine that `info` describes.

        It has as many pages, because its steps are compiled for that number. Its adapters may have changed since, so
        they are loaded after the start. A torch module has neither.
        """
        if self.options.backend == "torch":
            return self
        room: dict[str, Any] = dict(max_loras=info.max_loras, max_lora_rank=info.max_lora_rank)
        room |= dict(kv_cache_memory_bytes=info.kv_cache_memory_bytes)
        return msgspec.structs.replace(self, options=replace(self.options, lora_modules={}, **room))


class SentImage(Struct, array_like=True):
    """Hold an image of a prompt: an ImageSpan whose arrays are bytes, which the engine's process reads in place."""

    start: int
    grid: tuple[int, int]
    key: bytes
    patch_dim: int
    patches: memoryview  # [P, patch_dim] uint8
    positions: memoryview  # [P, 2] int32

    @classmethod
    def of(cls, span: ImageSpan) -> SentImage:
        """Return the message for an image."""
        item = span.item
        patches, positions = (np.ascontiguousarray(x).data.cast("B") for x in (item.patches, item.positions))
        return cls(span.start, item.grid, item.key, item.patches.shape[1], patches, positions)

    def span(self) -> ImageSpan:
        """Return the image again."""
        patches = np.frombuffer(self.patches, np.uint8).reshape(-1, self.patch_dim)
        positions = np.frombuffer(self.positions, np.int32).reshape(-1, 2)
        return ImageSpan(self.start, ImageItem(patches, positions, self.grid, self.key))


class Add(Struct, tag="add", array_like=True):
    """Add a request with a tokenized prompt. The parent finds its stop strings: the child makes no text."""

    id: str
    prompt: list[int]
    params: SamplingParams
    priority: int = 0
    cache_salt: str | None = None
    arrival: float | None = None  # seconds of time.monotonic, which all processes of a machine share
    adapter: str | None = None  # its name
    images: list[SentImage] = []


class Call(Struct, tag="call", array_like=True):
    """Call one of the engine's commands by name. No answer is sent if `number` is 0."""

    number: int
    name: str
    args: dict[str, Any] = {}
    request_id: str = "-"  # the HTTP request that makes the call, for the log


ToEngine = StartEngine | Add | Call


# --- from the engine --------------------------------------------------------------------------------------------------


class WireError(Struct, array_like=True, frozen=True):
    """Hold an exception of the engine's process: a UserError with its class, or an internal error."""

    message: str
    kind: str | None = None  # the name of a class in core.errors; None: an internal error
    param: str | None = None
    code: str | None = None

    @classmethod
    def of(cls, error: BaseException) -> WireError:
        """Return the error as a message; only UserError and understood operating-system errors are the user's."""
        user = as_user_error(error)
        if user is None:
            return cls(repr(error))
        kind = next(each.__name__ for each in type(user).__mro__ if each.__module__ == errors.__name__)
        return cls(str(user), kind, user.param, user.code)

    def exception(self) -> UserError | RuntimeError:
        """Return the exception again, of the class that it had in the engine's process."""
        if self.kind is None:
            return RuntimeError(f"in the engine's process: {self.message}")
        return getattr(errors, self.kind)(self.message, param=self.param, code=self.code)


class LoadedAdapter(Struct, frozen=True):
    """Describe an adapter that the engine has loaded."""

    path: str
    version: int  # counts the engine's loads
    replaced: bool = False  # a new version is being loaded in its place; requests are refused until it is there


class EngineInfo(Struct, frozen=True):
    """Describe the engine that was started."""

    model: str
    max_model_len: int  # tokens of a prompt and its answer; below the model's limit if the KV pool holds less
    vocab: int
    num_pages: int
    page_size: int
    max_num_seqs: int
    policy: str  # fcfs, or priority
    eos_ids: tuple[int, ...]
    has_tokenizer: bool  # required for grammars and bad_words
    weights_version: int
    start_seconds: float
    pid: int
    description: str  # the engine's capacity in one line
    adapters: dict[str, LoadedAdapter] = {}
    max_loras: int = 0
    max_lora_rank: int = 1
    prediction: str = ""  # the predicted decode speed
    kv_cache_memory_bytes: int | None = None  # bytes of the KV pool on each device


class Logprob(NamedTuple):
    """Log-probability of one token, as engine.sequence.TokenLogprob."""

    token: int
    logprob: float
    rank: int  # 1 is the most probable
    top: tuple[tuple[int, float], ...]  # (token, logprob) of the most probable, as many as requested


class DeltaTimes(Struct, array_like=True):
    """Times of a sequence, as engine.sequence.Times: seconds of time.monotonic, the same clock in both processes."""

    arrival: float
    scheduled: float | None = None
    first_token: float | None = None
    finished: float | None = None


class Delta(Struct, array_like=True, gc=False):
    """Hold the tokens that one sequence of a request gained since its last delta."""

    id: str
    index: int  # which of the request's n sequences
    tokens: list[int]
    times: DeltaTimes
    logprobs: list[Logprob] | None = None  # of these tokens, if requested
    finished: bool = False
    finish_reason: str | None = None  # stop, length, abort
    stop_reason: int | str | None = None
    cached_tokens: int = 0
    prompt_logprobs: list[Logprob | None] | None = None  # on the request's last delta, if requested
    weights_version: int = 0
    error: str | None = None  # why the engine ended it, such as a grammar that cannot continue
    spec_decode_metrics: SpecDecodeMetrics | None = None  # of all tokens so far; None: no draft token was verified

    def then(self, later: Delta) -> Delta:
        """Join this delta with a later one, for a reader slower than the engine. Neither may be used afterwards."""
        self.tokens += later.tokens
        if self.logprobs is not None:
            self.logprobs += later.logprobs or []
        later.tokens, later.logprobs = self.tokens, self.logprobs
        return later

    def cut(self, count: int) -> Delta:
        """Remove the first `count` tokens from this delta and return them as a delta that does not end the sequence."""
        logprobs = None if self.logprobs is None else self.logprobs[:count]
        first = Delta(self.id, self.index, self.tokens[:count], self.times, logprobs, cached_tokens=self.cached_tokens)
        first.weights_version, self.tokens = self.weights_version, self.tokens[count:]
        first.spec_decode_metrics = self.spec_decode_metrics
        self.logprobs = None if self.logprobs is None else self.logprobs[count:]
        return first


class Progress(Struct, tag="progress", array_like=True):
    """Report progress of the start."""

    what: str
    done: int
    total: int


class EngineReady(Struct, tag="ready", array_like=True):
    """Report that the engine has started."""

    info: EngineInfo


class EngineFailed(Struct, tag="failed", array_like=True):
    """Report that the engine could not start, or died. A UserError says which option or model is wrong."""

    error: WireError


class RequestRefused(Struct, tag="refused", array_like=True):
    """Report that a request was not added."""

    id: str
    error: WireError


class CallAnswer(Struct, tag="answer", array_like=True):
    """Answer a Call with its result or its error."""

    number: int
    result: Any = None
    error: WireError | None = None


class Deltas(Struct, tag="deltas", array_like=True):
    """Hold the deltas of one step, or of several steps if the parent reads slowly."""

    deltas: list[Delta]


FromEngine = Progress | EngineReady | EngineFailed | RequestRefused | CallAnswer | Deltas

# --- as bytes ---------------------------------------------------------------------------------------------------------

to_engine = msgspec.msgpack.Decoder(ToEngine)
from_engine = msgspec.msgpack.Decoder(FromEngine)


def frame(message: ToEngine | FromEngine) -> bytes:
    """Return the message as bytes with its length before it.

    Raises:
        RequestError: It holds a value that cannot be encoded: an integer beyond 64 bits, half of a surrogate pair, or
            an object that is not a plain value.
    """
    try:
        payload = msgspec.msgpack.encode(message)
    except (OverflowError, TypeError, UnicodeEncodeError) as error:
        raise RequestError(f"a value cannot be sent to the engine's process: {error}") from None
    return framed(payload)


def framed(payload: bytes) -> bytes:
    """Return the bytes of a message with their length before them."""
    return LENGTH.pack(len(payload)) + payload


def read_frame(file: IO[bytes]) -> bytes | None:
    """Return the next message, or None at the end."""
    size = file.read(LENGTH.size)
    return file.read(LENGTH.unpack(size)[0]) if len(size) == LENGTH.size else None


def start_process(*command: str) -> tuple[subprocess.Popen, socket.socket]:
    """Start `COMMAND FD`, where FD is the process's end of a pair of sockets; return the process and our end."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [*command, str(theirs.fileno())], pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
        )
    return process, ours


def plain(result: Any, kind: type[T]) -> T:
    """Return a call's result as the type that it had in the engine's process."""
    return msgspec.convert(result, kind)
