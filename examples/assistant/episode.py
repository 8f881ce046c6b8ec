"""Define an episode of training: the user describes or shows one meal, and the tools write to a new diary."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from dovetail.io.tool_formats.events import ToolCall
from dovetail.tune.rl.environment import ToolEnvironment
from dovetail.tune.rl.tools import call_tools
from examples.assistant.database import connect
from examples.assistant.diary import Diary
from examples.assistant.plates import describe, random_meal
from examples.assistant.rewards import TABLE, success
from examples.assistant.tools import FoodTools
from examples.assistant.turn import SYSTEM

MAX_TURNS = 3  # two with calls, and the answer

Messages = list[dict[str, Any]]
Ask = Callable[[Messages, list[dict[str, Any]]], dict[str, Any]]  # messages and tools to the model's message


def new_tools() -> FoodTools:
    """Return the app's tools on an empty diary in memory."""
    return FoodTools(Diary(connect(":memory:")), TABLE)


class MealEnvironment(ToolEnvironment):
    """Run the calls of an episode; rewards.py scores them."""

    turns = MAX_TURNS

    def __init__(self, columns: Mapping[str, Any], random: np.random.Generator) -> None:
        super().__init__(columns, random)
        self.tools = new_tools().functions


def record(seed: int) -> dict[str, Any]:
    """Return a meal as a row of training data: the prompt as the app writes it, and the truth."""
    meal = random_meal(seed)
    day = f"2026-{seed % 12 + 1:02}-{seed % 28 + 1:02}"
    prompt = [("system", SYSTEM.format(today=day)), ("user", describe(meal, seed))]
    return {"messages": [{"role": role, "content": text} for role, text in prompt], "meal": meal}


def play(ask: Ask, prompt: Messages) -> Messages:
    """Return the messages of one episode after its prompt."""
    tools, episode = new_tools().tools, []
    for _ in range(MAX_TURNS):
        message = ask([*prompt, *episode], [tool.schema for tool in tools])
        episode.append(message)
        calls = [
            ToolCall(call["id"], call["function"]["name"], call["function"]["arguments"], True)
            for call in message.get("tool_calls") or ()
        ]
        if not calls:
            break
        episode += call_tools(calls, tools)
    return episode


def success_rate(ask: Ask, records: Sequence[Mapping[str, Any]]) -> float:
    """Return the share of meals after which the diary is exactly right."""
    episodes = [play(ask, each["messages"]) for each in records]
    return sum(success(episodes, [each["meal"] for each in records])) / len(records)
