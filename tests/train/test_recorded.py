"""Test the recipe that a run records, and how it reads after defaults change."""

from __future__ import annotations

import copy

import pytest

from dovetail import __version__
from dovetail.core import recipe, yaml_text
from dovetail.train.saves import as_begun, changes, recipe_text, record
from dovetail.train.settings import Pretrain
from dovetail.tune.rl.settings import Rl
from dovetail.tune.settings import Distill, Dpo, Reward, Sft

pytestmark = pytest.mark.slow

TUNED = {"model": "m", "data": {"path": "d.jsonl"}, "steps": 3, "lora": {"r": 4}}
RECIPES = [
    (Pretrain, {"model": "tiny", "batch": 8, "length": 64, "tokens": 4096, "data": {"sources": [{"path": "x"}]}}),
    (Sft, {**TUNED, "samples": {"every": 2, "prompts": ["Hi"]}}),
    (Sft, {**TUNED, "quantization": "nf4"}),
    (Dpo, TUNED),
    (Reward, {"model": "m", "data": {"sources": [{"path": "a"}, {"path": "b", "weight": 2}]}, "epochs": 1.5}),
    (Distill, {**TUNED, "teacher": "t"}),
    (Rl, {**TUNED, "rewards": [{"kind": "number", "column": "answer"}]}),
    (Rl, {**TUNED, "algo": "ppo"}),
    (Rl, {**TUNED, "algo": "gkd", "teacher": "t"}),
    (Rl, {**TUNED, "algo": "cispo"}),
]


@pytest.mark.parametrize(("cls", "given"), RECIPES, ids=lambda value: getattr(value, "__name__", ""))
def test_the_recorded_recipe_is_whole_and_reads_back(cls, given, tmp_path):
    settings = recipe.create(cls, given)
    (tmp_path / "recipe.yaml").write_text(recipe_text(settings))
    text = (tmp_path / "recipe.yaml").read_text()
    assert f"dovetail {__version__}, jax " in text.splitlines()[0]
    assert yaml_text.parse(text)["optimizer"] == vars(settings.optimizer)
    read = recipe.load(str(tmp_path / "recipe.yaml"), ["seed=7"], cls)
    assert read == recipe.change(settings.effective, {"seed": 7})
    assert changes(record(settings)["recipe"], settings) == {}


def test_values_derived_from_the_algorithm_are_recorded():
    loss = record(recipe.create(Rl, {**TUNED, "algo": "dapo"}))["recipe"]["loss"]
    assert (loss["policy_loss"], loss["epsilon"], loss["epsilon_high"], loss["dynamic_sampling"]) == (
        "clipped",
        0.2,
        0.28,
        True,
    )


def begun(cls, given, then: dict[str, object]) -> dict:
    """Return the meta of a run whose version had these other defaults."""
    meta = copy.deepcopy(record(recipe.create(cls, given)))
    for key, value in then.items():
        *path, last = key.split(".")
        section = meta["recipe"]
        for name in path:
            section = section[name]
        section[last] = value
    return meta


def test_a_later_default_does_not_change_a_run():
    meta = begun(Sft, TUNED, {"optimizer.lr": 5e-5, "lora.lora_alpha": 3.0, "data.overlong": "cut", "seed": 9})
    resumed, lines = as_begun(recipe.create(Sft, {**TUNED, "seed": 4}), meta)
    assert (resumed.optimizer.lr, resumed.data.overlong, resumed.seed) == (5e-5, "cut", 4)
    assert resumed.lora is not None and (resumed.lora.lora_alpha, resumed.lora.r) == (3.0, 4)
    assert len(lines) == 3 and lines[0].startswith(f"optimizer.lr stays 5e-05, the default of dovetail {__version__}")


def test_explicit_values_are_not_defaults():
    begun_with = {**TUNED, "optimizer": {"lr": 5e-5}}
    resumed, lines = as_begun(recipe.create(Sft, TUNED), record(recipe.create(Sft, begun_with)))
    assert (resumed, lines) == (recipe.create(Sft, TUNED), [])  # taken out of the recipe: today's default
    changed = recipe.create(Sft, {**TUNED, "optimizer": {"lr": 7e-5}})
    assert as_begun(changed, begun(Sft, TUNED, {"optimizer.lr": 5e-5})) == (changed, [])
    assert as_begun(changed, None) == as_begun(changed, {"recipe": {"model": "m"}}) == (changed, [])


def test_an_algorithms_later_default_does_not_change_a_run():
    meta = begun(Rl, TUNED, {"loss.epsilon": 0.1})
    assert as_begun(recipe.create(Rl, TUNED), meta)[0].effective.loss.epsilon == 0.1
