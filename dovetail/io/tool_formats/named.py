"""Read a tool call that names its function before the arguments: `name[ARGS]{...}`, `f(a=1)`, `<function=f>...`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import NamedTuple, Protocol

from dovetail.io.tool_formats.notation import State, as_json, literal


class ArgumentReader(Protocol):
    """Read arguments in a format's own notation and write them as JSON."""

    state: State

    def push(self, text: str, at: int) -> int:
        """Read `text` from `at` on, and return how far it was read."""
        ...

    def take(self) -> str:
        """Return the JSON written since the last call."""
        ...


class Named:
    """Read a head and then the arguments; `name` is None until the head is complete."""

    def __init__(self, heads: tuple[Head, ...], arguments: Callable[[str], ArgumentReader]):
        self.state, self.complete = State.OPEN, False
        self.name: str | None = None
        self._heads, self._new_arguments = heads, arguments
        self._arguments: ArgumentReader | None = None

    def push(self, text: str, at: int) -> int:
        """Read `text` from `at` on, and return how far it was read."""
        if self._arguments is None:
            found = [head.find(text, at) for head in self._heads]
            whole = next((head for head in found if isinstance(head, HeadMatch)), None)
            if whole is None:
                self.state = State.OPEN if any(found) else State.BROKEN
                return at
            self.name, at = whole
            self._arguments = self._new_arguments(self.name)
        at = self._arguments.push(text, at)
        self.state = self._arguments.state
        self.complete = self.state is State.DONE
        return at

    def take(self) -> str:
        """Return the arguments read since the last call, as JSON text."""
        assert self._arguments is not None
        return self._arguments.take()


class Blank(str):
    """Mark a part of a head that is a pattern instead of text."""


# OpenAI's function names are [a-zA-Z0-9_-]; tool servers also use dots, colons and slashes. The bound limits how long a
# text that only looks like a call is buffered.
NAME = Blank(r"[\w.:/\-]{1,128}")
KEY = Blank(r"\w{1,128}")
SPACE = Blank(r"\s{0,16}")
ARGUMENTS = Blank("")  # where the arguments begin


class HeadMatch(NamedTuple):
    """Hold the function's name and where its arguments begin."""

    name: str
    arguments: int  # where they begin


class Head:
    """Match a sequence of texts and patterns; ARGUMENTS marks where the arguments begin."""

    def __init__(self, *parts: str):
        self._whole, self._beginning = re.compile("".join(map(_group, parts))), re.compile(beginning(*parts))

    def find(self, text: str, at: int) -> HeadMatch | bool:
        """Return the head at this position, or whether more text may complete one."""
        whole = self._whole.match(text, at)
        if whole:
            return HeadMatch(whole["name"], whole.start("arguments"))
        return self._beginning.fullmatch(text, at) is not None


def beginning(*parts: str) -> str:
    """Return a pattern of any prefix of these parts."""
    pattern = ""
    for part in reversed(parts):
        for piece in [str(part)] if isinstance(part, Blank) else map(re.escape, reversed(part)):
            pattern = f"(?:{piece}{pattern})?"
    return pattern


def _group(part: str) -> str:
    if part is NAME:
        return f"(?P<name>{part})"
    if part is ARGUMENTS:
        return "(?P<arguments>)"
    return str(part) if isinstance(part, Blank) else re.escape(part)


_OPEN, _CLOSE, _END, _OUTER_END = "<parameter=", "</parameter>", "</function>", "</tool_call>"
_KEY = re.compile(_OPEN + r"([^<>\n]{1,256})>")
_HALF_KEY = re.compile(_OPEN + r"[^<>\n]{0,256}")
# Values are not escaped, so one may contain </parameter> itself: the one that ends it is followed by one of these.
_FOLLOWING = (_OPEN, _END, _OUTER_END)
_NEWLINE = Blank(r"\n?")
_VALUE_END = re.compile(rf"{_NEWLINE}{_CLOSE}(?={SPACE}(?:{'|'.join(_FOLLOWING)}))")
_HALF_END = re.compile(rf"(?:{'|'.join(beginning(_NEWLINE, _CLOSE, SPACE, tag) for tag in _FOLLOWING)})\Z")


class Parameters:
    """Read the tags after `<function=name>` up to `</function>`, and write a JSON object.

    A string is written as it comes, without the newline that the template puts at either end. A value of another type
    is converted once it is complete. One that does not fit its type is written as a string, so that the arguments are
    always JSON. If `</function>` is missing, `</tool_call>` ends the call.
    """

    def __init__(self, types_of: Callable[[str], frozenset[str]]):
        self.state = State.OPEN
        self._types_of = types_of
        self._out: list[str] = ["{"]
        self._any = False
        self._step = self._tag
        self._types: frozenset[str] = frozenset()
        self._value: list[str] = []  # pieces of a value that is converted at its end

    def push(self, text: str, at: int = 0) -> int:
        """Read `text` from `at` on, and return how far it was read."""
        while self.state is State.OPEN and at < len(text):
            read = self._step(text, at)
            if read == at:
                break
            at = read
        return at

    def take(self) -> str:
        """Return the JSON written since the last call."""
        written = "".join(self._out)
        self._out.clear()
        return written

    def _tag(self, text: str, at: int) -> int:
        if text[at].isspace():
            return at + 1
        key = _KEY.match(text, at)
        if key:
            return self._begin(key[1], key.end())
        for end, length in ((_END, len(_END)), (_OUTER_END, 0)):
            if text.startswith(end, at):
                self._out.append("}")
                self.state = State.DONE
                return at + length
        rest = text[at : at + 300]
        if not (_HALF_KEY.fullmatch(rest) or any(tag.startswith(rest) for tag in _FOLLOWING)):
            self.state = State.BROKEN
        return at

    def _begin(self, key: str, at: int) -> int:
        self._out.append((", " if self._any else "") + json.dumps(key, ensure_ascii=False) + ": ")
        self._any, self._types, self._step = True, self._types_of(key), self._newline
        return at

    def _newline(self, text: str, at: int) -> int:
        self._step, self._value = self._read, []
        if self._is_text:
            self._out.append('"')
        return at + 1 if text[at] == "\n" else self._read(text, at)

    def _read(self, text: str, at: int) -> int:
        end = _VALUE_END.search(text, at)
        if end is None:
            half = _HALF_END.search(text, at)
            assert half is not None  # it matches at least the empty text at the end
            self._write(text[at : half.start()])
            return half.start()
        self._write(text[at : end.start()])
        self._out.append('"' if self._is_text else typed("".join(self._value), self._types))
        self._step = self._tag
        return end.end()

    def _write(self, text: str) -> None:
        if self._is_text:
            self._out.append(json.dumps(text, ensure_ascii=False)[1:-1])
        else:
            self._value.append(text)

    @property
    def _is_text(self) -> bool:
        return self._types == {"string"}


def typed(text: str, types: frozenset[str]) -> str:
    """Return the JSON of a value of one of these types, or of a string if it fits none of them."""
    value = text.strip()
    found = literal(value)
    if found is not None:
        kinds = {"null"} if found == "null" else {"boolean"} if found in ("true", "false") else {"number", "integer"}
        if kinds & types:
            return found
    if value[:1] in ("{", "[") and {"{": "object", "[": "array"}[value[0]] in types:
        found = as_json(value)
        if found is not None:
            return found
    return json.dumps(text, ensure_ascii=False)
