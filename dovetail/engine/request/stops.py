"""Stops: find where sequences end.

EOS tokens are found in all tokens of a step at once and lengths by arithmetic. A sequence that can also stop otherwise
(stop ids, stop strings, a grammar, min_tokens) is `by_token` and checked token by token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from dovetail.engine.request.sequence import Sequence

End = tuple[str, int | str | None]  # (finish_reason, stop_reason)


class Stops:
    """Find where sequences end.

    Args:
        eos_ids: Tokens that end every sequence without `ignore_eos`.
        grammar_done: Return whether a sequence's grammar allows nothing more; called for sequences with a grammar.
    """

    def __init__(self, eos_ids: Iterable[int] = (), grammar_done: Callable[[Sequence], bool] | None = None):
        self.eos_ids, self._grammar_done = tuple(eos_ids), grammar_done

    def watch(self, seq: Sequence) -> None:
        """Set `by_token` of a new sequence, whose `text` is already set if it has one."""
        params = seq.request.params
        strings = params.stop if seq.text is not None else ()
        seq.by_token = bool(strings or params.stop_token_ids or params.structured_outputs or params.min_tokens)

    def find(self, sampled: np.ndarray) -> dict[int, int]:
        """Return the columns of `sampled` [steps, S] that have an EOS token, with the step of the first one."""
        found = np.zeros(sampled.shape, bool)
        for token in self.eos_ids:
            found |= sampled == token
        if not found.any():
            return {}
        columns = np.flatnonzero(found.any(axis=0))
        return dict(zip(columns.tolist(), found[:, columns].argmax(axis=0).tolist(), strict=True))

    def cut(self, seq: Sequence, tokens: list[int], eos: int | None) -> tuple[list[int], End | None]:
        """Return the new tokens that a sequence keeps and how it ends; `eos` is the position of the first EOS token."""
        room = seq.limit - len(seq.tokens)
        if eos is not None and eos < room and not seq.request.params.ignore_eos:
            return tokens[: eos + 1], ("stop", None)
        return (tokens[:room], ("length", None)) if len(tokens) >= room else (tokens, None)

    def append_each(self, seq: Sequence, tokens: list[int]) -> tuple[list[int], End | None]:
        """Append new tokens up to the one that ends the sequence; return the appended tokens and how it ends."""
        for count, token in enumerate(tokens, 1):
            seq.tokens.append(token)
            end = self._end_at(seq, token)
            if end is None and len(seq.tokens) >= seq.limit:
                end = ("length", None)
            if end is not None:
                return tokens[:count], end
        return tokens, None

    def _end_at(self, seq: Sequence, token: int) -> End | None:
        """Return how the token that was just appended ends the sequence; None if it does not."""
        params = seq.request.params
        early = len(seq.tokens) - seq.prompt_len < params.min_tokens
        if token in self.eos_ids and not params.ignore_eos and not early:
            return "stop", None
        if token in params.stop_token_ids and not early:
            return "stop", token
        if seq.text is not None:
            stop = seq.text.push(token, may_stop=not early)
            if stop is not None:
                return "stop", stop
        if params.structured_outputs and self._grammar_done is not None and self._grammar_done(seq):
            return "stop", seq.error  # set if the grammar could not continue
        return None
