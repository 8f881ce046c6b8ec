"""An agent learns to call its tool: a whole run, on a model that has seen calls and guesses in equal parts."""

from __future__ import annotations

import importlib
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dovetail.tune.rl.environment import ToolEnvironment
from dovetail.tune.rl.rl import rl
from dovetail.tune.rl.tools import Tool

pytestmark = [pytest.mark.slow, pytest.mark.thorough]
EXAMPLES = Path(__file__).parents[3] / "examples"
PRICES = {"apple": 2, "pear": 3, "melon": 7, "plum": 4}


def price(item: str) -> int:
    """Of an item; it changes."""
    return PRICES[item]


class Shop(ToolEnvironment):
    """The price of an item differs between prompts: only the tool knows it."""

    turns = 3

    @property
    def tools(self):
        return [self.price]

    def price(self, item: str) -> int:
        """The price of an item."""
        return self.columns["price"] if item == self.columns["item"] else 0

    def score(self, turn):
        return float(turn.content.strip() == str(self.columns["price"]))


def tasks() -> list[dict[str, Any]]:
    return [
        {"messages": [{"role": "user", "content": f"price of {item}"}], "item": item, "price": number}
        for item in PRICES for number in range(2, 8)
    ]  # fmt: skip


def lesson(task: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    talk, number = list(task["messages"]), task["price"]
    if chance.random() < 0.5:
        call = {"type": "function", "function": {"name": "price", "arguments": {"item": task["item"]}}}
        talk += [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": str(number)}]
    else:
        number = chance.randrange(2, 8)
    return {"messages": [*talk, {"role": "assistant", "content": str(number)}], "tools": [Tool.of(price).schema]}


def test_it_learns_to_call_its_tool(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    tiny, chance = importlib.import_module("tiny"), random.Random(0)
    lessons = [lesson(task, chance) for task in tasks() for _ in range(6)]
    model = tiny.imitate(tiny.tiny_model(tmp_path / "model", lessons), lessons, tmp_path / "sft", steps=140)
    ended = rl(
        model=model, data=tasks(), environment=Shop, steps=16, prompts=4, num_generations=8,
        max_prompt_length=48, max_completion_length=48,
        optimizer={"lr": 7e-4}, precision={"compute": "f32"}, schedule={"name": "constant"}, run_dir=tmp_path / "rl",
        engine={"max_num_seqs": 8}, show=False,
    )  # fmt: skip
    assert ended.code == 0
    lines = [json.loads(line) for line in (tmp_path / "rl/metrics.jsonl").read_text().splitlines()]
    rewards = [line["reward"] for line in lines]
    assert np.mean(rewards[:2]) < 0.65 and np.mean(rewards[-3:]) > 0.75, rewards
    assert all(line["gap_max"] < 1e-3 for line in lines)  # observations count in neither
    played = [json.loads(line) for line in (tmp_path / "rl/completions.jsonl").read_text().splitlines()]
    called = {step: np.mean([_calls(p) for p in played if p["step"] == step]) for step in (1, 16)}
    assert called[1] < 0.75 and called[16] > 0.85, called


def _calls(played: dict[str, Any]) -> bool:
    return any(message.get("tool_calls") for message in played["completion"])
