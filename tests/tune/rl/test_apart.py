"""Trainer, reference and sampler on devices of their own: what is learnt is what one set of devices learns."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest
from tune.rl.small_runs import run
from tune.small_models import metrics, model_folder

from dovetail.core.training import Precision
from dovetail.models.registry import read_model
from dovetail.train.prepare import prepare
from dovetail.tune.rl.algorithms import Loss
from dovetail.tune.rl.episode import Place, begun
from dovetail.tune.rl.layout import lay_out
from dovetail.tune.rl.objective import rl_objective
from dovetail.tune.rl.parts import Engine, Reference
from dovetail.tune.rl.scorer import Scorer
from dovetail.tune.rl.settings import Rl

TOLD = ("loss", "kl", "reward", "entropy", "grad_norm")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("apart")


def scored(settings: Rl) -> tuple[np.ndarray, set[int]]:
    """What the reference says of some rows, and on which devices."""
    settings = settings.filled(jax.device_count() - settings.spare_devices)
    ready = prepare(settings, rl_objective(settings))
    told = [begun(i, Place(0, i), range(3 + i, 40), 0) for i in range(3)]
    layout = lay_out(told, settings.length, [settings.batch])
    ones = [np.ones(len(each.tokens), np.float32) for each in told]
    scorer = Scorer(settings, ready)
    found = scorer.reference(ready.place(layout.batch(told, ones)))
    weights = {device.id for x in jax.tree.leaves(scorer._reference) for device in x.devices()}
    assert {device.id for device in found.devices()} == weights
    return np.asarray(found), weights


@pytest.mark.slow
def test_it_says_the_same_there(place):
    shared = Rl(
        model=model_folder(place), steps=1, prompts=2, group_size=3, max_prompt=32, max_tokens=32, batch=6,
        loss=Loss(beta=0.1), precision=Precision(compute="f32"), engine=Engine(devices=2),
    )  # fmt: skip
    together, places = scored(shared)
    apart, own = scored(replace(shared, reference=Reference(devices=3)))
    assert own == {3, 4, 5} and places == {0, 1, 2, 3, 4, 5}
    assert np.count_nonzero(apart) > 100
    np.testing.assert_allclose(apart, together, atol=1e-4)


@pytest.mark.thorough
def test_a_reference_on_devices_of_its_own_changes_nothing(place, monkeypatch):
    """Of 8: the trainer's 4, the reference's 2, the engine's 2."""
    assert jax.device_count() == 8
    own, used = Scorer.reference, []

    def watched(self, batch, kept=None):
        found = own(self, batch, kept)
        weights = {device for x in jax.tree.leaves(self._reference) for device in x.devices()}
        used.append(({device.id for device in weights}, {device.id for device in found.devices()}))
        return found

    monkeypatch.setattr(Scorer, "reference", watched)
    common = dict(steps=2, loss={"beta": 0.1}, checkpoint={"every": 0}, engine={"devices": 2}, group_size=6, batch=12)
    assert run(place, name="apart", reference={"devices": 2}, **common).code == 0
    assert used == [({4, 5}, {4, 5})] * 2
    assert run(place, name="together", **common).code == 0
    for found, expected in zip(metrics(place / "apart"), metrics(place / "together"), strict=True):
        assert {k: found[k] for k in TOLD} == pytest.approx({k: expected[k] for k in TOLD}, rel=1e-3, abs=1e-5)
    assert metrics(place / "apart")[-1]["kl"] > 0


def test_the_plan_knows_where_the_reference_lies(place):
    folder = model_folder(place)
    shared = Rl(model=folder, steps=1, loss=Loss(beta=0.1))
    apart = Rl(model=folder, steps=1, loss=Loss(beta=0.1), reference=Reference(devices=2), engine=Engine(devices=1))
    cfg = read_model(folder)
    assert "reference" in shared.beside(cfg, 2**34) and shared.spare_devices == 0
    assert "reference" not in apart.beside(cfg, 2**34) and apart.spare_devices == 3


@pytest.mark.parametrize(
    "changes, told",
    [
        ({"reference": {"devices": 2}}, "set loss.beta above 0"),
        ({"reference": {"devices": 2}, "algo": "ppo"}, "set critic.beta above 0"),
        ({"reference": {"devices": 7}, "engine": {"devices": 1}, "loss": {"beta": 0.1}}, "leaves none of the 8"),
    ],
)
def test_mistakes_are_told(place, changes, told):
    with pytest.raises(ValueError, match=told):
        run(place, name="mistake", **changes)
