"""Test that every mesh of eight devices gives the losses of one device."""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from corners import corners
from train_cases import recipe, some_batch, write_model

from dovetail.core.training import Mesh, Optimizer
from dovetail.io.checkpoint import Checkpoints
from dovetail.train.next_token import next_token
from dovetail.train.prepare import Ready, prepare
from dovetail.train.settings import Pretrain, PretrainLoss

pytestmark = pytest.mark.slow

STEPS = 4
MODELS = {
    "dense": ("dense", PretrainLoss(z=1e-3)),
    "moe": ("moe", PretrainLoss(router_aux=0.02)),
    # latent attention, a dense layer, one with experts, and one more of those that predicts the token after the next
    "mtp": ("latent", PretrainLoss(mtp=0.3, router_bias_rate=1e-3)),
}
# name -> (devices, axes)
MESHES = {
    "data": (8, dict(data=8)),
    "fsdp": (8, dict(fsdp=8)),
    "tensor": (2, dict(tensor=2)),
    "tensor, more than key heads": (4, dict(tensor=4)),
    "expert": (4, dict(expert=4)),
    "context": (4, dict(context=4)),
    "data, fsdp, tensor": (8, dict(data=2, fsdp=2, tensor=2)),
    "fsdp, expert, context": (8, dict(fsdp=2, expert=2, context=2)),
    "slices": (8, dict(data=4, fsdp=2, slices=2)),
}
FAST = {("dense", "data, fsdp, tensor"), ("moe", "fsdp, expert, context")}
USUAL = {("dense", name) for name in ("fsdp", "context")}


def _marks(case: tuple[str, str]):
    return () if case in FAST else pytest.mark.slow if case in USUAL else pytest.mark.thorough


CASES = [
    pytest.param(model, mesh, marks=_marks((model, mesh)))
    for model in MODELS
    for mesh, (_, axes) in MESHES.items()
    if model != "dense" or "expert" not in axes
    if model != "moe" or mesh in ("tensor", "expert", "context", "fsdp, expert, context")  # `mtp` has experts too
]


@functools.cache
def settings(model: str) -> Pretrain:
    config, loss = MODELS[model]
    folder = Path(tempfile.mkdtemp(prefix="dovetail-mesh-"))
    return recipe(write_model(folder, config, num_hidden_layers=2), loss=loss, optimizer=Optimizer(lr=1e-2))


def curve(wanted: Pretrain, devices: int) -> list[dict[str, np.ndarray]]:
    """Return the metrics of a few steps, each on another batch."""
    ready = prepare(wanted, next_token(wanted), jax.devices()[:devices])
    state, step = ready.init(), ready.lower().compile()
    found = []
    for turn in range(STEPS):
        state, metrics = step(state, ready.put(some_batch(turn)))
        found.append(jax.device_get(metrics))
    assert int(state.step) == STEPS
    return found


@functools.cache
def on_one(model: str) -> list[dict[str, np.ndarray]]:
    return curve(settings(model), 1)


def agree(ours: list[dict], theirs: list[dict]) -> None:
    assert theirs[-1]["loss"] < theirs[0]["loss"]
    for a, b in zip(ours, theirs, strict=True):
        assert set(a) - {"checksums"} == set(b) - {"checksums"} and a["ok"]
        for key in set(b) - {"checksums"}:
            rtol = 1e-3 if key in ("grad_norm", "correct") else 1e-4
            np.testing.assert_allclose(a[key], b[key], rtol=rtol, atol=1e-6, err_msg=key)


@pytest.mark.parametrize(("model", "mesh"), CASES)
def test_every_mesh_has_the_losses_of_one_device(model, mesh):
    devices, axes = MESHES[mesh]
    ours = curve(dataclasses.replace(settings(model), mesh=Mesh(**{"data": 1, "fsdp": 1} | axes)), devices)
    assert ours[0]["checksums"].shape == (devices,)
    agree(ours, on_one(model))


@pytest.mark.slow
@pytest.mark.parametrize("model", corners(["mtp", "dense", "moe"], ["dense"]))
def test_accumulated_recomputed_and_scanned_steps_on_a_mesh(model):
    """What else a large run does, on a mesh."""
    axes = dict(data=1, fsdp=2, tensor=2) if model == "dense" else dict(data=1, fsdp=2, expert=2)
    changes: dict[str, Any] = dict(accumulate=2, remat="attention", scan=True, mesh=Mesh(**axes))
    agree(curve(dataclasses.replace(settings(model), **changes), 4), on_one(model))


# --- checkpoints ------------------------------------------------------------------------------------------------------

DENSE = [mesh for mesh, (_, axes) in MESHES.items() if "expert" not in axes]
EXPERT = [mesh for mesh in MESHES if mesh not in DENSE]
READ = [  # and by which mesh a checkpoint is read, too
    (model, mesh, some[i - 1]) for model, some in (("dense", DENSE), ("moe", EXPERT)) for i, mesh in enumerate(some)
]


@pytest.mark.parametrize(
    ("model", "mesh", "onto"),
    [pytest.param(*one, marks=() if i == 0 else pytest.mark.thorough) for i, one in enumerate(READ)],
)
def test_a_checkpoint_is_restored_on_the_same_and_on_another_mesh(tmp_path, model, mesh, onto):
    def on(name: str) -> Ready:
        devices, axes = MESHES[name]
        wanted = dataclasses.replace(settings(model), mesh=Mesh(**{"data": 1, "fsdp": 1} | axes))
        return prepare(wanted, next_token(wanted), jax.devices()[:devices])

    state = on(mesh).init()
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, {"cursor": 3})
        for name in (mesh, onto):
            abstract = on(name).abstract_state
            again, meta, step = checkpoints.restore(abstract)
            assert (meta, step) == ({"cursor": 3}, 1)
            for found, wanted, place in zip(*map(jax.tree.leaves, (again, state, abstract)), strict=True):
                assert found.sharding == place.sharding
                np.testing.assert_array_equal(found, wanted)
