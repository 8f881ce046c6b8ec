"""Written: what an answer has so far, read from a sequence under way and given to one that goes on from there.

A sequence that begins with tokens is as one that was preempted after them: they are computed in one go, and what comes
next is sampled as it would have been, for a sample depends on the seed, the tokens and their number alone.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass

from dovetail.core.errors import UserError
from dovetail.engine.sequence import Sequence
from dovetail.engine.token_logprobs import Scores


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
