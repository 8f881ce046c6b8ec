"""Stops: what ends a sequence. End tokens are found in all that a step sampled at once, and lengths by arithmetic; a
sequence that more can stop (stop ids, stop strings, a grammar, min_tokens) is `by_token` and looked at token by token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from dovetail.engine.request.sequence import Sequence

End = tuple[str, int | str | None]  # (finish_reason, stop_reason)


class Stops:
    """eos_ids: what ends every sequence that does not ignore them. grammar_done: whether a sequence's grammar allows
    nothing more; for those that have one."""

    def __init__(self, eos_ids: Iterable[int] = (), grammar_done: Callable[[Sequence], bool] | None = None):
        self.eos_ids, self._grammar_done = tuple(eos_ids), grammar_done

    def watch(self, seq: Sequence) -> None:
        """Says of a new sequence whether it is `by_token`; its text is there already, if it has one."""
        params = seq.request.params
        strings = params.stop if seq.text is not None else ()
        seq.by_token = bool(strings or params.stop_token_ids or params.structured or params.min_tokens)

    def find(self, sampled: np.ndarray) -> dict[int, int]:
        """The columns of [steps, S] that hold an end token, with the step of the first."""
        found = np.zeros(sampled.shape, bool)
        for token in self.eos_ids:
            found |= sampled == token
        if not found.any():
            return {}
        columns = np.flatnonzero(found.any(axis=0))
        return dict(zip(columns.tolist(), found[:, columns].argmax(axis=0).tolist(), strict=True))

    def cut(self, seq: Sequence, tokens: list[int], eos: int | None) -> tuple[list[int], End | None]:
        """What a sequence takes of new tokens, and how it ends with them; `eos`: the place of the first end token."""
        room = seq.limit - len(seq.tokens)
        if eos is not None and eos < room and not seq.request.params.ignore_eos:
            return tokens[: eos + 1], ("stop", None)
        return (tokens[:room], ("length", None)) if len(tokens) >= room else (tokens, None)

    def append_each(self, seq: Sequence, tokens: list[int]) -> tuple[list[int], End | None]:
        """Append new tokens up to the one that ends the sequence; -> those, and how it ends with them."""
        for count, token in enumerate(tokens, 1):
            seq.tokens.append(token)
            end = self._end_at(seq, token)
            if end is None and len(seq.tokens) >= seq.limit:
                end = ("length", None)
            if end is not None:
                return tokens[:count], end
        return tokens, None

    def _end_at(self, seq: Sequence, token: int) -> End | None:
        """Whether the token just appended ends the sequence."""
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
        if params.structured and self._grammar_done is not None and self._grammar_done(seq):
            return "stop", seq.grammar_error  # where the grammar could not go on, why
        return None
