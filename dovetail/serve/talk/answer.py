"""Turn tokens into what a client reads: text without partial characters, stop strings, tool calls, log-probabilities.

The engine's process makes tokens only. Text is made here, in the HTTP process, so that it never delays a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dovetail.core.errors import UserError
from dovetail.engine.interface import SpecDecodeMetrics
from dovetail.engine.request.params import SamplingParams
from dovetail.engine.request.text import OutputText
from dovetail.io.images.item import ImageSpan
from dovetail.io.tokenizer import Tokenizer
from dovetail.io.tool_formats.events import CallEnd, CallStart, Content, Event
from dovetail.io.tool_formats.stream import StreamParser
from dovetail.serve.remote.wire import Delta, Logprob

CONTEXT = 8  # last tokens of the prompt, which decide whether the answer's text begins with a space
MIN_LOGPROB = -9999.0  # stands for -inf, which JSON does not have, as in OpenAI's API


@dataclass(frozen=True, kw_only=True)
class PromptRequest:
    """Hold one prompt for the engine, and how its n answers are read."""

    prompt: list[int]
    params: SamplingParams
    images: tuple[ImageSpan, ...] = ()  # which of the prompt's tokens are images
    limit: str | None = None  # the request field that set params.max_tokens; None: it is a default
    priority: int = 0
    cache_salt: str | None = None
    adapter: str | None = None  # None: the base model
    skip_special: bool = True
    keep: frozenset[int] = frozenset()  # special tokens that the parser must see
    new_parser: Callable[[], StreamParser] | None = None  # None: the text is the answer
    one_call: bool = False  # whether the answer ends after its first tool call

    @property
    def engine_params(self) -> SamplingParams:
        """Return the parameters without stop strings, which AnswerReader finds."""
        return replace(self.params, stop=(), include_stop_str_in_output=False)


@dataclass(slots=True)
class AnswerDelta:
    """Hold the tokens that one of the n answers gained, with the events that their text makes."""

    index: int
    events: list[Event]
    tokens: Sequence[int]
    logprobs: Sequence[Logprob] | None = None
    finish_reason: str | None = None  # stop or length; None: the answer continues
    stop_reason: int | str | None = None
    prompt_logprobs: Sequence[Logprob | None] | None = None  # on the request's last delta
    cached_tokens: int = 0
    spec_decode_metrics: SpecDecodeMetrics | None = None  # of all tokens so far; None: no draft token was verified


class AnswerReader:
    """Read one of a request's n answers from the engine's deltas."""

    def __init__(self, request: PromptRequest, tokenizer: Tokenizer):
        params = request.params
        # A prompt of token ids may hold ids that the tokenizer does not know: model vocabularies are often padded.
        known = [token for token in request.prompt[-CONTEXT:] if tokenizer.backend.id_to_token(token) is not None]
        detokenizer = tokenizer.stream(request.skip_special, known, request.keep)
        self._text = OutputText(detokenizer, params.stop, params.include_stop_str_in_output)
        self._parser = request.new_parser() if request.new_parser else None
        self._params, self._one_call, self._eos = params, request.one_call, frozenset(tokenizer.eos_ids)
        self._count = 0  # tokens, up to the one that completed a stop string

    def read(self, delta: Delta) -> AnswerDelta:
        """Return what the engine's delta adds to the answer."""
        stop, taken = self._push(delta)
        finished = delta.finished or stop is not None
        if finished:
            self._text.flush()
        events = self._parse(self._text.take(), finished, truncated=stop is None and delta.finish_reason == "length")
        if self._one_call and any(isinstance(event, CallEnd) for event in events):
            events, finished = _first_call(events), True
            reason = "stop"
        else:
            reason = ("stop" if stop is not None else delta.finish_reason) if finished else None
        logprobs = delta.logprobs[:taken] if delta.logprobs is not None else None
        stop_reason = stop if stop is not None else delta.stop_reason
        return AnswerDelta(
            delta.index, events, delta.tokens[:taken], logprobs, reason, stop_reason if finished else None,
            delta.prompt_logprobs, delta.cached_tokens, delta.spec_decode_metrics,
        )  # fmt: skip

    def _push(self, delta: Delta) -> tuple[str | None, int]:
        """Return the stop string that was completed, if any, and how many of the tokens belong to the answer."""
        for i, token in enumerate(delta.tokens):
            self._count += 1
            if self._ends(delta, i):
                break
            stop = self._text.push(token, may_stop=self._count >= self._params.min_tokens)
            if stop is not None:
                return stop, i + 1
        return None, len(delta.tokens)

    def _ends(self, delta: Delta, i: int) -> bool:
        """Return whether a token only ends the answer and has no text: an end token, or one of stop_token_ids."""
        if not (delta.finished and delta.finish_reason == "stop" and i == len(delta.tokens) - 1):
            return False
        token = delta.tokens[i]
        return delta.stop_reason == token or (token in self._eos and not self._params.ignore_eos)

    def _parse(self, text: str, finished: bool, truncated: bool) -> list[Event]:
        if self._parser is None:
            return [Content(text)] if text else []
        events = self._parser.push(text) if text else []
        return events + self._parser.finish(truncated) if finished else events


