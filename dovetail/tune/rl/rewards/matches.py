"""Rewards that compare the text of a completion: with an answer, a number, a pattern, a length, a format.

Each is 1 or 0 for a completion, or None where the row's column is None: there is no answer to compare with.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal, localcontext
from typing import Any

from dovetail.core.choice import not_negative, one_of, require
from dovetail.tune.rl.rewards.completion import last_match, require_pattern, text_of

UNITS: dict[str, Callable[[str], int]] = {"characters": len, "words": lambda text: len(text.split())}


@dataclass(frozen=True)
class ExactReward:
    """Give 1 if the completion is the answer, or one of the answers if the column holds a list.

    Attributes:
        column: The column that holds the answer.
        extract: A pattern: its last match is compared, or the first group of that match.
        case: Whether capitals count.
    """

    column: str = "answer"
    extract: str = ""
    case: bool = True

    def __post_init__(self) -> None:
        require_pattern("extract", self.extract)

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that it reads."""
        return (self.column,)

    def __call__(self, prompts: list, completions: list, **columns: list) -> list[float | None]:
        """Return the reward of each completion."""
        return [self._score(text_of(c), answer) for c, answer in zip(completions, columns[self.column], strict=True)]

    def _score(self, text: str, answer: Any) -> float | None:
        if answer is None:
            return None
        found = last_match(self.extract, text) if self.extract else text
        accepted = answer if isinstance(answer, list | tuple) else [answer]
        return float(found is not None and self._plain(found) in [self._plain(str(a)) for a in accepted])

    def _plain(self, text: str) -> str:
        text = " ".join(text.split())
        return text if self.case else text.casefold()


@dataclass(frozen=True)
class RegexReward:
    """Give 1 if the pattern occurs in the completion, or with `full` matches all of it. Flags such as (?i) go first."""

    pattern: str
    full: bool = False

    def __post_init__(self) -> None:
        require(bool(self.pattern), "pattern must be a regular expression; got none", param="pattern")
        require_pattern("pattern", self.pattern)

    def __call__(self, prompts: list, completions: list, **columns: list) -> list[float]:
        """Return the reward of each completion."""
        pattern = re.compile(self.pattern)
        find = pattern.fullmatch if self.full else pattern.search
        return [float(find(text_of(c)) is not None) for c in completions]


@dataclass(frozen=True)
class LengthReward:
    """Give 1 if the length is from `least` to `most`; beyond, the reward falls to 0 over `soft` units.

    Attributes:
        least: The shortest length with the full reward.
        most: The longest length with the full reward; None: any.
        unit: tokens, characters or words.
        soft: Units over which the reward falls to 0.
    """

    least: int = 0
    most: int | None = None
    unit: str = "tokens"
    soft: int = 0

    def __post_init__(self) -> None:
        one_of("unit", self.unit, ("tokens", *UNITS))
        not_negative(self, "least", "soft")
        if self.most is not None:
            require(self.most >= self.least, f"most must be at least least={self.least}; got {self.most}", param="most")

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that it reads."""
        return ("completion_ids",) if self.unit == "tokens" else ()

    def __call__(self, prompts: list, completions: list, **columns: list) -> list[float]:
        """Return the reward of each completion."""
        if self.unit == "tokens":
            return [self._score(len(ids)) for ids in columns["completion_ids"]]
        return [self._score(UNITS[self.unit](text_of(c))) for c in completions]

    def _score(self, length: int) -> float:
        beyond = max(self.least - length, 0 if self.most is None else length - self.most, 0)
        return 1.0 if not beyond else max(0.0, 1 - beyond / (self.soft + 1))


@dataclass(frozen=True)
class FormatReward:
    """Give 1 if the completion consists of these tags in this order, each once and with text in it."""

    tags: tuple[str, ...] | str = ("think", "answer")

    def __post_init__(self) -> None:
        object.__setattr__(self, "tags", (self.tags,) if isinstance(self.tags, str) else tuple(self.tags))
        wrong = [tag for tag in self.tags if not re.fullmatch(r"[\w.:-]+", str(tag))] or not self.tags
        require(not wrong, f"tags must be names such as think and answer; got {list(self.tags)}", param="tags")

    def __call__(self, prompts: list, completions: list, **columns: list) -> list[float]:
        """Return the reward of each completion."""
        return [float(self._fits(text_of(c))) for c in completions]

    def _fits(self, text: str) -> bool:
        rest = text.strip()
        for tag in self.tags:
            opened, closed = f"<{tag}>", f"</{tag}>"
            if text.count(opened) != 1 or text.count(closed) != 1 or not rest.startswith(opened):
                return False
            body, _, rest = rest.removeprefix(opened).partition(closed)
            rest = rest.lstrip()
            if not body.strip():
                return False
        return not rest


# --- numbers ----------------------------------------------------------------------------------------------------------

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
MAX_DIGITS = 1_000  # of a number that is read


@dataclass(frozen=True)
class NumberReward:
    r"""Give 1 if the number in the completion is the answer's, within `tolerance` (relative above 1, absolute below).

    It is the number in the last \boxed{}, or after the last ####, or the last in the text. Commas, fractions (3/4,
    \frac{3}{4}), powers of ten, currency and percent signs are read. Where only one of the two has a percent sign, 50%
    equals both 50 and 0.5. A completion without a number gets 0; an answer without one gives None.
    """

    column: str = "answer"
    tolerance: float = 1e-6

    def __post_init__(self) -> None:
        not_negative(self, "tolerance")

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that it reads."""
        return (self.column,)

    def __call__(self, prompts: list, completions: list, **columns: list) -> list[float | None]:
        """Return the reward of each completion."""
        return [self._score(text_of(c), answer) for c, answer in zip(completions, columns[self.column], strict=True)]

    def _score(self, text: str, answer: Any) -> float | None:
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
    """Return the number that a text ends with, and whether it is in percent; None if it has no number."""
    text = _answer_part(text.translate(SAME_TEXT))
    matches = list(NUMBER.finditer(text))
    if not matches or len(matches[-1][0]) > MAX_DIGITS:
        return None
    match = matches[-1]
    with localcontext() as context:
        context.prec = MAX_DIGITS
        try:
            value = _value(match)
        except ArithmeticError:  # division by 0
            return None
    return (-value if match["sign"] else value), match["percent"] is not None


def _answer_part(text: str) -> str:
    """Return the part of the text that holds the answer."""
    boxed = _boxed(text)
    if boxed is not None:
        return boxed
    return text.rpartition("####")[2]


def _boxed(text: str) -> str | None:
    r"""Return the content of the last \boxed{}; None if there is none, or it does not close."""
    at = text.rfind("\\boxed{")
    if at < 0:
        return None
    start, depth = at + len("\\boxed{"), 1
    for i in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if not depth:
            return text[start:i]
    return None


def _value(match: re.Match[str]) -> Decimal:
    for above, below in (("up", "low"), ("top", "bottom")):
        if match[above] is not None:
            return _decimal(match[above]) / _decimal(match[below])
    value = _decimal(match["plain"])
    if match["ten"]:
        exponent = re.findall(r"[+-]?\d+", match["ten"])[-1]
        value = value.scaleb(int(exponent))
    return value


def _decimal(digits: str) -> Decimal:
    return Decimal(digits.replace(",", ""))
