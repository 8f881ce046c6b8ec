"""Test the shipped fine-tuning recipes: each loads in its command, fits the listed chips, and trains a step."""

import json
import re

import pytest
from refusals import refuses
from typer.main import get_command

from dovetail.cli.main import app
from dovetail.cli.recipes import _model_of, _planned, purpose
from dovetail.cli.train import settings_class
from dovetail.core import recipe
from dovetail.core.chips import CHIPS
from dovetail.core.errors import RecipeError
from dovetail.data.sources import samples
from dovetail.io.hub import PUBLISHED
from dovetail.plan.derive import derive
from dovetail.plan.refusal import smallest

pytestmark = pytest.mark.slow

SHIPPED = [(training, name) for training in recipe.TRAININGS[1:] for name in recipe.shipped(training)]
# What makes a step of each small enough for a model of a few thousand weights.
SMALL = ["steps=1", "precision.compute=f32", "eval.every=0"]
ROWS = ["batch=8", "length=192"]
ROLLOUTS = ["prompts=2", "num_generations=2", "max_prompt_length=128", "max_completion_length=8", "show_every=0"]


def test_every_training_has_one():
    assert {training for training, _ in SHIPPED} == {"sft", "dpo", "reward", "distill", "rl"}


@pytest.mark.parametrize(("training", "name"), SHIPPED)
def test_shipped_recipes_load_and_fit(training, name):
    settings = recipe.load(name, (), settings_class(training))
    assert settings.model in PUBLISHED  # its weights can be fetched by this name
    assert settings.data.path in samples() and purpose(name).endswith(".")
    assert recipe.read(type(settings), recipe.dump(settings)) == settings
    cfg, planned = _model_of(settings), _planned(settings, training)
    count = smallest(cfg, planned, CHIPS["H200"])
    assert count == 1  # none needs more than one
    derived = derive(cfg, planned, CHIPS["H200"], count)
    assert derived.memory.total <= (derived.limit or 0)


def test_the_built_in_samples_are_right():
    """The trained, preferred and rewarded answers are the sums asked for."""
    folder = recipe.SHIPPED / "samples"
    chats, pairs, prompts = (
        [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()] for name in samples()
    )
    assert len(chats) == len(pairs) == len(prompts) == 256
    for chat, pair, prompt in zip(chats, pairs, prompts, strict=True):
        right, wrong = (pair[side][0]["content"] for side in ("chosen", "rejected"))
        assert chat["messages"] == [*prompt["prompt"], {"role": "assistant", "content": right}]
        sums = [re.fullmatch(r"(.*) = (-?\d+)\. The answer is \2\.", text) for text in (right, wrong)]
        assert sums[0] and sums[1] and sums[0][1] == sums[1][1] and re.fullmatch(r"\d+ [-+*] \d+", sums[0][1])
        assert eval(sums[0][1]) == int(sums[0][2]) == int(prompt["answer"]) != int(sums[1][2])


def test_another_trainings_recipe_is_refused_with_the_right_command():
    for training, name in SHIPPED:
        other = "dpo" if training == "sft" else "sft"
        with refuses(None, RecipeError, naming=f"is for `dovetail {training}`"):
            recipe.load(name, (), settings_class(other))
    with refuses("recipe", RecipeError, naming="Did you mean 'smollm2-135m-sft'?"):
        recipe.load("smollm2-135m-stf", (), settings_class("sft"))


@pytest.mark.thorough
@pytest.mark.parametrize(("training", "name"), SHIPPED)
def test_shipped_recipes_train_a_step(training, name, tmp_path):
    from tune.small_models import model_folder

    model = model_folder(tmp_path)
    words = [f"model={model}", *SMALL, *(ROLLOUTS if training == "rl" else ROWS)]
    words += [f"teacher={model}"] if training == "distill" else []
    words += ["samples.every=0", "samples.prompts=[]"] if name.endswith("-sft") else []
    words = [training, name, *words, "--run-dir", str(tmp_path / "run"), "--quiet"]
    assert not get_command(app)(words, standalone_mode=False)  # an exit code
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "kind" not in line] == [1] and lines[0]["loss"] is not None
    assert list((tmp_path / "run" / "export" / "step_1").glob("*.safetensors"))
