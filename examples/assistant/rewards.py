"""Rewards of the assistant's training: they read the calls of an episode and what the tools answered.

`meal` is the column with the truth: the portions of each food.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from examples.assistant.foods import FoodTable
from examples.assistant.plates import Meal

TABLE = FoodTable.read()

Episode = Sequence[dict[str, Any]]  # the messages after the prompt


def results(episode: Episode) -> list[str]:
    """Return the tools' answers to the log_meal calls of an episode."""
    ids = {
        call["id"]
        for message in episode
        for call in message.get("tool_calls") or ()
        if call["function"]["name"] == "log_meal"
    }
    return [message["content"] for message in episode if message.get("tool_call_id") in ids]


def logged(episode: Episode) -> list[tuple[str, float]]:
    """Return the foods and portions that an episode wrote into the diary."""
    entries = [json.loads(text) for text in results(episode) if not text.startswith("error")]
    portions = {food.name: food.portion_g for food in TABLE.foods.values()}
    return [(entry["food"], entry["grams"] / portions[entry["food"]]) for entry in entries]


def well_formed(completions: Sequence[Episode], **_: Any) -> list[float]:
    """Reward log_meal calls that the tool accepted: their share of all."""
    answers = [results(episode) for episode in completions]
    return [sum(not text.startswith("error") for text in each) / max(1, len(each)) for each in answers]


def right_food(completions: Sequence[Episode], meal: Sequence[Meal], **_: Any) -> list[float]:
    """Reward the right foods: F1 of the foods that were logged."""
    return [_f1([food for food, _ in logged(episode)], list(truth)) for episode, truth in _pairs(completions, meal)]


def right_amount(completions: Sequence[Episode], meal: Sequence[Meal], **_: Any) -> list[float]:
    """Reward the right amounts: F1 of the foods that were logged with their portions."""
    return [_f1(_rounded(logged(episode)), list(truth.items())) for episode, truth in _pairs(completions, meal)]


def success(completions: Sequence[Episode], meal: Sequence[Meal], **_: Any) -> list[float]:
    """Return 1 for an episode after which the diary has exactly the meal."""
    exact = [sorted(truth.items()) for truth in meal]
    return [float(sorted(_rounded(logged(each))) == truth) for each, truth in zip(completions, exact, strict=True)]


def _pairs(completions: Sequence[Episode], meals: Sequence[Meal]) -> list[tuple[Episode, Meal]]:
    return list(zip(completions, meals, strict=True))


def _rounded(entries: list[tuple[str, float]]) -> list[tuple[str, float]]:
    """Return the entries with portions to a hundredth: grams are stored to a tenth."""
    return [(food, round(portions, 2)) for food, portions in entries]


def _f1(found: list, truth: list) -> float:
    right = sum(each in found for each in truth)
    return 2 * right / (len(found) + len(truth)) if found or truth else 1.0