def _first_call(events: list[Event]) -> list[Event]:
    end = next(i for i, event in enumerate(events) if isinstance(event, CallEnd))
    return events[: end + 1]


def has_call(delta: AnswerDelta) -> bool:
    """Return whether a tool call begins in this delta."""
    return any(isinstance(event, CallStart) for event in delta.events)


class TokenText:
    """Format log-probabilities for clients, with tokens by their text."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._known: dict[int, tuple[str, list[int]]] = {}

    def chat(self, logprobs: Iterable[Logprob]) -> list[dict[str, Any]]:
        """Return log-probabilities as /v1/chat/completions and /v1/responses show them."""
        return [
            {**self._entry(l.token, l.logprob), "top_logprobs": [self._entry(*top) for top in l.top]} for l in logprobs
        ]

    def completion(self, tokens: Sequence[int], logprobs: Sequence[Logprob | None], offset: int) -> dict[str, Any]:
        """Return log-probabilities as /v1/completions shows them; the top ones always include the token itself."""
        texts, offsets = [self._text(token) for token in tokens], []
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [l and max(l.logprob, MIN_LOGPROB) for l in logprobs],
            "top_logprobs": [l and self._top(l) for l in logprobs],
            "text_offset": offsets,
        }

    def prompt(self, logprobs: Sequence[Logprob | None] | None) -> list[dict[str, Any] | None] | None:
        """Return prompt_logprobs as vLLM writes them: by token id."""
        if logprobs is None:
            return None
        return [None if each is None else self._by_id(each) for each in logprobs]

    def _text(self, token: int) -> str:
        return self._text_and_bytes(token)[0]

    def _text_and_bytes(self, token: int) -> tuple[str, list[int]]:
        found = self._known.get(token)
        if found is None:
            try:
                data = self._tokenizer.token_bytes(token)
            except UserError:  # an id that the tokenizer does not know: model vocabularies are often padded
                data = b""
            found = self._known[token] = (data.decode("utf-8", "replace"), list(data))
        return found

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text, data = self._text_and_bytes(token)
        return {"token": text, "logprob": max(logprob, MIN_LOGPROB), "bytes": data}

    def _top(self, entry: Logprob) -> dict[str, float]:
        top = {self._text(token): max(logprob, MIN_LOGPROB) for token, logprob in reversed(entry.top)}
        return {self._text(entry.token): max(entry.logprob, MIN_LOGPROB)} | dict(reversed(top.items()))

    def _by_id(self, entry: Logprob) -> dict[str, Any]:
        ranked = {token: (logprob, rank) for rank, (token, logprob) in enumerate(entry.top, 1)}
        ranked[entry.token] = (entry.logprob, entry.rank)
        return {
            str(token): {"logprob": max(logprob, MIN_LOGPROB), "rank": rank, "decoded_token": self._text(token)}
            for token, (logprob, rank) in ranked.items()
        }
