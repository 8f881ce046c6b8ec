"""Rewards of the small runs. The file imports nothing, because every worker process imports it."""

from __future__ import annotations

from typing import Any


def low_tokens(prompts: list, completions: list, completion_ids: list, **columns: Any) -> list[float]:
    """Return the share of tokens from the first half of the vocabulary."""
    return [sum(token < 160 for token in ids) / len(ids) for ids in completion_ids]


def of_messages(completions: list, **columns: Any) -> list[float]:
    """Return the length of the first message, as TRL's examples do; it raises if a completion is text."""
    return [float(len(completion[0]["content"])) for completion in completions]


def failing(prompts: list, completions: list, answer: list[str], **columns: Any) -> list[float | None]:
    """Raise for every even answer, and return None for 1."""
    return [None if a == "1" else 1 / (int(a) % 2) for a in answer]
