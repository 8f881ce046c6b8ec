"""Test the shipped recipes and the checks of settings."""

import json
import re
import subprocess
import sys

import pytest
from corners import corners
from refusals import refuses
from typer.testing import CliRunner

from dovetail.cli.recipes import purpose
from dovetail.core import recipe
from dovetail.core.chips import CHIPS
from dovetail.core.errors import MissingFileError, RecipeError
from dovetail.core.spec import matmul_flops, num_params
from dovetail.core.training import OPTIMIZER_KEYS, OPTIMIZERS, SCHEDULE_KEYS, SCHEDULES, profile_window
from dovetail.models.registry import read_model, shipped_models
from dovetail.models.spec import spec
from dovetail.plan.derive import derive
from dovetail.plan.refusal import smallest
from dovetail.train.image_settings import ImagePretrain
from dovetail.train.pretrain import pretrain_class
from dovetail.train.settings import Pretrain

# published parameters, and for a mixture of experts those one token multiplies (its embedding is a look-up)
SIZES = {
    "tiny": (1.03e6, None),
    "smollm2-135m": (134.5e6, None),
    "llama3-1b": (1.236e9, None),
    "llama3-8b": (8.03e9, None),
    "qwen3-0.6b": (0.596e9, None),
    "qwen3-30b-a3b": (30.53e9, 3.04e9),
    "gemma3-4b": (3.88e9, None),
    "mistral-7b": (7.248e9, None),
    "mixtral-8x7b": (46.7e9, 12.75e9),
    "deepseek-v3": (671.0e9, 36.6e9),
    "tiny-vit": (0.2026e6, None),
    "vit-s16": (22.2e6, None),
    "vit-b16": (87.2e6, None),
    "siglip-b16": (203.2e6, None),
}


def loaded(name):
    """Return the settings of a shipped recipe, of text or of images, as the planner takes them."""
    settings = recipe.load(name, (), pretrain_class(name))
    return settings.for_model(read_model(settings.model)) if isinstance(settings, ImagePretrain) else settings


def test_the_shipped_recipes():
    assert set(recipe.shipped()) == set(SIZES) == set(shipped_models())


@pytest.mark.parametrize("name", SIZES)
def test_a_shipped_recipe_is_valid_and_short(name):
    settings = loaded(name)
    specs = spec(read_model(settings.model))
    total, active = SIZES[name]
    assert num_params(specs) == pytest.approx(total, rel=0.01)
    assert active is None or matmul_flops(specs) / 2 == pytest.approx(active, rel=0.01)
    assert 10 <= len(recipe.find(name).read_text().splitlines()) <= 25
    assert recipe.read(type(settings), recipe.dump(settings)) == settings


@pytest.mark.parametrize("name", SIZES)
def test_it_fits_some_number_of_h200(name):
    settings = loaded(name)
    cfg = read_model(settings.model)
    count = smallest(cfg, settings, CHIPS["H200"])
    assert count is not None
    derived = derive(cfg, settings, CHIPS["H200"], count)
    assert derived.memory.total <= (derived.limit or 0)


def test_deepseek_trains_mtp_and_its_router_bias():
    settings = recipe.load("deepseek-v3", (), Pretrain)
    assert settings.loss.mtp > 0 and settings.loss.router_bias_rate > 0 and settings.loss.router_aux == 0


def test_a_short_trial_of_a_large_recipe_needs_one_more_override():
    with refuses("schedule.warmup", RecipeError, naming="schedule.warmup=1,"):
        recipe.load("llama3-8b", ["steps=10"], Pretrain)
    settings = recipe.load("llama3-8b", ["steps=10", "schedule.warmup=1", "batch=8"], Pretrain)
    assert (settings.total_steps, settings.tokens) == (10, 0)


def test_an_unknown_model_is_refused_with_a_suggestion(tmp_path):
    with refuses("model", naming="Did you mean 'llama3-8b'?"):
        read_model("llama3-8")
    with refuses(None, MissingFileError, naming="config.json"):
        read_model(str(tmp_path))


BASE = ["steps=40", "schedule.warmup=0"]


