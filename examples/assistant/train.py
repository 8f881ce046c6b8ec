"""Train a tiny vision-language model to keep the diary: python -m examples.assistant.train [--steps 40]

1. Imitation: chats with words and pictures show it the form. Half of the meals in them have a mistake, and so it makes
   mistakes as often.
2. Reinforcement learning: it logs other meals itself, and rewards for well-formed calls, right foods and right amounts
   correct it.

`make demo` runs this once and serves both models, before and after the rewards. A stage whose model is there is not
run again.
"""

from __future__ import annotations

import argparse
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dovetail as dt
from examples.assistant.episode import MealEnvironment, record
from examples.assistant.evaluate import evaluate
from examples.assistant.lessons import lesson
from examples.assistant.rewards import right_amount, right_food, success, well_formed
from examples.assistant.tiny_vlm import tiny_vlm
from examples.tiny import first_and_last

BEFORE, AFTER = "before", "after"  # folders of the two models, and their labels in the app
LESSONS, IMITATION_STEPS = 4000, 800
MEALS, RL_STEPS = 800, 40
USUAL: dict[str, Any] = {"precision": {"compute": "f32"}}


def imitate(run_dir: Path) -> Path:
    """Train a model with random weights on lessons, and return its folder."""
    lessons = [lesson(seed) for seed in range(LESSONS)]
    model = tiny_vlm(_empty(run_dir / "random"), lessons)
    taught = dt.sft(
        model=model, data=lessons, steps=IMITATION_STEPS, batch=8, length=256, packing=True, optimizer={"lr": 4e-3},
        schedule={"name": "cosine", "warmup": 20}, checkpoint={"export_hf": IMITATION_STEPS},
        run_dir=_empty(run_dir / "sft"), **USUAL,
    )  # fmt: skip
    return taught.folder / f"export/step_{IMITATION_STEPS}"


def reinforce(model: Path, run_dir: Path, steps: int) -> Path:
    """Train a model on the rewards of its own calls, and return its folder."""
    meals = [record(10**5 + seed, picture=seed % 2 == 0) for seed in range(MEALS)]
    learned = dt.rl(
        model=str(model), data=meals, environment=MealEnvironment,
        rewards=[well_formed, right_food, right_amount, success], steps=steps, prompts=8, num_generations=8,
        max_prompt_length=64, max_completion_length=96, optimizer={"lr": 4e-4}, schedule={"name": "constant"},
        engine={"max_num_seqs": 32}, checkpoint={"export_hf": steps}, run_dir=_empty(run_dir / "rl"), **USUAL,
    )  # fmt: skip
    print("mean reward, of 4: {:.2f} in the first steps, {:.2f} in the last".format(*first_and_last(learned.folder)))
    return learned.folder / f"export/step_{steps}"


def train(run_dir: Path, steps: int = RL_STEPS) -> None:
    """Run both stages, and write RUN_DIR/before and RUN_DIR/after."""
    before, after = run_dir / BEFORE, run_dir / AFTER
    _stage("1 of 2: imitation", before, lambda: imitate(run_dir))
    _stage("2 of 2: reinforcement learning", after, lambda: reinforce(before, run_dir, steps))


def _stage(title: str, folder: Path, make: Callable[[], Path]) -> None:
    if folder.is_dir():
        print(f"{title}: done before, in {folder}", flush=True)
        return
    print(f"{title} ...", flush=True)
    start, cpu = time.monotonic(), sum(os.times()[:4])
    part = _empty(folder.with_name(f".{folder.name}"))
    shutil.copytree(make(), part)
    part.rename(folder)  # a folder that is there is whole
    minutes, cpu = (time.monotonic() - start) / 60, (sum(os.times()[:4]) - cpu) / 60
    print(f"{title}: {minutes:.1f} minutes ({cpu:.1f} minutes of CPU time), in {folder}", flush=True)


def _empty(folder: Path) -> Path:
    """Remove a folder of an interrupted run, and return its path."""
    shutil.rmtree(folder, ignore_errors=True)
    return folder


def main() -> None:
    """Train, and measure both models."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=RL_STEPS, help="steps of reinforcement learning")
    parser.add_argument("--run-dir", type=Path, default=Path("runs/assistant"))
    parser.add_argument("--no-evaluate", action="store_true", help="do not measure the success rates")
    args = parser.parse_args()
    train(args.run_dir, args.steps)
    for name in () if args.no_evaluate else (BEFORE, AFTER):
        rates = evaluate(args.run_dir / name)
        print(f"{name}: " + ", ".join(f"{rate:.0%} of the meals in {kind} right" for kind, rate in rates.items()))


if __name__ == "__main__":
    main()
