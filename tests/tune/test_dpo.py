"""Preferences from records to a model that has turned around."""

from __future__ import annotations

import numpy as np
import pytest
from tune.small_models import LORA, RUN, metrics, model_folder, pairs

import dovetail as dt

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
def test_its_relatives(loss, tmp_path):
    ended = dt.dpo(
        model=model_folder(tmp_path), data=pairs(), lora=LORA, preference={"loss": loss}, steps=8,
        run_dir=tmp_path / "run", **QUICK,
    )  # fmt: skip
    assert told(ended, "loss")[-1] < told(ended, "loss")[0]


@pytest.mark.thorough
def test_unpaired_ones(tmp_path):
    rows = [
        {"prompt": f"say {i}", "completion": f" <{i}>" if i % 2 else f" no {i}", "label": bool(i % 2)}
        for i in range(24)
    ]
    ended = dt.dpo(
        model=model_folder(tmp_path), data=rows, lora=LORA, preference={"loss": "kto"}, steps=8,
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
