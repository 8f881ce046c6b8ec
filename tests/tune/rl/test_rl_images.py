"""RL on prompts with images: sampler and trainer see the same images, and a killed run continues exactly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tune.small_models import metrics
from tune.small_vision import COLOURS, picture, vision_folder

from dovetail.tune.rl.rl import rl

pytestmark = pytest.mark.slow

RECIPE: dict[str, Any] = dict(
    prompts=3, num_generations=4, max_prompt_length=40, max_completion_length=5, show=False, show_every=0,
    optimizer={"lr": 3e-3}, precision={"compute": "f32"}, schedule={"name": "constant"}, checkpoint={"every": 0},
)  # fmt: skip


def first_letter(prompts, completions, colour, **columns) -> list[float]:
    """The share of letters that are the first of the picture's colour."""
    return [text[0]["content"].count(c[0]) / 5 for text, c in zip(completions, colour, strict=True)]


def prompts() -> list[dict[str, Any]]:
    parts = [{"type": "image"}, {"type": "text", "text": "?"}]
    return [
        {"prompt": [{"role": "user", "content": parts}], "images": [picture(name)], "colour": name} for name in COLOURS
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return vision_folder(tmp_path_factory.mktemp("smolvlm") / "model")


def run(folder: Path, place: Path, **changes: Any) -> Any:
    given = {"rewards": [first_letter], "data": prompts(), **RECIPE, **changes}
    return rl(model=str(folder), run_dir=place, **given)


def test_sampler_and_trainer_see_the_same_images(folder, tmp_path):
    ended = run(folder, tmp_path / "run", steps=3)
    assert ended.code == 0
    lines = metrics(tmp_path / "run")
    assert max(line["gap_max"] for line in lines) < 1e-4
    assert all(abs(line["ratio"] - 1) < 1e-4 for line in lines)
    said = [json.loads(line) for line in (tmp_path / "run/completions.jsonl").read_text().splitlines()]
    assert len(said) == 3 * 12 and said[0]["prompt"][0]["content"][0] == {"type": "image"}
    assert not any("<image>" in json.dumps(line["completion"]) for line in said)
