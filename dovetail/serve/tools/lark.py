"""Lark: writes a grammar in llguidance's Lark notation."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from dovetail.core.json_schema import closed

# As templates write JSON. Flexible white space would let the model write white space without end.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_COMPACT = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}


class Lark:
    """special: the ids of texts that are special tokens. They are matched as tokens: spelled in ordinary tokens, the
    model would read another text."""

    def __init__(self, special: Mapping[str, int]):
        self._special = dict(special)
        self._rules: list[str] = []

    def rule(self, body: str, options: str = "") -> str:
        """Adds a rule; returns its name."""
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{options}: {body}")
        return name

    def text(self, text: str) -> str:
        """Exactly this text."""
        if not self._special:
            return _literal(text)
        pieces = re.split(f"({'|'.join(map(re.escape, self._special))})", text)
        return " ".join(
            f"<[{self._special[piece]}]>" if piece in self._special else _literal(piece) for piece in pieces if piece
        )

    def until(self, end: str) -> str:
        """Any text that does not contain `end`, and then `end`."""
        if end in self._special:
            return f"{self.rule('/(?s:.*)/')} {self.text(end)}"
        return self.rule("/(?s:.*)/", f"[suffix={_literal(end)}]")

    def without(self, texts: Sequence[str]) -> str:
        """Any text that contains none of these; special tokens are never text."""
        written = [re.escape(text).replace("/", r"\/") for text in texts if text not in self._special]
        if not written:
            return self.rule("/(?s:.*)/")
        name = f"T{len(self._rules)}"  # only a terminal, which is in capitals, can be an intersection
        self._rules.append(f"{name}: /(?s:.*)/ & ~/(?s:.*)({'|'.join(written)})(?s:.*)/")
        return name

    def json(self, schema: Mapping[str, Any], compact: bool = False) -> str:
        """JSON that follows a schema, without properties that it does not list."""
        return f"%json {json.dumps({**closed(schema), 'x-guidance': _COMPACT if compact else _SPACING})}"

    def one_of(self, bodies: list[str]) -> str:
        return self.rule(" | ".join(bodies))

    def source(self, start: str) -> str:
        return "\n".join([f"start: {start}", *self._rules]) + "\n"


def _literal(text: str) -> str:
    return json.dumps(text)  # a JSON string is a Lark string
