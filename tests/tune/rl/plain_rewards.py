"""Rewards of the small runs, in a file that imports nothing: each process that calls them imports it."""

from __future__ import annotations

from typing import Any


def low_tokens(prompts: list, completions: list, completion_ids: list, **columns: Any) -> list[float]:
    """The share of tokens of the vocabulary's first half."""
    return [sum(token < 160 for token in ids) / len(ids) for ids in completion_ids]


def of_messages(completions: list, **columns: Any) -> list[float]:
    """As TRL's examples have it: it raises where a completion is a string."""
    return [float(len(completion[0]["content"])) for completion in completions]


def failing(prompts: list, completions: list, answer: list[str], **columns: Any) -> list[float | None]:
    """It raises for every even answer, and has nothing to say of 1."""
    return [None if a == "1" else 1 / (int(a) % 2) for a in answer]
