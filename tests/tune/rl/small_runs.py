"""A small RL run for tests: a model, prompts and a reward that it can learn in seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tune.rl.plain_rewards import low_tokens
from tune.small_models import model_folder

from dovetail.tune.rl.rl import rl

PROMPTS = [{"prompt": f"say {i}", "answer": str(i)} for i in range(8)]
RECIPE: dict[str, Any] = dict(
    prompts=4, num_generations=8, max_prompt_length=16, max_completion_length=8, steps=6, show=False, show_every=0,
    optimizer={"lr": 1e-2},
    precision={"compute": "f32"}, schedule={"name": "constant"}, checkpoint={"every": 0},
)  # fmt: skip


def run(place: Path, **changes: Any):
    name = changes.pop("name", "run")
    given = {"rewards": [low_tokens], "data": PROMPTS, **RECIPE, **changes}
    return rl(model=model_folder(place), run_dir=place / name, **given)
