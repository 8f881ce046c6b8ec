"""Trainer, reference and sampler on separate devices train as on shared ones."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest
from refusals import refuses
from tune.rl.small_runs import run
from tune.small_models import metrics, model_folder

from dovetail.core.errors import RecipeError
from dovetail.core.training import Precision
from dovetail.models.registry import read_model
from dovetail.train.prepare import prepare
from dovetail.tune.rl.algorithms import Loss
from dovetail.tune.rl.episode import EpisodeId, new_episode
from dovetail.tune.rl.layout import lay_out
from dovetail.tune.rl.objective import rl_objective
from dovetail.tune.rl.scorer import RowScorer
from dovetail.tune.rl.sections import RlReference, RolloutEngine
from dovetail.tune.rl.settings import Rl, beside_policy

pytestmark = pytest.mark.slow

METRICS = ("loss", "kl", "reward", "entropy", "grad_norm")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("separate")


def scored(settings: Rl) -> tuple[np.ndarray, set[int]]:
    """Return the reference's log-probabilities of some rows, and the ids of its devices."""
    settings = settings.filled(jax.device_count() - settings.spare_devices)
    ready = prepare(settings, rl_objective(settings))
    episodes = [new_episode(EpisodeId(0, i), i, range(3 + i, 40), 0) for i in range(3)]
    layout = lay_out(episodes, settings.length, [settings.batch])
    ones = [np.ones(len(each.tokens), np.float32) for each in episodes]
    scorer = RowScorer(settings, ready)
    found = scorer.reference(ready.place(layout.batch(episodes, ones)))
    weights = {device.id for x in jax.tree.leaves(scorer._reference) for device in x.devices()}
    assert {device.id for device in found.devices()} == weights
    return np.asarray(found), weights


def test_log_probabilities_of_a_separate_reference_are_the_same(place):
    shared = Rl(
        model=model_folder(place), steps=1, prompts=2, num_generations=3, max_prompt_length=32,
        max_completion_length=32, batch=6, loss=Loss(beta=0.1),
        precision=Precision(compute="f32"), engine=RolloutEngine(devices=2),
    )  # fmt: skip
    together, places = scored(shared)
    apart, own = scored(replace(shared, reference=RlReference(devices=3)))
    assert own == {3, 4, 5} and places == {0, 1, 2, 3, 4, 5}
    assert np.count_nonzero(apart) > 100
    np.testing.assert_allclose(apart, together, atol=1e-4)


@pytest.mark.thorough
def test_a_separate_reference_trains_the_same(place, monkeypatch):
    """Of 8 devices the trainer has 4, the reference 2 and the engine 2."""
    assert jax.device_count() == 8
    own, used = RowScorer.reference, []

    def watched(self, batch, kept=None):
        found = own(self, batch, kept)
        weights = {device for x in jax.tree.leaves(self._reference) for device in x.devices()}
        used.append(({device.id for device in weights}, {device.id for device in found.devices()}))
        return found

    monkeypatch.setattr(RowScorer, "reference", watched)
    common = dict(
        steps=2, loss={"beta": 0.1}, checkpoint={"every": 0}, engine={"devices": 2}, num_generations=6, batch=12
    )
    assert run(place, name="separate", reference={"devices": 2}, **common).code == 0
    assert used == [({4, 5}, {4, 5})] * 2
    assert run(place, name="together", **common).code == 0
    for found, expected in zip(metrics(place / "separate"), metrics(place / "together"), strict=True):
        assert {k: found[k] for k in METRICS} == pytest.approx({k: expected[k] for k in METRICS}, rel=1e-3, abs=1e-5)
    assert metrics(place / "separate")[-1]["kl"] > 0


def test_the_plan_counts_the_reference_where_it_is(place):
    folder = model_folder(place)
    shared = Rl(model=folder, steps=1, loss=Loss(beta=0.1))
    apart = Rl(
        model=folder, steps=1, loss=Loss(beta=0.1), reference=RlReference(devices=2), engine=RolloutEngine(devices=1)
    )
    cfg = read_model(folder)
    assert "reference" in beside_policy(shared, cfg, 2**34) and shared.spare_devices == 0
    assert "reference" not in beside_policy(apart, cfg, 2**34) and apart.spare_devices == 3


@pytest.mark.parametrize(
    "changes, param",
    [
        ({"reference": {"devices": 2}}, "reference"),
        ({"reference": {"devices": 2}, "algo": "ppo"}, "reference"),
    ],
)
def test_a_reference_without_a_kl_term_is_refused(place, changes, param):
    with refuses(param, RecipeError):
        run(place, name="refused", **changes)


def test_a_device_must_be_left_to_the_trainer(place):
    with refuses("engine.devices", RecipeError):
        run(place, name="refused", reference={"devices": 7}, engine={"devices": 1}, loss={"beta": 0.1})
