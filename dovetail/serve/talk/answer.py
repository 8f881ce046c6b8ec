"""From tokens to what a client reads: whole characters, stop strings found, tool calls and reasoning apart from text.

The engine's process makes tokens only; text is made here, in the HTTP process, so that it never delays a step.


Log-probabilities as clients read them: tokens by their text, in the shapes of the two OpenAI routes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from dovetail.engine.request.params import SamplingParams
from dovetail.engine.request.text import OutputText
from dovetail.io.tokenizer import Tokenizer
from dovetail.io.tool_formats.events import CallEnd, CallStart, Content, Event
from dovetail.io.tool_formats.stream import StreamParser
from dovetail.serve.remote.wire import Delta, Logprob

CONTEXT = 8  # of the prompt's last tokens: they decide whether the answer's text begins with a space


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One prompt, and how its n answers are to be read."""

    prompt: list[int]
    params: SamplingParams
    limit: str | None = None  # the field by which the client set params.max_tokens; None: it is a default
    priority: int = 0
    cache_salt: str | None = None
    adapter: str | None = None  # None: the model alone
    skip_special: bool = True
    keep: frozenset[int] = frozenset()  # special tokens that a parser must see
    new_parser: Callable[[], StreamParser] | None = None  # None: the text is the answer
    one_call: bool = False  # the answer ends after its first tool call

    @property
    def engine_params(self) -> SamplingParams:
        """Without stop strings: AnswerReader finds them."""
        return replace(self.params, stop=(), include_stop_str_in_output=False)


class AnswerDelta(NamedTuple):
    """What one of the n answers gained."""

    index: int
    events: list[Event]
    tokens: Sequence[int]
    logprobs: Sequence[Logprob] | None = None
    finish_reason: str | None = None  # stop or length; None: it goes on
    stop_reason: int | str | None = None
    prompt_logprobs: Sequence[Logprob | None] | None = None  # on the request's last step
    cached_tokens: int = 0


class AnswerReader:
    """One of a request's n answers as it grows."""

    def __init__(self, ask: Ask, tokenizer: Tokenizer):
        params = ask.params
        # A prompt in token ids may have ids that the tokenizer does not know: model vocabularies are often padded.
        known = [token for token in ask.prompt[-CONTEXT:] if tokenizer.backend.id_to_token(token) is not None]
        detokenizer = tokenizer.stream(ask.skip_special, known, ask.keep)
        self._text = OutputText(detokenizer, params.stop, params.include_stop_str_in_output)
        self._parser = ask.new_parser() if ask.new_parser else None
        self._params, self._one_call, self._eos = params, ask.one_call, frozenset(tokenizer.eos_ids)
        self.count = 0  # tokens, up to the one that completed a stop string
        self.called = False  # whether there was a tool call

    def read(self, delta: Delta) -> AnswerDelta:
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
        why = stop if stop is not None else delta.stop_reason
        return AnswerDelta(
            delta.index, events, delta.tokens[:taken], logprobs, reason, why if finished else None,
            delta.prompt_logprobs, delta.cached_tokens,
        )  # fmt: skip

    def _push(self, delta: Delta) -> tuple[str | None, int]:
        """The stop string that was completed, or None; how many of the tokens count."""
        for i, token in enumerate(delta.tokens):
            self.count += 1
            if self._ends(delta, i):
                break
            stop = self._text.push(token, may_stop=self.count >= self._params.min_tokens)
            if stop is not None:
                return stop, i + 1
        return None, len(delta.tokens)

    def _ends(self, delta: Delta, i: int) -> bool:
        """Whether a token only ends the answer and has no text: an end token, or one of stop_token_ids."""
        if not (delta.finished and delta.finish_reason == "stop" and i == len(delta.tokens) - 1):
            return False
        token = delta.tokens[i]
        return delta.stop_reason == token or (token in self._eos and not self._params.ignore_eos)

    def _parse(self, text: str, finished: bool, truncated: bool) -> list[Event]:
        if self._parser is None:
            return [Content(text)] if text else []
        events = self._parser.push(text) if text else []
        if finished:
            events += self._parser.finish(truncated)
        self.called |= any(isinstance(event, CallStart) for event in events)
        return events


def _first_call(events: list[Event]) -> list[Event]:
    end = next(i for i, event in enumerate(events) if isinstance(event, CallEnd))
    return events[: end + 1]


LEAST = -9999.0  # JSON has no -inf; OpenAI sends this


class TokenText:
    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._known: dict[int, tuple[str, list[int]]] = {}

    def of(self, token: int) -> str:
        return self._of(token)[0]

    def _of(self, token: int) -> tuple[str, list[int]]:
        found = self._known.get(token)
        if found is None:
            try:
                data = self._tokenizer.token_bytes(token)
            except ValueError:  # an id that the tokenizer does not know: model vocabularies are often padded
                data = b""
            found = self._known[token] = (data.decode("utf-8", "replace"), list(data))
        return found

    def chat(self, logprobs: Iterable[Logprob]) -> list[dict[str, Any]]:
        return [
            {**self._entry(l.token, l.logprob), "top_logprobs": [self._entry(*top) for top in l.top]} for l in logprobs
        ]

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text, data = self._of(token)
        return {"token": text, "logprob": max(logprob, LEAST), "bytes": data}

    def completion(self, tokens: Sequence[int], logprobs: Sequence[Logprob | None], offset: int) -> dict[str, Any]:
        """As OpenAI does it, the top log-probabilities always include the token itself."""
        texts, offsets = [self.of(token) for token in tokens], []
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [l and max(l.logprob, LEAST) for l in logprobs],
            "top_logprobs": [l and self._top(l) for l in logprobs],
            "text_offset": offsets,
        }

    def _top(self, entry: Logprob) -> dict[str, float]:
        top = {self.of(token): max(logprob, LEAST) for token, logprob in reversed(entry.top)}
        return {self.of(entry.token): max(entry.logprob, LEAST)} | dict(reversed(top.items()))

    def prompt(self, logprobs: Sequence[Logprob | None] | None) -> list[dict[str, Any] | None] | None:
        """As vLLM writes prompt_logprobs: by token id."""
        if logprobs is None:
            return None
        return [None if each is None else self._by_id(each) for each in logprobs]

    def _by_id(self, entry: Logprob) -> dict[str, Any]:
        ranked = {token: (logprob, rank) for rank, (token, logprob) in enumerate(entry.top, 1)}
        ranked[entry.token] = (entry.logprob, entry.rank)
        return {
            str(token): {"logprob": max(logprob, LEAST), "rank": rank, "decoded_token": self.of(token)}
            for token, (logprob, rank) in ranked.items()
        }
