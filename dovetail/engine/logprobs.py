"""Log-probabilities on their way from the device to a sequence: of what was sampled, and of its prompt."""

from __future__ import annotations

import numpy as np

from dovetail.engine.plan import Row
from dovetail.engine.runner import LaunchedStep, Runner
from dovetail.engine.sequence import Sequence, TokenLogprob

CHUNK = 128  # prompt positions scored at a time: their logits are never all there at once


def keep_logprobs(launched: LaunchedStep, gains: list[tuple[Sequence, list[int]]]) -> None:
    """Give each sequence the log-probabilities of the tokens it kept."""
    assert launched.logprobs is not None
    wanted = {seq: tokens for seq, tokens in gains if seq.request.params.logprobs is not None}
    if not wanted:
        return
    arrays = [np.asarray(a) for a in launched.logprobs]
    for i, row in enumerate(launched.plan.rows):
        if row.samples and row.seq in wanted:
            count = row.seq.request.params.logprobs or 0
            for step, token in enumerate(wanted[row.seq]):
                row.seq.logprobs.append(_entry(token, [a[step, i] for a in arrays], count))


def wants_prompt_logprobs(row: Row) -> bool:
    seq = row.seq
    return seq.request.params.prompt_logprobs is not None and seq.index == 0 and row.start < seq.prompt_len - 1


def keep_prompt_logprobs(launched: LaunchedStep, runner: Runner) -> None:
    """Score the prompt tokens that this step's hidden states predict: position p says what p + 1 is."""
    first = 0
    for row in launched.plan.rows:
        if wants_prompt_logprobs(row):
            _score_row(launched, row, first, runner)
        first += row.count


def _score_row(launched: LaunchedStep, row: Row, first: int, runner: Runner) -> None:
    assert launched.hidden is not None
    prompt, found = row.seq.request.prompt, row.seq.prompt_logprobs
    end = min(row.start + row.count, len(prompt) - 1)
    for start in range(row.start, end, CHUNK):
        targets = prompt[start + 1 : min(start + CHUNK, end) + 1]
        at = np.minimum(first + start - row.start + np.arange(CHUNK), launched.hidden.shape[0] - 1)
        padded = np.zeros(CHUNK, np.int32)
        padded[: len(targets)] = targets
        arrays = [np.asarray(a) for a in runner.score(launched.hidden[at], padded)]
        for i, token in enumerate(targets):
            count = row.seq.request.params.prompt_logprobs or 0
            found[start + 1 + i] = _entry(token, [a[i] for a in arrays], count)


def prompt_logprobs(seq: Sequence) -> tuple[TokenLogprob | None, ...] | None:
    """One entry per prompt token; the first has none, nothing came before it."""
    if seq.request.params.prompt_logprobs is None:
        return None
    return tuple(seq.prompt_logprobs.get(i) for i in range(seq.prompt_len))


def _entry(token: int, arrays: list[np.ndarray], count: int) -> TokenLogprob:
    value, rank, top_values, top_ids = arrays
    top = tuple(zip(top_ids[:count].tolist(), top_values[:count].tolist(), strict=True))
    return TokenLogprob(token, float(value), int(rank), top)
