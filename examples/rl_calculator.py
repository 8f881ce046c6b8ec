"""Teach an agent to look prices up and to calculate: python examples/rl_calculator.py [--steps 24]

A tiny model first sees chats in which half of the questions are answered by tools and half by a guess, and so it does
the same. Then rewards for right answers teach it to use its tools. Some minutes on two cores.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from pathlib import Path

from tiny import first_and_last, imitate, tiny_model

import dovetail as dt
from dovetail.tune.rl.environment import ToolEnvironment
from dovetail.tune.rl.tools import Tool

PRICES = {"apple": 2, "pear": 3, "melon": 7, "plum": 4}


def lookup(item: str) -> int:
    """The price of an item."""
    return PRICES[item]


def multiply(a: int, b: int) -> int:
    """a times b."""
    return a * b


class Shop(ToolEnvironment):
    tools = (lookup, multiply)
    turns = 4

    def score(self, turn) -> float:
        return float(turn.content.strip() == str(self.columns["answer"]))


def questions() -> list[dict]:
    return [
        {"messages": [{"role": "user", "content": f"What do {n} of {item} cost?"}], "answer": n * price,
         "n": n, "item": item}
        for item, price in PRICES.items() for n in range(2, 7)
    ]  # fmt: skip


def call(name: str, **arguments) -> dict:
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": name, "arguments": arguments}}],
    }


def lesson(question: dict, chance: random.Random) -> dict:
    """One chat to imitate: by tools, or a guess."""
    n, price, talk = question["n"], PRICES[question["item"]], list(question["messages"])
    if chance.random() < 0.5:
        talk += [
            call("lookup", item=question["item"]), {"role": "tool", "content": str(price)},
            call("multiply", a=n, b=price), {"role": "tool", "content": str(n * price)},
            {"role": "assistant", "content": str(n * price)},
        ]  # fmt: skip
    else:
        talk.append({"role": "assistant", "content": str(chance.randrange(2, 7) * chance.choice([*PRICES.values()]))})
    return {"messages": talk, "tools": [Tool.of(each).schema for each in Shop.tools]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--run-dir", default="")
    args = parser.parse_args()
    folder, chance = Path(args.run_dir or tempfile.mkdtemp()), random.Random(0)
    lessons = [lesson(question, chance) for question in questions() for _ in range(8)]
    model = imitate(tiny_model(folder / "model", lessons), lessons, folder / "sft", steps=150)
    learned = dt.rl(
        model=model, data=questions(), environment=Shop, steps=args.steps, prompts=8, num_generations=8,
        max_prompt_length=32, max_completion_length=96, optimizer={"lr": 4e-4}, precision={"compute": "f32"},
        schedule={"name": "constant"}, engine={"max_num_seqs": 16}, run_dir=folder / "rl",
    )  # fmt: skip
    first, last = first_and_last(learned.folder)
    print(f"right answers: {first:.0%} at first, {last:.0%} at last")


if __name__ == "__main__":
    main()
