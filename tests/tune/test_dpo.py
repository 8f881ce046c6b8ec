"""Test whole runs of preference training and their references."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusals import refuses
from tune.small_models import CONFIG, LORA, RUN, metrics, model_folder, pairs

import dovetail as dt
from dovetail.core.errors import RecipeError
from dovetail.core.recipe import create
from dovetail.core.spec import init
from dovetail.io.peft import save_adapter
from dovetail.models.lora import Lora, lora_spec
from dovetail.models.registry import parse_config
from dovetail.tune.rl.settings import Rl
from dovetail.tune.settings import Dpo

QUICK = RUN | {"optimizer": {"lr": 3e-3}}

pytestmark = pytest.mark.slow


def told(ended, name: str) -> list[float]:
    return [line[name] for line in metrics(ended.folder) if name in line]


@pytest.mark.parametrize(
    "how", [{"lora": LORA}, pytest.param({}, marks=pytest.mark.thorough)], ids=["adapters", "all weights"]
)
def test_a_preference_is_learnt(how, tmp_path):
    ended = dt.dpo(model=model_folder(tmp_path), data=pairs(), steps=12, run_dir=tmp_path / "run", **QUICK, **how)
    np.testing.assert_allclose(told(ended, "loss")[0], np.log(2), rtol=1e-4)  # the policy is its reference
    assert told(ended, "reward_accuracy")[-1] == 1 and told(ended, "reward_margin")[-1] > 0.5


@pytest.mark.thorough
@pytest.mark.parametrize("loss", ["ipo", "hinge", "orpo", "simpo"])
def test_other_preference_losses_are_learnt(loss, tmp_path):
    ended = dt.dpo(
        model=model_folder(tmp_path), data=pairs(), lora=LORA, preference={"loss_type": loss}, steps=8,
        run_dir=tmp_path / "run", **QUICK,
    )  # fmt: skip
    assert told(ended, "loss")[-1] < told(ended, "loss")[0]


@pytest.mark.thorough
def test_unpaired_preferences_are_learnt(tmp_path):
    rows = [
        {"prompt": f"say {i}", "completion": f" <{i}>" if i % 2 else f" no {i}", "label": bool(i % 2)}
        for i in range(24)
    ]
    ended = dt.dpo(
        model=model_folder(tmp_path), data=rows, lora=LORA, preference={"loss_type": "kto"}, steps=8,
        run_dir=tmp_path / "run", **QUICK,
    )  # fmt: skip
    assert told(ended, "loss")[-1] < told(ended, "loss")[0]


@pytest.mark.thorough
def test_a_reference_on_disk_is_the_live_one(tmp_path):
    live, disk = (
        dt.dpo(
            model=model_folder(tmp_path),
            data=pairs(),
            preference={"reference": how},
            steps=4,
            run_dir=tmp_path / how,
            **QUICK,
        )
        for how in ("live", "disk")
    )
    assert (disk.folder / "reference.npz").exists()
    np.testing.assert_allclose(told(live, "loss"), told(disk, "loss"), rtol=1e-4)


# --- the reference ----------------------------------------------------------------------------------------------------


def adapter_folder(place: Path) -> str:
    """An adapter that changes the model by much."""
    cfg, lora = parse_config(CONFIG, "here"), Lora(**LORA)
    tree = init(lora_spec(cfg, lora), jax.random.key(3), jnp.float32, 0.1)
    full = jax.tree.map(lambda x: np.asarray(jax.random.normal(jax.random.key(x.size), x.shape)) * 0.1, tree)
    save_adapter(place / "adapter", cfg, full, lora, model_folder(place))
    return str(place / "adapter")


def first_loss(place: Path, name: str, steps: int = 1, **how) -> list[float]:
    ended = dt.dpo(
        model=model_folder(place), data=pairs(), lora=LORA, from_adapter=adapter_folder(place), steps=steps,
        run_dir=place / name, **(QUICK | how),
    )  # fmt: skip
    return told(ended, "loss")


def test_the_reference_is_the_starting_policy(tmp_path):
    np.testing.assert_allclose(first_loss(tmp_path, "policy"), np.log(2), rtol=1e-5)


@pytest.mark.thorough
def test_reference_model_base_is_the_model_without_the_adapter(tmp_path):
    assert abs(first_loss(tmp_path, "base", reference={"model": "base"})[0] - np.log(2)) > 0.01


@pytest.mark.thorough
def test_the_starting_policy_on_disk_is_the_live_one(tmp_path):
    live, disk = (first_loss(tmp_path, how, 4, preference={"reference": how}) for how in ("live", "disk"))
    np.testing.assert_allclose(live, disk, rtol=1e-4)


@pytest.mark.thorough
@pytest.mark.parametrize("how", [{}, {"lora": LORA}], ids=["all weights", "adapters"])
def test_a_synced_reference_follows_the_policy_and_is_resumed(how, tmp_path):
    """With a copy after every step the loss is that of a policy which is its own reference, and a run that stopped
    between two syncs goes on as one that did not."""
    given = dict(model=model_folder(tmp_path), data=pairs(), **QUICK, **how)
    each = dt.dpo(steps=3, reference={"sync_every": 1, "mixup_alpha": 1.0}, run_dir=tmp_path / "each", **given)
    np.testing.assert_allclose(told(each, "loss"), np.log(2), rtol=1e-5)
    some = {"sync_every": 2, "mixup_alpha": 1.0}
    whole = dt.dpo(steps=6, reference=some, run_dir=tmp_path / "whole", **given)
    dt.dpo(steps=3, reference=some, run_dir=tmp_path / "parts", **given)
    parts = dt.dpo(steps=6, reference=some, run_dir=tmp_path / "parts", **given)
    losses = told(whole, "loss")
    np.testing.assert_allclose([losses[0], losses[2], losses[4]], np.log(2), rtol=1e-5)
    assert losses[1] < 0.69 and told(parts, "loss") == losses


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"reference": {"model": "base"}}, "reference.model"),
        ({"reference": {"mixup_alpha": 0.5}}, "reference.mixup_alpha"),
        ({"reference": {"sync_every": 4}, "lora": LORA}, "reference.mixup_alpha"),
        ({"reference": {"sync_every": 4}, "preference": {"reference": "disk"}}, "reference.sync_every"),
        ({"reference": {"sync_every": 4}, "preference": {"loss_type": "orpo"}}, "reference"),
    ],
)
def test_reference_settings_are_checked(given, param):
    with refuses(param, RecipeError):
        create(Dpo, {"model": "tiny", "steps": 1, **given})


def test_rl_has_the_same_reference():
    given = {"model": "tiny", "steps": 1, "loss": {"beta": 0.1}, "lora": LORA, "from_adapter": "here"}
    assert create(Rl, given).kept_reference
    assert create(Rl, given | {"reference": {"model": "base"}}).kept_reference is None
    assert create(Rl, given | {"loss": {"beta": 0.0}}).kept_reference is None
    with refuses("reference.sync_every", RecipeError):
        create(Rl, given | {"reference": {"devices": 1, "sync_every": 2, "mixup_alpha": 1.0}})
