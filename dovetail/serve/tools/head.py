"""The head of a call that names its function before the arguments: `call:name{`, `name(`, `<function=name>`."""

from __future__ import annotations

import re
from typing import NamedTuple


class Blank(str):
    """A part of a head that is a pattern and not a text."""


# OpenAI's function names are [a-zA-Z0-9_-]; tool servers also use dots, colons and slashes. The bound limits how long a
# text that only looks like a call is buffered.
NAME = Blank(r"[\w.:/\-]{1,128}")
KEY = Blank(r"\w{1,128}")
SPACE = Blank(r"\s{0,16}")
ARGUMENTS = Blank("")  # where the arguments begin


class Found(NamedTuple):
    name: str
    arguments: int  # where they begin


class Head:
    """A sequence of texts and blanks, of which ARGUMENTS says where the arguments begin."""

    def __init__(self, *parts: str):
        self._whole, self._beginning = re.compile("".join(map(_group, parts))), re.compile(beginning(*parts))

    def find(self, text: str, at: int) -> Found | bool:
        """The head at this position; else whether it may still become one."""
        whole = self._whole.match(text, at)
        if whole:
            return Found(whole["name"], whole.start("arguments"))
        return self._beginning.fullmatch(text, at) is not None


def beginning(*parts: str) -> str:
    """A pattern for any beginning of these: each character or blank may be missing together with all that follow."""
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
