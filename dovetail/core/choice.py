"""The checks that every settings class makes, with a sentence that starts with the field's name.

`core.recipe` puts the dotted path before that sentence, so `Optimizer(name="adam")` in Python and `optimizer.name=adam`
on the command line teach the same thing.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable

from dovetail.core.errors import UserError


def did_you_mean(given: object, known: Iterable[str]) -> str:
    """` Did you mean 'x'?` with a space before it, or nothing."""
    close = difflib.get_close_matches(str(given), list(known), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def one_of(field: str, given: object, choices: Iterable[str]) -> None:
    choices = tuple(choices)
    if given not in choices:
        named = ", ".join(repr(c) for c in choices)
        raise UserError(f"{field} must be one of {named}; got {given!r}.{did_you_mean(given, choices)}")


def not_negative(settings: object, *names: str) -> None:
    for name in names:
        value = getattr(settings, name)
        require(0 <= value < math.inf, f"{name} must be 0 or more; got {value}")


def require(holds: bool, sentence: str) -> None:
    """`sentence` starts with the field's name and says what was expected, what came, and what to do."""
    if not holds:
        raise UserError(sentence)
