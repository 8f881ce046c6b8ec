"""Test that only gradient sums cross slices, read from the compiled step of two and of four slices.

The devices are a CPU's, and taken for as many slices in a row as the mesh is laid over: the data axis comes first.
"""

from __future__ import annotations

import jax
import pytest

from dovetail.core.recipe import load
from dovetail.plan.collectives import Traffic, collectives, traffic
from dovetail.plan.hlo import read
from dovetail.train.next_token import next_token
from dovetail.train.prepare import Ready, prepare
from dovetail.train.settings import Pretrain

pytestmark = pytest.mark.slow


def step_on(slices: int, *words: str) -> tuple[Ready, list[Traffic]]:
    settings = load("tiny", ["batch=8", "length=128", f"mesh.slices={slices}", *words], Pretrain)
    ready = prepare(settings, next_token(settings), jax.devices())
    mesh = ready.placement.mesh
    slice_of = [i * slices // mesh.size for i in range(mesh.size)]
    module = read(ready.compile(ready.bucket(1)).as_text())  # type: ignore[attr-defined]
    return ready, traffic(collectives(module, mesh.size), dict(mesh.shape), slice_of)


@pytest.mark.parametrize(
    ("slices", "words"),
    [
        pytest.param(2, ("mesh.data=2", "mesh.fsdp=4"), marks=pytest.mark.thorough),
        (2, ("mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2")),
        pytest.param(4, ("mesh.data=4", "mesh.fsdp=2"), marks=pytest.mark.thorough),
        pytest.param(2, ("mesh.data=4", "mesh.tensor=2"), marks=pytest.mark.thorough),
        pytest.param(4, ("mesh.data=4", "mesh.tensor=2"), marks=pytest.mark.thorough),
    ],
)
def test_fast_axes_stay_within_a_slice(slices, words):
    ready, sent = step_on(slices, *words)
    far, near = [one for one in sent if one.crosses], [one for one in sent if not one.crosses]
    assert near, "the fast axes talk"
    assert far, "the slices sum their gradients"
    assert {one.kind for one in far} <= {"all-reduce", "reduce-scatter"}
    assert all("data" in one.axes for one in far)
    # each gradient, in f32, once around; with the loss's and the norm's numbers
    whole = sum(leaf.size * 4 for leaf in jax.tree.leaves(ready.abstract_state.params))
    assert sum(one.bytes for one in far) <= 2 * whole + 4096
