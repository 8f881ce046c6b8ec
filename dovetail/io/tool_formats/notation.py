"""Read values as models write them (JSON, Python literals, Gemma's notation), piece by piece, and write them as JSON.

JSON passes through unchanged, character by character. Common errors of models are corrected where the meaning is clear:
a raw newline in a string, single quotes, True and None, a trailing comma, a backslash that escapes nothing. Anything
else is broken, and what was written until then is a prefix of valid JSON.

`read_cut_off` reads the arguments of a call that max_tokens has cut off.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any, NamedTuple


class State(Enum):
    """Say whether a value needs more text, is complete, or is malformed."""

    OPEN = "open"  # more is to come
    DONE = "done"
    BROKEN = "broken"


@dataclass(frozen=True)
class Notation:
    """Describe how values are written."""

    quotes: tuple[str, ...]  # around strings; of two that begin alike, the longer first
    raw: tuple[str, ...] = ()  # those of the quotes within which a backslash escapes nothing
    call: bool = False  # the whole is (name=value, ...) and tuples are lists
    bare: bool = False  # a word that is not a literal is a string without quotes


JSON = Notation(quotes=('"', "'"))
PYTHON = Notation(quotes=('"""', "'''", '"', "'"), call=True)
GEMMA = Notation(quotes=('<|"|>', '"'), raw=('<|"|>',), bare=True)

_SPACE = re.compile(r"[ \t\r\n]*")
_WORD = re.compile(r"[\w.+\-]*")
_BARE_KEY, _BARE_VALUE = re.compile(r"[^:,<\[\]{}]*"), re.compile(r"[^,<\]}]*")
_ESCAPE = re.compile(
    r"""\\(?: (?P<json>["\\/bfnrt]|u[0-9a-fA-F]{4}) | x(?P<byte>[0-9a-fA-F]{2})
      | U(?P<char>000[0-9a-fA-F]{5}|0010[0-9a-fA-F]{4}) | (?P<quote>') | (?P<other>.) )""",
    re.VERBOSE | re.DOTALL,
)
_HALF_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3}|x[0-9a-fA-F]?|U[0-9a-fA-F]{0,7})?\Z")
_LITERALS = {"true": "true", "True": "true", "false": "false", "False": "false", "null": "null", "None": "null"}
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")


class _Bracket(NamedTuple):
    """Hold an object or list that is open."""

    close: str
    separator: str  # between a key and its value; "" in a list


class ValueReader:
    """Read one value.

    `push` returns how far it has read: an undecided rest (half a word, an escape or a quote) must be pushed again with
    the text that follows. `take` returns the JSON written since the last call.
    """

    def __init__(self, notation: Notation):
        self.state = State.OPEN
        self._notation = notation
        self._out: list[str] = []
        self._brackets: list[_Bracket] = []
        self._step = self._call if notation.call else self._value
        self._comma = ""  # a comma and the space after it: written once it is known that something follows
        self._quote, self._in_key = "", False
        self._plain = _plain('"')

    def push(self, text: str, at: int = 0) -> int:
        """Read `text` from `at` on, and return how far it was read."""
        while self.state is State.OPEN:
            if self._step != self._string:
                at = self._space(text, at)
            if at == len(text):
                break
            read = self._step(text, at)
            if read == at:  # undecided, or broken here
                break
            at = read
        return at

    def take(self) -> str:
        """Return the JSON written since the last call."""
        written = "".join(self._out)
        self._out.clear()
        return written

    # --- what may come next: each step reads something and sets the next step, or reads nothing -----------------------

    def _call(self, text: str, at: int) -> int:
        return self._open(_Bracket(")", "="), at) if text[at] == "(" else self._fail(at)

    def _value(self, text: str, at: int) -> int:
        match text[at]:
            case "{":
                return self._open(_Bracket("}", ":"), at)
            case "[":
                return self._open(_Bracket("]", ""), at)
            case "(" if self._notation.call:
                return self._open(_Bracket(")", ""), at)
        return self._text(text, at, key=False)

    def _item(self, text: str, at: int) -> int:
        """Read a value, or the end of the list."""
        return self._close(at) if text[at] == self._brackets[-1].close else self._value(text, at)

    def _key(self, text: str, at: int) -> int:
        """Read a key, or the end of the object."""
        return self._close(at) if text[at] == self._brackets[-1].close else self._text(text, at, key=True)

    def _separator(self, text: str, at: int) -> int:
        if text[at] != self._brackets[-1].separator:
            return self._fail(at)
        self._write(":" if text[at] == ":" else ": ")
        self._step = self._value
        return at + 1

    def _next(self, text: str, at: int) -> int:
        """Read a comma, or the end of the open object or list."""
        if text[at] == self._brackets[-1].close:
            return self._close(at)
        if text[at] != ",":
            return self._fail(at)
        self._comma = ","
        self._step = self._key if self._brackets[-1].separator else self._item
        return at + 1

    def _string(self, text: str, at: int) -> int:
        plain = self._plain.match(text, at)
        assert plain is not None
        self._out.append(plain[0])
        at = plain.end()
        if text.startswith(self._quote, at):
            self._out.append('"')
            self._after_text()
            return at + len(self._quote)
        if self._quote.startswith(text[at:]):  # nothing more, or half a quote
            return at
        if text[at] == "\\" and self._quote not in self._notation.raw:
            return self._escape(text, at)
        self._out.append(_quoted(text[at])[1:-1])
        return at + 1

    # --- how it is read -----------------------------------------------------------------------------------------------

    def _space(self, text: str, at: int) -> int:
        space = _SPACE.match(text, at)
        assert space is not None
        if self._comma:
            self._comma += space[0]
        else:
            self._out.append(space[0])
        return space.end()

    def _open(self, bracket: _Bracket, at: int) -> int:
        self._write("{" if bracket.separator else "[")
        self._brackets.append(bracket)
        self._step = self._key if bracket.separator else self._item
        return at + 1

    def _close(self, at: int) -> int:
        self._comma = ""
        self._out.append("}" if self._brackets.pop().separator else "]")
        self._after_value()
        return at + 1

    def _text(self, text: str, at: int, key: bool) -> int:
        """Read the beginning of a string, or a whole word."""
        for quote in self._notation.quotes:
            if text.startswith(quote, at):
                self._write('"')
                self._step, self._quote, self._in_key, self._plain = self._string, quote, key, _plain(quote)
                return at + len(quote)
            if quote.startswith(text[at:]):
                return at
        pattern = (_BARE_KEY if key else _BARE_VALUE) if self._notation.bare else _WORD
        word = pattern.match(text, at)
        assert word is not None
        if word.end() == len(text):  # it may go on
            return at
        written = self._word(word[0].strip(), key)
        if written is None:
            return self._fail(at)
        self._write(written)
        self._in_key = key
        self._after_text()
        return word.end()

    def _word(self, word: str, key: bool) -> str | None:
        if not word:
            return None
        if key:
            return _quoted(word)
        if self._notation.bare:  # 007, for example, is not a JSON number and may be a text
            return _LITERALS.get(word) or (word if _NUMBER.fullmatch(word) else _quoted(word))
        return literal(word)

    def _escape(self, text: str, at: int) -> int:
        if _HALF_ESCAPE.match(text, at):
            return at
        found = _ESCAPE.match(text, at)
        assert found is not None
        match found.lastgroup:
            case "json":
                self._out.append(found[0])
            case "byte":
                self._out.append(f"\\u00{found['byte']}")
            case "char":
                self._out.append(_quoted(chr(int(found["char"], 16)))[1:-1])
            case "quote":
                self._out.append("'")
            case _:
                self._out.append(_quoted(found[0])[1:-1])
        return found.end()

    def _write(self, text: str) -> None:
        self._out += [self._comma, text]
        self._comma = ""

    def _after_text(self) -> None:
        if self._in_key:
            self._step = self._separator
        else:
            self._after_value()

    def _after_value(self) -> None:
        self._step = self._next
        if not self._brackets:
            self.state = State.DONE

    def _fail(self, at: int) -> int:
        self.state = State.BROKEN
        return at


