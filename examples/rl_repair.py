"""Teach an agent to repair a function in a loop with its test: python examples/rl_repair.py [--steps 50]

A tiny model first sees repairs at random, from which it knows how one is written. Then its repairs are run, in the
sandbox; one that fails is answered with what came out, and the sooner it is right the more it is worth. Some minutes on
two cores.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from functools import cache
from pathlib import Path

from tiny import first_and_last, imitate, tiny_model

import dovetail as dt
from dovetail.tune.rl.environment import Environment, Step
from dovetail.tune.rl.rewards.sandbox import Limits, run_python

SIGNS = ("+", "-", "*")
LESS = 0.3  # that each further try takes


@cache
def result(body: str, x: int) -> str:
    """What f(x) prints with this body, or why it prints nothing. The same repair is run once."""
    ran = run_python(f"def f(x):\n    {body}\nprint(f({x}))", limits=Limits(isolation="any"))
    return ran.stdout.strip() if ran.ok else ran.error.split(":")[0]


class Repair(Environment):
    turns = 3

    def reset(self, random) -> None:
        self.tries = 0

    def step(self, turn) -> Step:
        self.tries += 1
        x, wanted = self.columns["x"], self.columns["wanted"]
        found = result(turn.content.strip(), x)
        if found == str(wanted):
            return Step(reward=1.0 - LESS * (self.tries - 1), done=True)
        return Step(f"f({x}) gives {found}")


def tasks() -> list[dict]:
    """Of each a wrong sign. No other sign gives what is wanted."""
    found = []
    for sign in SIGNS:
        for wrong in SIGNS:
            for number in range(3, 7):
                x = number + 2
                wanted = eval(f"{x} {sign} {number}")
                asked = f"return x {wrong} {number}\nf({x}) should be {wanted}"
                task = {"messages": [{"role": "user", "content": asked}], "x": x, "number": number, "wanted": wanted}
                found += [task] if wrong != sign else []
    return found


def lesson(task: dict, chance: random.Random) -> dict:
    """Two repairs, each with a sign at random, and half of them with a number at random."""
    one, two = (
        f"return x {chance.choice(SIGNS)} {chance.choice([task['number'], chance.randrange(3, 7)])}" for _ in range(2)
    )
    said = f"f({task['x']}) gives {result(one, task['x'])}"
    talk = [("assistant", one), ("user", said), ("assistant", two)]
    return {"messages": [*task["messages"], *({"role": role, "content": text} for role, text in talk)]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--run-dir", default="")
    args = parser.parse_args()
    folder, chance = Path(args.run_dir or tempfile.mkdtemp()), random.Random(0)
    lessons = [lesson(task, chance) for task in tasks() for _ in range(8)]
    model = imitate(tiny_model(folder / "model", lessons), lessons, folder / "sft", steps=120)
    learned = dt.rl(
        model=model, data=tasks(), environment=Repair, steps=args.steps, prompts=8, num_generations=8,
        max_prompt_length=48, max_completion_length=80, optimizer={"lr": 8e-4}, precision={"compute": "f32"},
        schedule={"name": "constant"}, engine={"max_num_seqs": 16}, run_dir=folder / "rl",
    )  # fmt: skip
    first, last = first_and_last(learned.folder)
    print(f"a repair is worth {first:.0%} at first, and {last:.0%} at last")


if __name__ == "__main__":
    main()
