"""Read the messages of `dovetail chat`: one line, or several."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

QUOTES = '"""'


@dataclass(frozen=True)
class Said:
    text: str
    is_command: bool = False


def read_said(read: Callable[[bool], str]) -> Said:
    """Read one message. `read(more)` gives a line, `more` where it continues a message; EOFError at the end.

    A line that ends with a backslash goes on in the next one. A line that begins with three quotes begins a message of
    all lines up to one that ends with three quotes. Lines that were pasted into a terminal come as one.
    """
    first = read(False).strip()
    if first.startswith(QUOTES):
        return Said(_quoted(first.removeprefix(QUOTES), read))
    lines = [first]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(_next(read, "").rstrip())
    text = "\n".join(lines).strip()
    return Said(text, is_command=len(lines) == 1 and text.startswith("/") and "\n" not in text)


def _quoted(first: str, read: Callable[[bool], str]) -> str:
    lines = [first]
    while not lines[-1].rstrip().endswith(QUOTES):
        lines.append(_next(read, QUOTES))
    return "\n".join(lines).rstrip().removesuffix(QUOTES).strip("\n")


def _next(read: Callable[[bool], str], at_end: str) -> str:
    """The next line; `at_end` where the input ends amid a message, which is then taken as it is."""
    try:
        return read(True)
    except EOFError:
        return at_end
