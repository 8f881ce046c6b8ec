"""The engine's results: an OutputDelta per sequence and step, and the RequestOutput of a finished request."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dovetail.core.errors import RequestError
from dovetail.engine.interface import SpecDecodeMetrics
from dovetail.engine.request.logprobs import Logprobs, Scores, TokenLogprob
from dovetail.engine.request.params import renamed_attribute
from dovetail.engine.request.sequence import Adapter, Sequence, Status, Times
from dovetail.engine.schedule.plan import Gain

_FINISHED = Status.FINISHED  # a constant, because an enum's attribute lookup is slow in a loop over rows


@dataclass(frozen=True)
class CompletionOutput:
    """Hold one of the `n` completions of a request."""

    index: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str  # stop, length or abort
    stop_reason: int | str | None = None  # the stop token id or stop string
    logprobs: Logprobs | None = None  # one TokenLogprob per token, if requested
    weights_version: int = 0  # version of the weights that sampled the last token
    weights_versions: tuple[tuple[int, int], ...] = ()  # (index of the first token, version) for each version used
    times: Times | None = None
    spec_decode_metrics: SpecDecodeMetrics | None = None  # None: no draft token was verified

    @property
    def token_logprobs(self) -> np.ndarray | None:
        """Return the log-probabilities of the tokens as one array, [tokens] f32."""
        return None if self.logprobs is None else self.logprobs.array

    @property
    def cumulative_logprob(self) -> float | None:
        """Return the sum of the tokens' log-probabilities; None if they were not requested."""
        return None if self.logprobs is None else float(self.logprobs.array.sum(dtype=np.float64))


@dataclass(frozen=True)
class RequestOutput:
    """Hold a finished request with its `n` completions."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    adapter: Adapter | None = None

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            names = {"id": "request_id", "completions": "outputs", "cached_tokens": "num_cached_tokens"}
            raise renamed_attribute(self, name, names)


class OutputDelta(NamedTuple):
    """Hold what one sequence of a request gained since its last delta.

    This is the one record of generated tokens, from the engine to HTTP. A named tuple, because every running sequence
    gets one per step, and msgpack encodes it as it is.
    """

    request_id: str
    index: int  # pyright: ignore[reportIncompatibleMethodOverride] vLLM's name: which of the request's n sequences
    token_ids: list[int]
    text: str
    times: Times  # shared with the sequence, and filled in as it goes on
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache
    weights_version: int = 0  # version of the weights that sampled these tokens
    scores: list[Scores] | None = None  # of these tokens, if requested; see `logprobs`
    finish_reason: str | None = None  # stop, length or abort; None: the sequence continues
    stop_reason: int | str | None = None  # the stop token id or stop string
    error: str | None = None  # why the engine ended the sequence, such as a grammar that allows no further token
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None  # on the request's last delta, if requested
    spec_decode_metrics: SpecDecodeMetrics | None = None  # of all tokens so far; None: no draft token was verified

    @property
    def finished(self) -> bool:
        """Return whether this is the last delta of its sequence."""
        return self.finish_reason is not None

    @property
    def logprobs(self) -> Logprobs | None:
        """Return one TokenLogprob per token of this delta, if requested."""
        return None if self.scores is None else Logprobs(self.token_ids, self.scores)

    def then(self, later: OutputDelta) -> OutputDelta:
        """Return this delta and a later one as one, for a reader that is slower than the engine."""
        scores = None if self.scores is None else self.scores + (later.scores or [])
        return later._replace(token_ids=self.token_ids + later.token_ids, text=self.text + later.text, scores=scores)


def record_gains(gains: list[Gain], now: float, version: int) -> int:
    """Record time, weights version and text of the tokens that sequences gained, and return how many tokens these are.

    Args:
        gains: The result of `Scheduler.commit`.
        now: The time of the step's result, from time.monotonic.
        version: The version of the weights that sampled the tokens.
    """
    count = 0
    for seq, tokens, _ in gains:
        count += len(tokens)
        if seq.version != version:
            seq.version = version
            seq.versions.append((len(seq.tokens) - len(tokens) - seq.prompt_len, version))
            if seq.times.first_token is None:
                seq.times.first_token = now
        if seq.text is not None and not seq.by_token:  # with by_token, the text was extended token by token
            seq.text.extend(tokens[:-1] if seq.finish_reason == "stop" else tokens)  # an EOS token has no text
    return count


def deltas_of(
    gains: list[Gain], now: float, scores: list[Scores | None], ended_only: bool = False
) -> list[OutputDelta]:
    """Return a delta per gain, or with `ended_only` per gain whose sequence has ended.

    Args:
        gains: The result of `Scheduler.commit`.
        now: The time of the step's result, from time.monotonic.
        scores: The log-probabilities of each gain's tokens.
        ended_only: Whether to leave out sequences that continue.
    """
    return [
        delta_of(seq, tokens, now, part)
        for (seq, tokens, _), part in zip(gains, scores, strict=True)
        if not ended_only or seq.status is _FINISHED
    ]


def delta_of(seq: Sequence, tokens: list[int], now: float, scores: Scores | None = None) -> OutputDelta:
    """Return the delta of a sequence that gained `tokens`, with the text since its last delta."""
    done = seq.status is _FINISHED
    text = "" if seq.text is None else seq.text.take(done)
    parts = None if seq.scores is None else [] if scores is None else [scores]
    gained = seq.request.id, seq.index, tokens, text, seq.times, seq.cached_tokens, seq.version or 0, parts
    if not done:
        return OutputDelta(*gained, spec_decode_metrics=spec_decode_metrics(seq))
    seq.times.finished = now
    end = seq.finish_reason, seq.stop_reason, seq.error
    return OutputDelta(*gained, *end, spec_decode_metrics=spec_decode_metrics(seq))


def spec_decode_metrics(seq: Sequence) -> SpecDecodeMetrics | None:
    """Return the counters of a sequence's verify steps; None if no draft token was verified."""
    if not seq.num_draft_tokens:
        return None
    return SpecDecodeMetrics(tuple(seq.acceptance_histogram), seq.num_draft_tokens)


