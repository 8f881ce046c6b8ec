"""Prompts with completions of other prompts, from which KTO estimates how far the policy is from its reference."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dovetail.data.trained_tokens import Trained

OWN_SHARE = 3, 4  # of a row, that an example may fill: the rest is left to the mismatched document beside it


def room_of(length: int) -> int:
    """Return the tokens that an example may have in rows of `length`."""
    over, under = OWN_SHARE
    return length * over // under


def mismatched(documents: Sequence[Trained], length: int) -> list[Trained]:
    """Return for each document its prompt with the completion of the nearest document before it (the last ones come
    before the first) that has another prompt. Where both together are longer than `length`, the mismatched one loses
    the end of its completion, then the start of its prompt."""
    starts = [int(np.argmax(document.mask)) for document in documents]
    prompts = [document.tokens[:start] for document, start in zip(documents, starts, strict=True)]
    found = []
    for i, document in enumerate(documents):
        other = _other(prompts, i)
        room = length - len(document.tokens)
        found.append(_joined(prompts[i], documents[other], starts[other], room))
    return found


def _other(prompts: Sequence[np.ndarray], i: int) -> int:
    count = len(prompts)
    for back in range(1, count):
        if not np.array_equal(prompts[i - back], prompts[i]):
            return (i - back) % count
    return (i - 1) % count  # all prompts are the same


def _joined(prompt: np.ndarray, other: Trained, start: int, room: int) -> Trained:
    answer, mask = other.tokens[start:], other.mask[start:]
    answered = min(len(answer), max(room - len(prompt), room // 2))
    kept = prompt[max(0, len(prompt) - (room - answered)) :]
    tokens = np.concatenate([kept, answer[:answered]])
    return Trained(tokens, np.concatenate([np.zeros(len(kept), bool), mask[:answered]]))
