"""Read the arguments of a tool call that max_tokens has cut off: the beginning of a JSON object."""

from __future__ import annotations

import json
import re
from typing import Any

_CLOSE = {"{": "}", "[": "]"}
_STRING = r'"(?:[^"\\]|\\.)*'
_VALUE = rf"(?:-?[0-9.]*(?:[eE][+-]?[0-9]*)?|t(?:r(?:u)?)?|f(?:a(?:l(?:s)?)?)?|n(?:u(?:l)?)?|{_STRING}\\?)"
_BEGUN = re.compile(rf'\s*(?:{_VALUE}|{_STRING}"\s*(?::\s*{_VALUE})?)', re.DOTALL)  # a value, or a key and its value


def read_cut_off(text: str) -> dict[str, Any] | None:
    """Return the JSON object that `text` begins, or None if it is not the beginning of an object.

    An incomplete last value is left out, except a string, which is closed.
    """
    at, open_, in_string, inner = _scan(text)
    found = _read(text + '"' * in_string + _closed(inner))
    if found is None and _BEGUN.fullmatch(text, at):
        found = _read(text[:at].rstrip().removesuffix(",") + _closed(open_))
    return found


def _read(text: str) -> dict[str, Any] | None:
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
