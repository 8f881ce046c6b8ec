"""Checks for settings classes: each raises a RecipeError that carries the key's name in `param`.

A message starts with the key's name. `core.recipe` puts the section's path before the message and before `param`, so
`Optimizer(name="adam")` in Python and `optimizer.name=adam` on the command line raise the same error.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable

from dovetail.core.errors import RecipeError


def did_you_mean(given: object, known: Iterable[str]) -> str:
    """Return ` Did you mean 'x'?` for the closest of the known names, or nothing."""
    close = difflib.get_close_matches(str(given), list(known), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def one_of(key: str, given: object, choices: Iterable[str]) -> None:
    """Require that the value of `key` is one of the choices."""
    choices = tuple(choices)
    if given not in choices:
        named = ", ".join(repr(c) for c in choices)
        raise RecipeError(f"{key} must be one of {named}; got {given!r}.{did_you_mean(given, choices)}", param=key)


def not_negative(settings: object, *keys: str) -> None:
    """Require that the values of these keys are finite and 0 or more."""
    for key in keys:
        value = getattr(settings, key)
        require(0 <= value < math.inf, f"{key} must be 0 or more; got {value}", param=key)


def require(holds: bool, message: str, *, param: str | None = None) -> None:
    """Raise a RecipeError with `message` unless the condition holds.

    Args:
        holds: The condition.
        message: It starts with the key's name: "`X` must be ..., got ...: do ...".
        param: The key at fault.
    """
    if not holds:
        raise RecipeError(message, param=param)
