"""Log-probabilities on their way from the device to a sequence: of what was sampled, and of its prompt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import numpy as np

from dovetail.engine.request.logprobs import Logprobs, Scores, TokenLogprob, Top
from dovetail.engine.request.sequence import Sequence
from dovetail.engine.schedule.plan import Gain, Row, StepPlan

Score = Callable[[jax.Array, np.ndarray], tuple[jax.Array, ...]]  # Runner.score
CHUNK = 128  # prompt positions scored at a time: their logits are never all there at once


@dataclass
class LaunchedStep:
    """A step under way, its results still on the device: tokens [steps, S], log-probabilities (see ops.sample.logprobs)
    [steps, S, ...], and where they were asked for the hidden states [T, D]."""

    plan: StepPlan
    tokens: jax.Array
    logprobs: tuple[jax.Array, ...] | None = None
    hidden: jax.Array | None = None
    version: int = 0
    padded: int = 0  # tokens a step computes, with those that fill its shape
    waited: bool = False  # for its program to be compiled

    def fetch(self) -> np.ndarray:
        """The new tokens [steps, S]: a column for each of the plan's rows, also those that do not sample, and more."""
        return np.asarray(self.tokens)


def send_logprobs(launched: LaunchedStep, asked: set[int | None]) -> None:
    """Start to copy to the host what the step's rows ask for (their SamplingParams.logprobs): nothing, a number and a
    rank for each token, or the most probable beside them too, which are many times as many."""
    arrays = launched.logprobs if asked != {None} else None
    for array in arrays or ():
        if array.ndim == 2 or any(asked):
            array.copy_to_host_async()


def keep_logprobs(launched: LaunchedStep, gains: list[Gain]) -> list[Scores | None]:
    """Give each sequence that asked the log-probabilities of the tokens it kept; -> those, for each gain."""
    asked = {seq.request.params.logprobs for seq, _, _ in gains}
    if launched.logprobs is None or not asked - {None}:
        return [None] * len(gains)
    value, rank, *top = launched.logprobs
    rows = len(launched.plan.rows)
    values, ranks = (np.asarray(array)[:, :rows].T.tolist() for array in (value, rank))  # a list for each row
    top = [np.asarray(array) for array in top] if any(asked) else []
    kept: list[Scores | None] = []
    for seq, tokens, i in gains:
        new = None
        if seq.scores is not None:
            new = values[i], ranks[i], None
            if top or len(tokens) < launched.plan.steps:
                new = _cut(new, len(tokens), [array[:, i] for array in top], seq.request.params.logprobs or 0)
            seq.scores.append(new)
        kept.append(new)
    return kept


def _cut(scores: Scores, count: int, top: list[np.ndarray], most: int) -> Scores:
    """Of the first `count` tokens alone, and with the `most` most probable beside each."""
    values, ranks, _ = scores
    return values[:count], ranks[:count], _tops([array[:count] for array in top], most) if most else None


def wants_prompt_logprobs(row: Row) -> bool:
    seq = row.seq
    return seq.request.params.prompt_logprobs is not None and seq.index == 0 and row.start < seq.prompt_len - 1


def keep_prompt_logprobs(launched: LaunchedStep, score: Score) -> None:
    """Score the prompt tokens that this step's hidden states predict: position p says what p + 1 is."""
    first = 0
    for row in launched.plan.rows:
        if wants_prompt_logprobs(row):
            _score_row(launched, row, first, score)
        first += row.count


def _score_row(launched: LaunchedStep, row: Row, first: int, score: Score) -> None:
    assert launched.hidden is not None
    prompt, found = row.seq.request.prompt, row.seq.prompt_logprobs
    end = min(row.start + row.count, len(prompt) - 1)
    for start in range(row.start, end, CHUNK):
        targets = prompt[start + 1 : min(start + CHUNK, end) + 1]
        at = np.minimum(first + start - row.start + np.arange(CHUNK), launched.hidden.shape[0] - 1)
        padded = np.zeros(CHUNK, np.int32)
        padded[: len(targets)] = targets
        values, ranks, *top = (np.asarray(a)[: len(targets)] for a in score(launched.hidden[at], padded))
        tops = _tops(top, row.seq.request.params.prompt_logprobs or 0)
        found.update(enumerate(Logprobs(targets, [(values.tolist(), ranks.tolist(), tops)]), start + 1))


def prompt_logprobs(seq: Sequence) -> tuple[TokenLogprob | None, ...] | None:
    """One entry per prompt token; the first has none, nothing came before it."""
    if seq.request.params.prompt_logprobs is None:
        return None
    return tuple(seq.prompt_logprobs.get(i) for i in range(seq.prompt_len))


def _tops(top: list[np.ndarray], count: int) -> list[Top]:
    """Of log-probabilities and tokens [n, k], the first `count`."""
    values, ids = (array[:, :count].tolist() for array in top)
    return list(zip(ids, values, strict=True))
