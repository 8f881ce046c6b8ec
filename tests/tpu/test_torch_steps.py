"""A step of a torch module, by the bridge, compiled by libtpu: FSDP over four chips, in bf16."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from dovetail.core.recipe import read
from dovetail.plan.topology import parse, tpu_devices
from dovetail.train.external import external_objective
from dovetail.train.prepare import prepare
from dovetail.train.settings import Pretrain

MODELS = Path(__file__).parents[1] / "interop" / "torch" / "torch_models.py"


@pytest.mark.tpu
def test_a_recipe_with_a_torch_module_is_compiled(libtpu):
    recipe = {
        "model": {"torch": f"{MODELS}:gpt2", "args": {"width": 128}}, "batch": 8, "length": 64, "steps": 10,
        "mesh": {"data": 1, "fsdp": 4}, "data": {"sources": [{"path": "anything"}]},
    }  # fmt: skip
    settings = read(Pretrain, recipe)
    ready = prepare(settings, external_objective(settings), tpu_devices(parse("v5e:2x2"), 1), "tpu")
    lowered = ready.lower()
    assert not any("custom_call" in line and "callback" in line for line in lowered.as_text().splitlines())
    text = lowered.compile().as_text()
    assert "bf16" in text and "all-gather" in text
    largest = max(jax.tree.leaves(ready.abstract_state.params), key=lambda x: x.size)
    assert largest.dtype == jnp.float32 and largest.sharding.shard_shape(largest.shape)[0] * 4 == largest.shape[0]
