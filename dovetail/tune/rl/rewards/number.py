r"""A reward for the right number: the one in the last \boxed{}, or after the last ####, or the last in the text."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from decimal import Decimal, localcontext
from typing import Any

from dovetail.core.choice import require
from dovetail.tune.rl.rewards.text import text_of

_PLAIN = r"(?:\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)"
_POWER = r"[+-]?\d{1,4}(?!\d)"
_TIMES_TEN = rf"(?:[eE]{_POWER}|\s*(?:\\times|\\cdot|×|\*)\s*10\s*(?:\^|\*\*)\s*\{{?\s*{_POWER}\s*\}}?)"
# A minus after a digit or a letter is between two numbers or words: 10-3, GPT-4.
NUMBER = re.compile(
    rf"""(?P<sign>(?<![\w)}}.])-\s?)? [$€£]?
    (?: \\[dt]?frac\s*\{{\s*(?P<up>-?{_PLAIN})\s*\}}\s*\{{\s*(?P<low>-?{_PLAIN})\s*\}}
      | (?P<top>{_PLAIN})\s?/\s?(?P<bottom>{_PLAIN})
      | (?P<plain>{_PLAIN})(?P<ten>{_TIMES_TEN})? )
    (?P<percent>\s?\\?%)?""",
    re.VERBOSE,
)
SAME_TEXT = str.maketrans({"−": "-", "–": "-", "\u00a0": " ", "\u202f": " "})
LONGEST = 1_000  # digits of a number that are read at most


@dataclass(frozen=True)
class Number:
    """The completion's number is the answer's, within `tolerance` of it (relative above 1, absolute below).

    Commas, fractions (3/4, \\frac{3}{4}), powers of ten, signs of money and percent are read. Where only one of the two
    has a percent sign, 50% is both 50 and 0.5. No number in the completion is 0; none in the answer is None.
    """

    column: str = "answer"
    tolerance: float = 1e-6

    def __post_init__(self) -> None:
        require(0 <= self.tolerance < math.inf, f"tolerance must be 0 or more; got {self.tolerance}")

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.column,)

    def __call__(self, prompts: list, completions: list, **columns: list) -> list[float | None]:
        return [self._one(text_of(c), answer) for c, answer in zip(completions, columns[self.column], strict=True)]

    def _one(self, text: str, answer: Any) -> float | None:
        wanted = None if answer is None else number_of(str(answer))
        if wanted is None:
            return None
        found = number_of(text)
        return float(found is not None and self._same(found, wanted))

    def _same(self, found: tuple[Decimal, bool], wanted: tuple[Decimal, bool]) -> bool:
        (a, a_percent), (b, b_percent) = found, wanted
        if a_percent == b_percent:
            return self._near(a, b)
        return self._near(a, b) or (self._near(a / 100, b) if a_percent else self._near(a, b / 100))

    def _near(self, a: Decimal, b: Decimal) -> bool:
        return abs(a - b) <= Decimal(self.tolerance) * max(Decimal(1), abs(b))


def number_of(text: str) -> tuple[Decimal, bool] | None:
    """The number that a text comes to, and whether it is in percent; None where it has none."""
    text = _where(text.translate(SAME_TEXT))
    every = list(NUMBER.finditer(text))
    if not every or len(every[-1][0]) > LONGEST:
        return None
    found = every[-1]
    with localcontext() as context:
        context.prec = LONGEST
        try:
            value = _value(found)
        except ArithmeticError:  # something over 0
            return None
    return (-value if found["sign"] else value), found["percent"] is not None


def _where(text: str) -> str:
    """The part of the text in which the answer stands."""
    boxed = _boxed(text)
    if boxed is not None:
        return boxed
    return text.rpartition("####")[2]


def _boxed(text: str) -> str | None:
    r"""What is inside the last \boxed{}; None where there is none, or it does not close."""
    at = text.rfind("\\boxed{")
    if at < 0:
        return None
    start, depth = at + len("\\boxed{"), 1
    for i in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if not depth:
            return text[start:i]
    return None


def _value(found: re.Match[str]) -> Decimal:
    for above, below in (("up", "low"), ("top", "bottom")):
        if found[above] is not None:
            return _decimal(found[above]) / _decimal(found[below])
    value = _decimal(found["plain"])
    if found["ten"]:
        exponent = re.findall(r"[+-]?\d+", found["ten"])[-1]
        value = value.scaleb(int(exponent))
    return value


def _decimal(digits: str) -> Decimal:
    return Decimal(digits.replace(",", ""))
