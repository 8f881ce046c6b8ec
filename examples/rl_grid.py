"""Teach an agent to cross a frozen lake by what becomes of its moves: python examples/rl_grid.py [--steps 30]

A tiny model first sees walks at random, from which it knows how a move is written and nothing else. Then it learns from
rewards for reaching the goal, from any place on the lake. Some minutes on two cores.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from pathlib import Path

from tiny import first_and_last, imitate, tiny_model

import dovetail as dt
from dovetail.tune.rl.environment import Environment, Step

LAKE = ["...", ".O.", "..G"]  # O: a hole; G: the goal
MOVES = {"left": (0, -1), "right": (0, 1), "up": (-1, 0), "down": (1, 0)}
SLIPS = 0.1  # of the moves


def walk(row: int, column: int, move: str) -> tuple[int, int]:
    down, right = MOVES[move]
    return min(max(row + down, 0), 2), min(max(column + right, 0), 2)


class Lake(Environment):
    turns = 6

    def reset(self, random) -> None:
        self.row, self.column = self.columns["start"]

    def step(self, turn) -> Step:
        move = turn.content.strip()
        if move not in MOVES:
            return Step(done=True)
        if self.random.random() < SLIPS:
            move = self.random.choice([*MOVES])
        self.row, self.column = walk(self.row, self.column, move)
        under = LAKE[self.row][self.column]
        return Step(place(self.row, self.column), reward=float(under == "G"), done=under != ".")


def place(row: int, column: int) -> str:
    return f"row {row} column {column}"


def tasks() -> list[dict]:
    cells = [(row, column) for row in range(3) for column in range(3) if LAKE[row][column] == "."]
    return [{"messages": [{"role": "user", "content": place(*cell)}], "start": cell} for cell in cells]


def lesson(task: dict, chance: random.Random) -> dict:
    """A walk at random."""
    talk, (row, column) = list(task["messages"]), task["start"]
    for _ in range(5):
        move = chance.choice([*MOVES])
        row, column = walk(row, column, move)
        talk += [{"role": "assistant", "content": move}, {"role": "user", "content": place(row, column)}]
    return {"messages": talk[:-1]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--run-dir", default="")
    args = parser.parse_args()
    folder, chance = Path(args.run_dir or tempfile.mkdtemp()), random.Random(0)
    lessons = [lesson(task, chance) for task in tasks() for _ in range(8)]
    model = imitate(tiny_model(folder / "model", lessons), lessons, folder / "sft", steps=40)
    learned = dt.rl(
        model=model, data=tasks(), environment=Lake, steps=args.steps, prompts=7, num_generations=8,
        max_prompt_length=16, max_completion_length=96, optimizer={"lr": 5e-4}, precision={"compute": "f32"},
        schedule={"name": "constant"}, engine={"max_num_seqs": 16}, run_dir=folder / "rl",
    )  # fmt: skip
    first, last = first_and_last(learned.folder)
    print(f"the goal is reached by {first:.0%} of the walks at first, and by {last:.0%} at last")


if __name__ == "__main__":
    main()
