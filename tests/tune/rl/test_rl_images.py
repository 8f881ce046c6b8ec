"""RL on images: sampler and trainer see the same ones, image tokens are never sampled, and a run resumes exactly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from refusals import refuses
from safetensors.numpy import load_file
from tune.small_models import metrics
from tune.small_vision import COLOURS, picture, vision_folder

from dovetail.core.errors import RecipeError
from dovetail.data.pictures import Picture
from dovetail.tune.rl.environment import Environment, Step
from dovetail.tune.rl.images import max_items
from dovetail.tune.rl.prompts import PromptRecord
from dovetail.tune.rl.rl import rl

pytestmark = pytest.mark.slow

PART = {"type": "image"}
RECIPE: dict[str, Any] = dict(
    prompts=3, num_generations=4, max_prompt_length=40, max_completion_length=5, show=False, show_every=0,
    optimizer={"lr": 3e-3}, precision={"compute": "f32"}, schedule={"name": "constant"}, checkpoint={"every": 0},
)  # fmt: skip


class Looks(Environment):
    """The first observation shows a picture, and so does the answer to the policy's first turn."""

    turns = 2

    def reset(self, random):
        return [{"role": "user", "content": [{"type": "image", "image": picture("green")}]}]

    def step(self, turn):
        reward = turn.text.count(self.columns["colour"][0]) / 10
        content = [{"type": "text", "text": "and"}, {"type": "image", "image": picture("blue", seed=3)}]
        return Step([{"role": "user", "content": content}], reward=reward)


def first_letters(prompts, completions, colour, **columns) -> list[float]:
    """The share of letters that are the first of the picture's colour."""
    return [text[0]["content"].count(c[0]) / 5 for text, c in zip(completions, colour, strict=True)]


def prompts() -> list[dict[str, Any]]:
    """Return prompts in the form of TRL; one has no image."""
    asked = [{"role": "user", "content": [PART, {"type": "text", "text": "?"}]}]
    shown = [{"prompt": asked, "images": [picture(name)], "colour": name} for name in list(COLOURS)[:2]]
    return [*shown, {"prompt": [{"role": "user", "content": "?"}], "colour": "green"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return vision_folder(tmp_path_factory.mktemp("smolvlm") / "model")


def run(folder: Path, place: Path, **changes: Any) -> Any:
    return rl(model=str(folder), run_dir=place, **{"data": prompts(), **RECIPE, **changes})


def agrees(place: Path) -> bool:
    lines = metrics(place)
    return max(line["gap_max"] for line in lines) < 1e-4 and all(abs(line["ratio"] - 1) < 1e-4 for line in lines)


def completions(place: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (place / "completions.jsonl").read_text().splitlines()]


def test_sampler_and_trainer_see_the_same_images(folder, tmp_path):
    ended = run(folder, tmp_path, steps=1, rewards=[first_letters])
    assert ended.code == 0 and agrees(tmp_path)
    said = completions(tmp_path)
    assert len(said) == 12 and not any("<image>" in json.dumps(line["completion"]) for line in said)


@pytest.mark.thorough
def test_observations_have_images_and_a_run_resumes_exactly(folder, tmp_path):
    how: Any = dict(
        environment=Looks, max_prompt_length=80, max_completion_length=60, sampling={"stop": ["<2>"]},
        lora={"r": 4}, checkpoint={"every": 1}, loss={"beta": 0.05},
    )  # fmt: skip
    straight = run(folder, tmp_path / "straight", steps=2, **how)
    assert straight.code == 0 and agrees(tmp_path / "straight")
    run(folder, tmp_path / "resumed", steps=1, **how)
    resumed = run(folder, tmp_path / "resumed", steps=2, **how)
    assert (resumed.trained, resumed.step) == (1, 2)
    said = completions(tmp_path / "straight")
    assert said == completions(tmp_path / "resumed") and len(said) == 2 * 12
    shown = [message["content"] for line in said for message in line["completion"] if message["role"] == "user"]
    assert any(PART in content for content in shown)
    one, other = (load_file(ended.folder / "export/step_2/adapter_model.safetensors") for ended in (straight, resumed))
    for name, x in one.items():
        np.testing.assert_array_equal(x, other[name])


def test_adapters_of_the_tower_are_refused(folder, tmp_path):
    with refuses("lora.target_modules", RecipeError):
        run(folder, tmp_path, steps=1, rewards=[first_letters], lora={"r": 4, "target_modules": ["fc1"]})


def test_the_memory_plan_counts_the_items_of_a_prompts_images():
    shown = Picture(b"", "", tokens=64, items=5, patches=1024)
    records = [PromptRecord(0, "", (1,), {}, images=(shown, shown)), PromptRecord(1, "", (1,), {})]
    assert max_items(records) == 10 and max_items(records[1:]) == 0
