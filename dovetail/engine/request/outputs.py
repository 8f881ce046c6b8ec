"""From a sequence to what the caller gets of it: an Update for each step, and in the end its Completion."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dovetail.core.errors import UserError
from dovetail.engine.request.logprobs import Logprobs, Scores, TokenLogprob
from dovetail.engine.request.sequence import Adapter, Sequence, Status, Times
from dovetail.engine.schedule.plan import Gain

_FINISHED = Status.FINISHED  # read once: in a loop over rows, looking a member of an enum up costs


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


def take_in(gains: list[Gain], now: float, version: int) -> int:
    """Note what goes with the tokens that sequences have just been given: when, of which weights, their text. -> how
    many tokens they are."""
    count = 0
    for seq, tokens, _ in gains:
        count += len(tokens)
        if seq.version != version:
            seq.version = version
            seq.versions.append((len(seq.tokens) - len(tokens) - seq.prompt_len, version))
            if seq.times.first_token is None:
                seq.times.first_token = now
        if seq.text is not None and not seq.by_token:  # else each token was added when it was looked at
            seq.text.extend(tokens[:-1] if seq.finish_reason == "stop" else tokens)  # an end token has no text
    return count


def updates_of(gains: list[Gain], now: float, scores: list[Scores | None], ended_only: bool = False) -> list[Update]:
    """`scores`: of each gain's tokens. `ended_only`: of those that ended alone."""
    return [
        update_of(seq, tokens, now, part)
        for (seq, tokens, _), part in zip(gains, scores, strict=True)
        if not ended_only or seq.status is _FINISHED
    ]


def update_of(seq: Sequence, tokens: list[int], now: float, scores: Scores | None = None) -> Update:
    """What the sequence has gained; its text, since the last update."""
    done = seq.status is _FINISHED
    text = "" if seq.text is None else seq.text.take(done)
    parts = None if seq.scores is None else [] if scores is None else [scores]
    gained = seq.request.id, seq.index, tokens, text, now, seq.times, seq.cached_tokens, seq.version or 0, parts
    if not done:
        return Update(*gained)
    seq.times.finished = now
    return Update(*gained, seq.finish_reason, seq.stop_reason, seq.grammar_error)


def completion_of(seq: Sequence, version: int) -> Completion:
    """`version`: of the weights now, for one that has no token."""
    tokens = tuple(seq.output)
    return Completion(
        index=seq.index,
        token_ids=tokens,
        text=seq.text.whole if seq.text else "",
        finish_reason=seq.finish_reason or "abort",
        stop_reason=seq.stop_reason,
        logprobs=None if seq.scores is None else Logprobs(tokens, seq.scores),
        weights_version=version if seq.version is None else seq.version,
        weights_versions=tuple(seq.versions),
        times=seq.times,
    )


@dataclass(frozen=True)
class Written:
    tokens: Many[int]
    scores: list[Scores] | None = None  # of all of them, where they are asked for
    versions: tuple[tuple[int, int], ...] = ()  # of the weights that sampled them: see Completion.weights_versions


def written_of(seq: Sequence, tokens: int = 0, parts: int = 0) -> Written:
    """All but the first `tokens`, which came in so many `parts` of its scores."""
    scores = None if seq.scores is None else seq.scores[parts:]
    return Written(seq.tokens[seq.prompt_len + tokens :], scores, tuple(seq.versions))


def go_on(seq: Sequence, written: Written) -> None:
    """Begin a sequence, whose text is there if it has one, with what was written of it."""
    _check(seq, written)
    seq.tokens += map(int, written.tokens)
    if seq.scores is not None and written.scores:
        seq.scores += written.scores
    seq.versions = list(written.versions)
    if seq.versions:
        seq.version = seq.versions[-1][1]
    seq.times.first_token = seq.request.arrival  # it was there when the request came
    if seq.text is not None:
        for token in written.tokens:
            seq.text.push(token, may_stop=False)  # else it would have ended there
        seq.text.take()


def _check(seq: Sequence, written: Written) -> None:
    params, count = seq.request.params, len(written.tokens)
    if params.max_tokens is not None and count >= params.max_tokens:
        raise UserError(f"an answer of at most {params.max_tokens} tokens cannot go on from {count}: raise max_tokens")
    scored = sum(len(values) for values, *_ in written.scores or ())
    if params.logprobs is not None and scored != count:
        raise UserError(f"logprobs are asked for, and {count} tokens that are written need theirs; got {scored}")
