"""From a sequence to what the caller gets of it: an Update for each step, and in the end its Completion."""

from __future__ import annotations

from dovetail.engine.scheduler import Gain
from dovetail.engine.sequence import Completion, Sequence, Status, Update
from dovetail.engine.token_logprobs import Logprobs, Scores

_FINISHED = Status.FINISHED  # read once: in a loop over rows, looking a member of an enum up costs


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