def literal(word: str) -> str | None:
    """Return a number, true, false or null as JSON; None for any other word."""
    if word in _LITERALS or _NUMBER.fullmatch(word):
        return _LITERALS.get(word, word)
    try:
        number = float(word) if re.search("[.eE]", word) and "x" not in word else int(word, 0)
        return json.dumps(number) if math.isfinite(number) else None
    except (ValueError, OverflowError):
        return None


def as_json(text: str) -> str | None:
    """Return the JSON of one whole value, read as tolerantly as `ValueReader` does; None if it is malformed."""
    reader = ValueReader(JSON)
    end = reader.push(text + " ")  # the space ends a word
    return reader.take().strip() if reader.state is State.DONE and not text[end:].strip() else None


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


@cache
def _plain(quote: str) -> re.Pattern[str]:
    """Match characters that need no escape in a JSON string and do not begin the quote."""
    return re.compile(r'[^"\\\x00-\x1f' + re.escape(quote[0]) + "]*")


# --- objects that are cut off -----------------------------------------------------------------------------------------

_CLOSE = {"{": "}", "[": "]"}
_STRING = r'"(?:[^"\\]|\\.)*'
_VALUE = rf"(?:-?[0-9.]*(?:[eE][+-]?[0-9]*)?|t(?:r(?:u)?)?|f(?:a(?:l(?:s)?)?)?|n(?:u(?:l)?)?|{_STRING}\\?)"
_BEGUN = re.compile(rf'\s*(?:{_VALUE}|{_STRING}"\s*(?::\s*{_VALUE})?)', re.DOTALL)  # a value, or a key and its value


def read_cut_off(text: str) -> dict[str, Any] | None:
    """Return the JSON object that `text` begins, or None if it is not the beginning of an object.

    An incomplete last value is left out, except a string, which is closed.
    """
    at, open_, in_string, inner = _scan(text)
    found = _as_object(text + '"' * in_string + _closed(inner))
    if found is None and _BEGUN.fullmatch(text, at):
        found = _as_object(text[:at].rstrip().removesuffix(",") + _closed(open_))
    return found


def _as_object(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _scan(text: str) -> tuple[int, str, bool, str]:
    """Find the last value.

    Returns:
        Where the last value (or key and value) begins, the brackets that are open there, whether the text ends in a
        string, and the brackets that are open at its end.
    """
    begins, open_there, open_, in_string, at = 0, "", "", False, 0
    while at < len(text):
        character = text[at]
        if in_string:
            at += character == "\\"  # the next one is escaped
            in_string = character != '"'
        elif character == '"':
            in_string = True
        elif character in "{[,":
            open_ += character if character != "," else ""
            begins, open_there = at + 1, open_
        elif character in "}]":
            open_ = open_[:-1]
        at += 1
    return begins, open_there, in_string, open_


def _closed(open_: str) -> str:
    return "".join(_CLOSE[each] for each in reversed(open_))
