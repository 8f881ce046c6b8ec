"""RL on images: sampler and trainer see the same ones, image tokens are never sampled, and a run resumes exactly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tune.small_models import metrics
from tune.small_vision import COLOURS, picture, vision_folder

from dovetail.tune.rl.environment import Environment, Step
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
    """As TRL has them; one has no image."""
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


def test_sampler_and_trainer_see_the_same_images(folder, tmp_path):
    """Images of the prompt and of observations; a resumed run is the run without a stop."""
    how: Any = dict(environment=Looks, max_prompt_length=80, max_completion_length=60, sampling={"stop": ["<2>"]})
    ended = run(folder, tmp_path / "run", steps=2, checkpoint={"every": 1}, **how)
    assert ended.code == 0 and agrees(tmp_path / "run")
    said = [json.loads(line) for line in (tmp_path / "run/completions.jsonl").read_text().splitlines()]
    assert len(said) == 2 * 12 and not any("<image>" in json.dumps(line["completion"]) for line in said)
    shown = {tuple(part["type"] for message in line["completion"] for part in message["content"]
                   if isinstance(part, dict)) for line in said}  # fmt: skip
    assert any("image" in types for types in shown), shown