def completion_of(seq: Sequence, version: int) -> CompletionOutput:
    """Return the completion of a finished sequence; one without tokens gets the weights' current `version`."""
    tokens = tuple(seq.output)
    return CompletionOutput(
        index=seq.index,
        token_ids=tokens,
        text=seq.text.whole if seq.text else "",
        finish_reason=seq.finish_reason or "abort",
        stop_reason=seq.stop_reason,
        logprobs=None if seq.scores is None else Logprobs(tokens, seq.scores),
        weights_version=version if seq.version is None else seq.version,
        weights_versions=tuple(seq.versions),
        times=seq.times,
        spec_decode_metrics=spec_decode_metrics(seq),
    )


# --- sequences that continue from earlier tokens ----------------------------------------------------------------------


@dataclass(frozen=True)
class PartialOutput:
    """Hold the tokens of an unfinished completion, which another sequence can continue.

    A sequence that starts with tokens is like one that was preempted after them: they are computed in one step, and the
    next token is sampled as it would have been, because a sample depends only on the seed, the tokens and their number.
    """

    tokens: Many[int]
    scores: list[Scores] | None = None  # of all tokens, if log-probabilities are requested
    versions: tuple[tuple[int, int], ...] = ()  # see CompletionOutput.weights_versions


def partial_output(seq: Sequence, tokens: int = 0, parts: int = 0) -> PartialOutput:
    """Return the output of a sequence after its first `tokens` tokens, whose scores came in `parts` parts."""
    scores = None if seq.scores is None else seq.scores[parts:]
    return PartialOutput(seq.tokens[seq.prompt_len + tokens :], scores, tuple(seq.versions))


def resume(seq: Sequence, partial: PartialOutput) -> None:
    """Let a new sequence, whose `text` is already set if it has one, continue from a partial output."""
    _check_partial(seq, partial)
    seq.tokens += map(int, partial.tokens)
    if seq.scores is not None and partial.scores:
        seq.scores += partial.scores
    seq.versions = list(partial.versions)
    if seq.versions:
        seq.version = seq.versions[-1][1]
    seq.times.first_token = seq.request.arrival  # it was there when the request arrived
    if seq.text is not None:
        for token in partial.tokens:
            seq.text.push(token, may_stop=False)  # a stop string would have ended it
        seq.text.take()


def _check_partial(seq: Sequence, partial: PartialOutput) -> None:
    params, count = seq.request.params, len(partial.tokens)
    if params.max_tokens is not None and count >= params.max_tokens:
        raise RequestError(
            f"`max_tokens` must be more than the {count} tokens to continue from, got {params.max_tokens}",
            param="max_tokens",
        )
    scored = sum(len(values) for values, *_ in partial.scores or ())
    if params.logprobs is not None and scored != count:
        raise RequestError(
            f"`logprobs` requires the log-probabilities of all {count} tokens to continue from, got {scored}",
            param="logprobs",
        )
