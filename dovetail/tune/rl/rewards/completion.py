"""A completion: the text that a reward reads in it, and the scores that rewards give it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dovetail.core.choice import require

OPENS = re.compile(r"[ \t]*(`{3,}|~{3,})[ \t]*([\w+-]*)")
CLOSES = re.compile(r"[ \t]*(`{3,}|~{3,})\s*$")


def text_of(completion: Any) -> str:
    """Return a string as it is, or the content of the last assistant message."""
    if isinstance(completion, str):
        return completion
    messages = [m for m in completion if m.get("role") == "assistant"] or list(completion)
    return _content(messages[-1].get("content")) if messages else ""


def transcript_of(prompt: Any) -> str:
    """Return a string as it is, or messages as text with the role before each."""
    if isinstance(prompt, str):
        return prompt
    return "\n\n".join(f"{m.get('role', '')}: {_content(m.get('content'))}" for m in prompt)


def block_of(text: str, *languages: str) -> str:
    """Return the last fenced block in one of these languages, else the last block, else the whole text."""
    blocks = _blocks(text)
    chosen = [body for language, body in blocks if language in languages] or [body for _, body in blocks]
    return chosen[-1] if chosen else text


def _blocks(text: str) -> list[tuple[str, str]]:
    """Return language and body of each fenced block that is closed, in time proportional to the text.

    A search for the end of each block in turn, as one regular expression does, takes minutes for a completion that
    opens thousands of blocks and closes none.
    """
    lines = text.split("\n")
    ends: dict[str, list[int]] = {}  # fence -> the lines that close it, the last first
    for number in range(len(lines) - 1, -1, -1):
        if closes := CLOSES.match(lines[number]):
            ends.setdefault(closes[1], []).append(number)
    blocks, number = [], 0
    while number < len(lines):
        opens, number = OPENS.match(lines[number]), number + 1
        later = ends.get(opens[1], []) if opens else []
        while later and later[-1] < number:
            later.pop()
        if opens and later:
            blocks.append((opens[2].lower(), "".join(line + "\n" for line in lines[number : later[-1]])))
            number = later[-1] + 1
    return blocks


def _content(content: Any) -> str:
    """Return the text of a message's content: a string, or a list of parts."""
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content if part.get("type", "text") == "text")
    return content or ""


def last_match(pattern: str, text: str) -> str | None:
    """Return the first group of the pattern's last match, or the whole match if the pattern has no group."""
    matches = list(re.finditer(pattern, text))
    if not matches:
        return None
    return matches[-1][1] if matches[-1].re.groups else matches[-1][0]


def require_pattern(key: str, pattern: str) -> None:
    """Require that the value of `key` is a regular expression."""
    try:
        re.compile(pattern)
    except re.error as error:
        require(False, f"{key} must be a regular expression; got {pattern!r}: {error}", param=key)


# --- scores -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NoReward:
    """Returned by a reward function in place of a number: None, with the reason.

    Attributes:
        kind: A word by which failures are counted.
        message: The reason.
        trace: The traceback, if the reason is an exception.
    """

    kind: str
    message: str
    trace: str = ""


@dataclass(frozen=True)
class Problem:
    """A failure of a reward, with the number of completions that have no reward because of it.

    Attributes:
        reward: The reward's name.
        kind: raised, time, died, load, column, length, type, nan; or the kind of a NoReward.
        message: The reason.
        count: Completions.
        trace: The first traceback.
    """

    reward: str
    kind: str
    message: str
    count: int = 1
    trace: str = ""


@dataclass(frozen=True)
class Scored:
    """The rewards of one completion.

    Attributes:
        values: For each reward its value; None: it does not apply, or it failed.
        total: The weighted sum of the values; None if all are None.
        errors: Why a reward failed, by its name.
    """

    values: dict[str, float | None]
    total: float | None
    errors: dict[str, str] = field(default_factory=dict)

    @classmethod
    def weighted(cls, values: Mapping[str, float | None], weights: dict[str, float], errors: dict[str, str]) -> Scored:
        """Return the scores with their weighted sum."""
        weighted = [weights[name] * value for name, value in values.items() if value is not None]
        return cls(dict(values), sum(weighted) if weighted else None, errors)
