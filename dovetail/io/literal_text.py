"""LiteralText: text of others in a prompt, tokenized so that it spells no special token.

A tokenizer makes the special token of `<|im_end|>` wherever it stands, also in what a user wrote, who can so end their
turn and begin the system's. Here a mark, one of Unicode's noncharacters, is put after the first character of each such
spelling before a chat template sees the text. What the template writes itself has no mark and becomes special tokens;
the marks' own tokens are taken out again after tokenizing, and the rest is tokenized in its context.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from dovetail.core.errors import UserError
from dovetail.io.tokenizer import Tokenizer

MARK = "\ufdef"  # io.chat uses others, from U+FDD0 on


class LiteralText:
    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        # one of a single character cannot be broken by a mark, and is none in practice
        special = [name for token in tokenizer.special_ids if len(name := tokenizer.token(token)) > 1]
        self._spelled = re.compile(f"(?=(?:{'|'.join(map(re.escape, special))}))(.)", re.S) if special else None

    def mark(self, value: Any) -> Any:
        """Return text, or JSON with texts in it, with a mark in each spelling of a special token."""
        if isinstance(value, str):
            if MARK in value:
                raise UserError(f"the text holds U+{ord(MARK):04X}, which is not a character; remove it")
            return self._spelled.sub(rf"\1{MARK}", value) if self._spelled else value
        if isinstance(value, Mapping):
            return {self.mark(key): self.mark(item) for key, item in value.items()}
        return [self.mark(item) for item in value] if isinstance(value, list | tuple) else value

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Return the tokens of a text with marks, without those of the marks."""
        if MARK not in text:
            return self._tokenizer.encode(text, add_special)
        # not encode_batch_fast, which gives no offsets; both release Python's lock
        (found,) = self._tokenizer.backend.encode_batch([text], add_special_tokens=add_special)
        tokens, seen = [], set()
        for token, (start, end) in zip(found.ids, found.offsets, strict=True):
            marks = [i for i in range(start, end) if text[i] == MARK]
            seen.update(marks)
            if len(marks) < end - start or start == end:
                if marks:
                    raise UserError(_CANNOT)
                tokens.append(token)
        if len(seen) < text.count(MARK):
            raise UserError(_CANNOT)
        return tokens


_CANNOT = (
    "this model's tokenizer cannot keep special tokens that are spelled in a text apart; remove them from the text"
)
