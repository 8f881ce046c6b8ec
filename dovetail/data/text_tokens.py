"""A text's tokens and the characters that each stands for, so that a boundary in the text is one among the tokens."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer as Backend

from dovetail.core.errors import UserError
from dovetail.data.encoder import before_text
from dovetail.io.tokenizer import Tokenizer


class Tokens(NamedTuple):
    ids: np.ndarray  # [n] int32
    starts: np.ndarray  # [n] the first character of each
    ends: np.ndarray  # [n] one past the last; the tokens of one character's bytes share it

    def within(self, start: int, end: int) -> slice:
        """The tokens that hold any of the characters start..end-1."""
        found = np.flatnonzero((self.starts < end) & (self.ends > start))
        return slice(int(found[0]), int(found[-1]) + 1) if len(found) else slice(0, 0)

    def cut_at(self, character: int) -> bool:
        """Whether no token reaches over this place."""
        return not ((self.starts < character) & (self.ends > character)).any()


class TextTokens:
    """A tokenizer that tells places. BOS and EOS are not added: see `before`."""

    def __init__(self, tokenizer: Tokenizer):
        self.before = before_text(tokenizer.backend)  # what a plain text begins with, such as BOS
        self.backend = Backend.from_str(tokenizer.backend.to_str())
        self.backend.encode_special_tokens = tokenizer.backend.encode_special_tokens
        # Byte-level post-processors move the offsets, to leave out the space before a word; it is part of its token.
        self.backend.post_processor = None  # type: ignore[assignment]

    def encode(self, text: str) -> Tokens:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UserError(
                f"expected valid Unicode, got half a surrogate pair at character {error.start}; write the text again "
                "with errors='replace'"
            ) from None
        found = self.backend.encode(text, add_special_tokens=False)
        offsets = np.asarray(found.offsets, np.int64).reshape(-1, 2)
        return Tokens(np.asarray(found.ids, np.int32), offsets[:, 0], offsets[:, 1])

    def split(self, before: str, after: str) -> tuple[np.ndarray, np.ndarray] | None:
        """The tokens of `before + after` on each side of the boundary.

        Where one would reach over it, each side is tokenised alone, as when a model reads the one and writes the other.
        None if that is not the same text: some tokenizers put a space before what they are given.
        """
        whole = self.encode(before + after)
        if whole.cut_at(len(before)):
            first = int((whole.ends <= len(before)).sum())
            return whole.ids[:first], whole.ids[first:]
        parts = self.encode(before).ids, self.encode(after).ids
        return parts if self._text(np.concatenate(parts)) == self._text(whole.ids) else None

    def _text(self, ids: np.ndarray) -> str:
        return self.backend.decode(ids.tolist(), skip_special_tokens=False)
