"""LaunchedStep: a step in flight, and the log-probabilities that are copied from it to its sequences.

S rows, T tokens, D model dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import numpy as np

from dovetail.engine.request.logprobs import Logprobs, Scores, TokenLogprob, Top
from dovetail.engine.request.sequence import Sequence
from dovetail.engine.schedule.plan import Gain, PlanRow, StepPlan

Score = Callable[[jax.Array, np.ndarray], tuple[jax.Array, ...]]  # Runner.score
CHUNK = 128  # prompt positions scored at a time, so that not all their logits are in memory at once


@dataclass
class LaunchedStep:
    """Hold a step in flight; its results are on the device."""

    plan: StepPlan
    tokens: jax.Array  # [steps, S]
    logprobs: tuple[jax.Array, ...] | None = None  # [steps, S, ...]: see ops.sample.logprobs
    hidden: jax.Array | None = None  # [T, D], if requested
    version: int = 0  # of the weights
    padded: int = 0  # tokens that a device step computes, with padding
    waited: bool = False  # whether the launch waited for its program to be compiled

    def fetch(self) -> np.ndarray:
        """Return the sampled tokens [steps, S]; columns of rows that do not sample and of padding are meaningless."""
        return np.asarray(self.tokens)


def send_logprobs(launched: LaunchedStep, asked: set[int | None]) -> None:
    """Start copying the requested log-probabilities to the host.

    Args:
        launched: The step.
        asked: The values of `SamplingParams.logprobs` of its rows. The most probable tokens, which are many times as
            much data, are copied only if some row requests them.
    """
    arrays = launched.logprobs if asked != {None} else None
    for array in arrays or ():
        if array.ndim == 2 or any(asked):
            array.copy_to_host_async()


def keep_logprobs(launched: LaunchedStep, gains: list[Gain]) -> list[Scores | None]:
    """Add the log-probabilities of the kept tokens to their sequences; return them for each gain."""
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
            if top or len(tokens) < len(values[i]):
                new = _cut(new, len(tokens), [array[:, i] for array in top], seq.request.params.logprobs or 0)
            seq.scores.append(new)
        kept.append(new)
    return kept


def _cut(scores: Scores, count: int, top: list[np.ndarray], most: int) -> Scores:
    """Return the scores of the first `count` tokens, with the `most` most probable tokens beside each."""
    values, ranks, _ = scores
    return values[:count], ranks[:count], _tops([array[:count] for array in top], most) if most else None


def wants_prompt_logprobs(row: PlanRow) -> bool:
    """Return whether a row computes prompt tokens whose log-probabilities are requested."""
    seq = row.seq
    return seq.request.params.prompt_logprobs is not None and seq.index == 0 and row.start < seq.prompt_len - 1


def keep_prompt_logprobs(launched: LaunchedStep, score: Score) -> None:
    """Score the prompt tokens that this step's hidden states predict: position p predicts token p + 1."""
    first = 0
    for row in launched.plan.rows:
        if wants_prompt_logprobs(row):
            _score_row(launched, row, first, score)
        first += row.count


def _score_row(launched: LaunchedStep, row: PlanRow, first: int, score: Score) -> None:
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
    """Return one entry per prompt token, if requested; the first is None because nothing precedes it."""
    if seq.request.params.prompt_logprobs is None:
        return None
    return tuple(seq.prompt_logprobs.get(i) for i in range(seq.prompt_len))


def _tops(top: list[np.ndarray], count: int) -> list[Top]:
    """Return the first `count` of log-probabilities and tokens [n, k]."""
    values, ids = (array[:, :count].tolist() for array in top)
    return list(zip(ids, values, strict=True))
