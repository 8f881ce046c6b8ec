"""One text for every plain value, so that two processes can compare values without loading each other's objects.

    canonical([1.0, {"b", "a"}]) == canonical([True, frozenset("ab")])      # as these are equal in Python

The sandboxed process writes the text of the value that a call returned. Its parent writes the text of the expected
value and compares the two. It never parses the text that the sandboxed process wrote.
"""

from __future__ import annotations

import math
import numbers
from typing import Any

MAX_CHARACTERS = 2**20


def canonical(value: Any) -> str:
    """Return the text of a plain value: equal values have equal texts.

    Raises:
        TypeError: The value is another kind of object.
    """
    if value is None:
        return "None"
    if isinstance(value, str):
        return str.__repr__(value)
    if isinstance(value, bytes | bytearray):
        return repr(bytes(value))
    if isinstance(value, list):
        return "[" + ", ".join(map(canonical, value)) + "]"
    if isinstance(value, tuple):
        return "(" + ", ".join(map(canonical, value)) + ",)"
    if isinstance(value, set | frozenset):
        return "{" + ", ".join(sorted(map(canonical, value))) + ",}"
    if isinstance(value, dict):
        return "{" + ", ".join(sorted(f"{canonical(key)}: {canonical(of)}" for key, of in value.items())) + "}"
    return _number(value)


def _number(value: Any) -> str:
    """Return one text for 1, 1.0, True, 1+0j and the same number of another library."""
    if isinstance(value, int):
        return str(int(value)) if abs(value) < 2**64 else hex(value)  # Python refuses decimals of 4,300 digits
    if isinstance(value, float):
        return _number(int(value)) if math.isfinite(value) and value == int(value) else float.__repr__(value)
    if isinstance(value, numbers.Integral):
        return _number(int(value))
    if isinstance(value, complex) and value.imag == 0:
        return _number(value.real)
    if isinstance(value, complex):
        return complex.__repr__(value)
    if isinstance(value, numbers.Number) and float(value) == value:  # type: ignore[arg-type]
        return _number(float(value))  # type: ignore[arg-type]
    raise TypeError(f"a {type(value).__name__} cannot be compared outside of the sandbox")
