"""Lessons: chats that a model imitates before it learns from rewards. Half of the meals in them have a mistake."""

from __future__ import annotations

import json
import random
from typing import Any

from examples.assistant.episode import FOODS, new_tools, record
from examples.assistant.plates import MAX_PORTIONS, SHAPES, Meal, caption

KINDS = {"words": 0.34, "picture": 0.38, "caption": 0.22, "question": 0.06}  # shares of the parts of lessons
DESCRIBE = "What is where?"  # asks for a caption: the place of each food teaches the vision tower fastest
LOGGED = ("I logged it.", "It is in the diary.", "Done.")
FOUND = ("Here are the facts.", "This is what the table has.")
SUMMED = ("Here is your day.", "This is your day so far.")
SEARCHES = ("How much protein is in {}?", "How many calories does {} have?", "Look up {}")
DAYS = ("What did I eat today?", "How many calories did I eat today?", "Show my day")

Messages = list[dict[str, Any]]


def lesson(seed: int) -> dict[str, Any]:
    """Return one chat to imitate: one or two parts, each a meal in words or in a picture, a caption or a question."""
    chance = random.Random(f"lesson {seed}")
    tools = {tool.name: tool for tool in new_tools().tools}
    talk, images = [], []
    for part in range(2 if chance.random() < 0.2 else 1):
        kind = chance.choices(*zip(*KINDS.items(), strict=True))[0]
        row = record(2 * seed + part, picture=kind in ("picture", "caption"))
        if kind == "question":
            talk += question(chance, tools)
        elif kind == "caption":
            ask = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": DESCRIBE}]}
            talk += [ask, {"role": "assistant", "content": caption(row["meal"], 2 * seed + part)}]
        else:
            talk += row["messages"] + meal_exchange(row["meal"], chance, tools)
        images += row.get("images", ()) if kind != "question" else ()
    lesson = {"messages": talk, "tools": [tool.schema for tool in tools.values()]}
    return lesson | ({"images": images} if images else {})


def meal_exchange(meal: Meal, chance: random.Random, tools: dict[str, Any]) -> Messages:
    """Return the calls that log a meal, in half of the cases with a mistake, their results and an answer."""
    entries = list(meal.items())
    if chance.random() < 0.5:
        entries = mistaken(entries, chance)
    return exchange([("log_meal", {"food": food, "amount": count}) for food, count in entries], LOGGED, chance, tools)


def mistaken(entries: list[tuple[str, int]], chance: random.Random) -> list[tuple[str, int]]:
    """Return the entries of a meal with another food, another amount, or without one of two foods."""
    at = chance.randrange(len(entries))
    kind = chance.choice(("food", "amount", "missing") if len(entries) > 1 else ("food", "amount"))
    if kind == "missing":
        return entries[:at] + entries[at + 1 :]
    food, count = entries[at]
    others = [each for each in range(1, MAX_PORTIONS + 1) if each != count]
    wrong = (chance.choice(sorted(SHAPES)), count) if kind == "food" else (food, chance.choice(others))
    return [*entries[:at], wrong, *entries[at + 1 :]]


def question(chance: random.Random, tools: dict[str, Any]) -> Messages:
    """Return a question about a food or the day, the call that answers it, its result and an answer."""
    if chance.random() < 0.5:
        food = chance.choice(FOODS)
        asked, call, answers = chance.choice(SEARCHES).format(food), ("search_food", {"query": food}), FOUND
    else:
        asked, call, answers = chance.choice(DAYS), ("day_summary", {}), SUMMED
    return [{"role": "user", "content": asked}, *exchange([call], answers, chance, tools)]


def exchange(
    calls: list[tuple[str, dict[str, Any]]], answers: tuple[str, ...], chance: random.Random, tools: dict[str, Any]
) -> Messages:
    """Return an assistant's calls, their results and its answer."""
    made = [{"type": "function", "function": {"name": name, "arguments": arguments}} for name, arguments in calls]
    results = [{"role": "tool", "content": tools[name](json.dumps(arguments))} for name, arguments in calls]
    return [
        {"role": "assistant", "content": "", "tool_calls": made}, *results,
        {"role": "assistant", "content": chance.choice(answers)},
    ]  # fmt: skip
