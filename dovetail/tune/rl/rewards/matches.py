"""Rewards that look at the text: the same as an answer, of a pattern, of a length, of a form.

Each is 1 or 0 for a row, or None where the row's column is None: it has no answer to compare with.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dovetail.core.choice import one_of, require
from dovetail.core.errors import UserError
from dovetail.tune.rl.rewards.text import text_of

UNITS: dict[str, Callable[[str], int]] = {"characters": len, "words": lambda text: len(text.split())}


@dataclass(frozen=True)
class Exact:
    """The completion is the answer, or one of the answers where the column holds a list of them."""

    column: str = "answer"
    extract: str = ""  # a pattern: its last match is what counts, or that match's first group
    case: bool = True  # whether capitals count

    def __post_init__(self) -> None:
        compiled("extract", self.extract)

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.column,)

    def __call__(self, prompts: list, completions: list, **columns: list) -> list[float | None]:
        return [self._one(text_of(c), answer) for c, answer in zip(completions, columns[self.column], strict=True)]

    def _one(self, text: str, answer: Any) -> float | None:
        if answer is None:
            return None
        found = last_match(self.extract, text) if self.extract else text
        accepted = answer if isinstance(answer, list | tuple) else [answer]
        return float(found is not None and self._plain(found) in [self._plain(str(a)) for a in accepted])

    def _plain(self, text: str) -> str:
        text = " ".join(text.split())
        return text if self.case else text.casefold()


@dataclass(frozen=True)
class Regex:
    """The pattern occurs in the completion; with `full`, it is the whole of it. (?i), (?s) and the like go in front."""

    pattern: str
    full: bool = False

    def __post_init__(self) -> None:
        require(bool(self.pattern), "pattern must be a regular expression; got none")
        compiled("pattern", self.pattern)

    def __call__(self, prompts: list, completions: list, **columns: list) -> list[float]:
        pattern = re.compile(self.pattern)
        find = pattern.fullmatch if self.full else pattern.search
        return [float(find(text_of(c)) is not None) for c in completions]


@dataclass(frozen=True)
class Length:
    """The completion's length lies between `least` and `most`; beyond them the reward falls to 0 over `soft` units."""

    least: int = 0
    most: int | None = None
    unit: str = "tokens"
    soft: int = 0

    def __post_init__(self) -> None:
        one_of("unit", self.unit, ("tokens", *UNITS))
        require(self.least >= 0, f"least must be 0 or more; got {self.least}")
        require(self.soft >= 0, f"soft must be 0 or more; got {self.soft}")
        if self.most is not None:
            require(self.most >= self.least, f"most must be at least {self.least}, which is least; got {self.most}")

    @property
    def columns(self) -> tuple[str, ...]:
        return ("completion_ids",) if self.unit == "tokens" else ()

    def __call__(self, prompts: list, completions: list, **columns: list) -> list[float]:
        if self.unit == "tokens":
            return [self._one(len(ids)) for ids in columns["completion_ids"]]
        return [self._one(UNITS[self.unit](text_of(c))) for c in completions]

    def _one(self, length: int) -> float:
        beyond = max(self.least - length, 0 if self.most is None else length - self.most, 0)
        return 1.0 if not beyond else max(0.0, 1 - beyond / (self.soft + 1))


@dataclass(frozen=True)
class Format:
    """The completion is these tags in this order, each once, with text in each and nothing but space around them."""

    tags: tuple[str, ...] = ("think", "answer")

    def __post_init__(self) -> None:
        object.__setattr__(self, "tags", (self.tags,) if isinstance(self.tags, str) else tuple(self.tags))
        wrong = [tag for tag in self.tags if not re.fullmatch(r"[\w.:-]+", str(tag))] or not self.tags
        require(not wrong, f"tags must be names such as think and answer; got {list(self.tags)}")

    def __call__(self, prompts: list, completions: list, **columns: list) -> list[float]:
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


def last_match(pattern: str, text: str) -> str | None:
    """Its first group, or all of it where it has none."""
    found = list(re.finditer(pattern, text))
    if not found:
        return None
    return found[-1][1] if found[-1].re.groups else found[-1][0]


def compiled(field: str, pattern: str) -> None:
    """ValueError where it is no regular expression."""
    try:
        re.compile(pattern)
    except re.error as error:
        raise UserError(f"{field} must be a regular expression; {pattern!r} is none: {error}") from None
