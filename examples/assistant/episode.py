"""Define an episode of training: the user describes or shows one meal, and the tools write to a new diary."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from dovetail.io.tool_formats.events import ToolCall
from dovetail.tune.rl.environment import ToolEnvironment
from dovetail.tune.rl.tools import call_tools
from examples.assistant.database import connect
from examples.assistant.diary import Diary
from examples.assistant.plates import COUNTED, NAMES, SHAPES, describe, photo, random_meal
from examples.assistant.rewards import TABLE, success
from examples.assistant.tools import FoodTools

MAX_TURNS = 3  # two with calls, and the answer
FOODS = sorted({*NAMES, *COUNTED, *SHAPES})  # of meals in words
CAPTIONS = ("", "", "My lunch", "I had this", "Please log this")  # of pictures

Messages = list[dict[str, Any]]
# From the messages of several episodes and the tools to the model's next message in each.
Ask = Callable[[list[Messages], list[dict[str, Any]]], list[dict[str, Any]]]


def new_tools() -> FoodTools:
    """Return the app's tools on an empty diary in memory."""
    return FoodTools(Diary(connect(":memory:")), TABLE)


class MealEnvironment(ToolEnvironment):
    """Run the calls of an episode; rewards.py scores them."""

    turns = MAX_TURNS

    def __init__(self, columns: Mapping[str, Any], random: np.random.Generator) -> None:
        super().__init__(columns, random)
        self.tools = new_tools().functions


def record(seed: int, picture: bool = False) -> dict[str, Any]:
    """Return a meal as a row of training data: the user's message as the app writes it, and the truth.

    Args:
        seed: Everything depends on it.
        picture: Whether the user sends a picture of the meal in place of a description.
    """
    if not picture:
        meal = random_meal(seed, FOODS)
        return {"messages": [{"role": "user", "content": describe(meal, seed)}], "meal": meal}
    meal, text = dict(sorted(random_meal(seed).items())), random.Random(f"caption {seed}").choice(CAPTIONS)
    parts = [{"type": "image"}, *([{"type": "text", "text": text}] if text else [])]
    return {"messages": [{"role": "user", "content": parts}], "images": [photo(meal, seed)], "meal": meal}


def play(ask: Ask, prompts: Sequence[Messages]) -> list[Messages]:
    """Return the messages of an episode for each prompt, after the prompt."""
    tools, episodes = [new_tools().tools for _ in prompts], [[] for _ in prompts]
    going = list(range(len(prompts)))
    for _ in range(MAX_TURNS):
        said = ask([[*prompts[i], *episodes[i]] for i in going], [tool.schema for tool in tools[0]])
        for i, message in zip(going, said, strict=True):
            episodes[i] += [message, *call_tools(_calls(message), tools[i])]
        going = [i for i, message in zip(going, said, strict=True) if message.get("tool_calls")]
        if not going:
            break
    return episodes


def _calls(message: dict[str, Any]) -> list[ToolCall]:
    return [
        ToolCall(call["id"], call["function"]["name"], json.dumps(call["function"]["arguments"]), True)
        for call in message.get("tool_calls") or ()
    ]


def success_rate(ask: Ask, records: Sequence[Mapping[str, Any]]) -> float:
    """Return the share of meals after which the diary is exactly right."""
    episodes = play(ask, [place_images(each["messages"], each.get("images", ())) for each in records])
    return sum(success(episodes, [each["meal"] for each in records])) / len(records)


def place_images(messages: Messages, images: Sequence[bytes]) -> Messages:
    """Return messages with the images in their parts, as `dt.LLM.chat` takes them."""
    left = iter(images)
    return [
        message if isinstance(message["content"], str)
        else message | {"content": [part | {"image": next(left)} if part["type"] == "image" else part
                                    for part in message["content"]]}
        for message in messages
    ]  # fmt: skip