@pytest.mark.parametrize(
    ("overrides", "param"),
    [
        (["tokens=1M"], "steps"),
        (["steps=0"], "steps"),
        (["batch=0"], "batch"),
        (["length=1"], "length"),
        (["optimizer.name=adam"], "optimizer.name"),
        (["optimizer.lr=0"], "optimizer.lr"),
        (["optimizer.beta2=1"], "optimizer.beta2"),
        (["schedule.name=wsd", "schedule.decay=1"], "schedule.decay"),
        (["schedule.warmup=41"], "schedule.warmup"),
        (["precision.compute=fp8"], "precision.compute"),
        (["profile=13:10"], "profile"),
        (["profile=10"], "profile"),
        (["remat=some"], "remat"),
        (["accumulate=3"], "accumulate"),
        (["ema=1"], "ema"),
        (["data.held_out=0"], "data.held_out"),
        (["data.held_out=1.5"], "data.held_out"),
        (["data.sources=[]"], "data.sources"),
        (["data.sources.0.weight=0"], "data.sources.0.weight"),
        (["data.sources.0.format=csv"], "data.sources.0.format"),
        (["data.packing=bestfit"], "data.packing"),
        (["checkpoint.keep=0"], "checkpoint.keep"),
        (["checkpoint.durable_every=5"], "checkpoint.durable_every"),
        (["eval.command=x"], "eval.command_every"),
        (["mesh.slices=0"], "mesh.slices"),
        (["mesh.slices=2", "mesh.data=3"], "mesh.data"),
        (["health.spike=1"], "health.spike"),
        (["loss.z=-1"], "loss.z"),
        (["seed=-1"], "seed"),
    ],
)
def test_bad_settings_are_refused(overrides, param):
    with refuses(param, RecipeError):
        recipe.load("tiny", [*BASE, *overrides], Pretrain)


# A value that no recipe starts from, for each key that only some optimizers or schedules read.
OTHER_VALUES = {"beta1": 0.8, "beta2": 0.9, "eps": 1e-6, "momentum": 0.9, "decay": 0.5, "final": 0.5}
CHOICES = [
    (section, name, key, name in readers)
    for section, names, keys in (
        ("optimizer", OPTIMIZERS, OPTIMIZER_KEYS),
        ("schedule", SCHEDULES, SCHEDULE_KEYS),
    )
    for name in names
    for key, (readers, _) in keys.items()
]


@pytest.mark.parametrize(("section", "name", "key", "is_read"), CHOICES)
def test_keys_that_the_choice_does_not_read_are_refused(section, name, key, is_read):
    overrides = [*BASE, f"{section}.name={name}", f"{section}.{key}={OTHER_VALUES[key]}"]
    if is_read:
        settings = recipe.load("tiny", overrides, Pretrain)
        assert getattr(getattr(settings, section), key) == OTHER_VALUES[key]
    else:
        with refuses(f"{section}.{key}", RecipeError, naming=f"with {name}"):
            recipe.load("tiny", overrides, Pretrain)


def test_the_message_of_a_setting_names_recipe_choices_and_the_closest_one():
    with refuses("optimizer.name", RecipeError) as refused:
        recipe.load("tiny", [*BASE, "optimizer.name=adam"], Pretrain)
    assert str(refused.value) == (
        "recipe tiny: optimizer.name must be one of 'adamw', 'muon', 'adafactor'; got 'adam'. Did you mean 'adamw'?"
    )


def test_tokens_round_up_to_a_step():
    settings = recipe.load("tiny", ["tokens=5k", "schedule.warmup=0", "profile=1:3"], Pretrain)
    assert settings.tokens_per_step == 2048 and settings.total_steps == 3
    assert profile_window(settings.profile) == (1, 3)


@pytest.fixture
def run(monkeypatch):
    import typer

    from dovetail.cli import recipes

    monkeypatch.setenv("COLUMNS", "100")
    app = typer.Typer()
    app.command()(recipes.recipes)
    return lambda *args: CliRunner().invoke(app, list(args), catch_exceptions=False).output


def test_the_command_lists_every_recipe_on_a_hundred_columns(run):
    output = run()
    for training in recipe.TRAININGS:
        assert (f": dovetail {training} NAME" in output) == bool(recipe.shipped(training))
        for name in recipe.shipped(training):
            assert re.search(rf"^  {name} .*( +(\d+|-)){{4}}$", output, re.MULTILINE), name  # the chips that it fits
            assert purpose(name)[:60] in output
    assert "30.5B (3.04B active)" in output and "14.8T" in output
    assert max(map(len, output.splitlines())) <= 100


def test_the_command_shows_one_and_what_it_becomes(run):
    output = run("llama3-8b", "mesh.tensor=2", "--chip", "h100", "--devices", "16")
    assert "model: llama3-8b" in output and "with mesh.tensor=2" in output
    assert "derived for 16 x H100" in output and "tensor 2" in output and "total" in output
    assert "CPU device" in run("tiny", "--chip", "cpu", "--devices", "2")


LISTED = {name: training for training in recipe.TRAININGS for name in recipe.shipped(training)}


@pytest.mark.parametrize("name", corners(LISTED, ["tiny", "llama3-8b", "llama3-8b-qlora", "smollm2-135m-grpo"]))
def test_the_listed_sizes_are_those_that_are_computed(name):
    from dovetail.cli import recipes

    listed = json.loads((recipe.SHIPPED / recipes.SIZES).read_text())
    assert listed.keys() == LISTED.keys(), "write the file again: python -m dovetail.cli.recipes"
    assert listed[name] == recipes._sizes(name, LISTED[name]), "write the file again: python -m dovetail.cli.recipes"


def test_the_list_needs_no_jax():
    program = "import sys; from dovetail.cli.main import app; app(['recipes'], standalone_mode=False); "
    program += "assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
