"""Teach a tiny model to keep the diary: python -m examples.assistant.train [--steps 30]

Examples show it the form, with a wrong food or amount in half of them, and so it makes the same mistakes. Then rewards
for well-formed calls, right foods and right amounts correct it. `make demo` serves the model that this writes.
"""

from __future__ import annotations

import argparse
import random
import shutil
from pathlib import Path
from typing import Any

import dovetail as dt
from examples.assistant.episode import MealEnvironment, new_tools, record
from examples.assistant.plates import SHAPES, Meal
from examples.assistant.rewards import TABLE, right_amount, right_food, success, well_formed
from examples.tiny import first_and_last, imitate, tiny_model

ANSWERS = ("I logged it.", "It is in the diary.", "Done.")


def lesson(seed: int) -> dict[str, Any]:
    """Return one chat to imitate, sometimes after an earlier exchange."""
    row, chance = record(seed), random.Random(seed)
    talk = row["messages"] + exchange(row["meal"], chance)
    if chance.random() < 0.3:
        later = record(seed + 10**6)
        talk += later["messages"][1:] + exchange(later["meal"], chance)
    return {"messages": talk, "tools": [tool.schema for tool in new_tools().tools]}


def exchange(meal: Meal, chance: random.Random) -> list[dict[str, Any]]:
    """Return calls that log a meal, half of them with a mistake, their results and an answer."""
    entries = [mistaken(food, count, chance) for food, count in meal.items()]
    calls = [
        {"type": "function", "function": {"name": "log_meal", "arguments": {"food": food, "amount": count}}}
        for food, count in entries
    ]
    tools = {tool.name: tool for tool in new_tools().tools}
    results = [
        {"role": "tool", "content": tools["log_meal"](f'{{"food": "{food}", "amount": {count}}}')}
        for food, count in entries
    ]
    return [
        {"role": "assistant", "content": "", "tool_calls": calls}, *results,
        {"role": "assistant", "content": chance.choice(ANSWERS)},
    ]  # fmt: skip


def mistaken(food: str, count: int, chance: random.Random) -> tuple[str, int]:
    """Return a food and its portions, with a mistake in one of three."""
    if chance.random() < 0.33:
        return chance.choice([(chance.choice(sorted(SHAPES)), count), (food, chance.randint(1, 3))])
    return food, count


def main() -> None:
    """Train, and copy the model to where `make demo` finds it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--run-dir", type=Path, default=Path("runs/assistant"))
    args = parser.parse_args()
    assert all(TABLE.get(food) for food in SHAPES)
    lessons = [lesson(seed) for seed in range(1000, 1800)]
    model = tiny_model(args.run_dir / "random", lessons, context=4096)
    model = imitate(model, lessons, args.run_dir / "sft", steps=300, length=512)
    learned = dt.rl(
        model=model, data=[record(seed) for seed in range(400)], environment=MealEnvironment,
        rewards=[well_formed, right_food, right_amount, success], steps=args.steps, prompts=8, num_generations=8,
        max_prompt_length=256, max_completion_length=224, optimizer={"lr": 4e-4}, precision={"compute": "f32"},
        schedule={"name": "constant"}, engine={"max_num_seqs": 32}, checkpoint={"export_hf": args.steps},
        run_dir=args.run_dir / "rl",
    )  # fmt: skip
    shutil.copytree(learned.folder / f"export/step_{args.steps}", args.run_dir / "model", dirs_exist_ok=True)
    first, last = first_and_last(learned.folder)
    print(f"reward of 4: {first:.2f} at first, {last:.2f} at last")


if __name__ == "__main__":
    main()
