"""Test weights published for the engine: shapes, casts, joined projections and shardings."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from corners import corners
from reference_models import reference
from refusals import refuses

from dovetail.core.errors import CheckpointError
from dovetail.core.mesh import SERVE, TRAIN, Placement, make_mesh
from dovetail.core.spec import init, leaves
from dovetail.core.types import Packed
from dovetail.io.load import load
from dovetail.models.decoder import forward, unembed
from dovetail.models.mtp import with_mtp
from dovetail.models.publish import publish, serving_spec
from dovetail.models.spec import spec

pytestmark = pytest.mark.slow

MODELS = ["llama3.1", "gemma4-per-layer", "deepseek-v3", "qwen3-moe"]
TOKENS = np.random.default_rng(0).integers(3, 160, (2, 16)).astype(np.int32)


@functools.cache
def model(name: str):
    return load(reference(name, num_hidden_layers=2)[1] if name == "llama3.1" else reference(name)[1], dtype="f32")


def on(**axes: int) -> Placement:
    count = int(np.prod(list(axes.values())))
    return Placement(make_mesh(axes, jax.devices()[:count]), SERVE)


@functools.partial(jax.jit, static_argnames=("cfg", "placement"))
def logits(params, cfg, placement=None):
    positions = jnp.broadcast_to(jnp.arange(TOKENS.shape[1]), TOKENS.shape)
    hidden, _ = forward(params, cfg, TOKENS, positions, Packed(jnp.ones_like(TOKENS), placement=placement))
    return unembed(params, cfg, hidden)


def check_form(params, cfg, dtype, placement=None) -> None:
    declared = leaves(serving_spec(cfg, placement))
    given = jax.tree_util.tree_leaves_with_path(params)
    assert len(declared) == len(given)
    for (path, leaf), (_, array) in zip(declared, given, strict=True):
        assert (array.shape, array.dtype) == (leaf.shape, jnp.dtype(leaf.dtype or dtype)), path
        if placement:
            assert array.sharding == placement.sharding(leaf.axes, leaf.shape), path


@pytest.mark.parametrize("name", MODELS)
def test_published_weights_have_the_declared_shapes_and_logits(name):
    params, cfg = model(name).params, model(name).config
    ours = publish(params, cfg, "float32")
    check_form(ours, cfg, "float32")
    np.testing.assert_allclose(logits(ours, cfg), logits(params, cfg), atol=1e-5, rtol=0)


def test_projections_of_one_input_are_one_product():
    cfg = model("llama3.1").config
    layer = publish(model("llama3.1").params, cfg, "float32")["layers"][0]
    assert layer["attn"]["q+k+v"].shape == (1, 4 + 2 + 2, 16, 48)
    assert layer["attn"]["q+k+v_bias"].shape == (1, 8, 16)
    assert layer["mlp"]["gate+up"].shape == (1, 2 * 80, 48)
    assert not {"q", "k", "v", "q_bias"} & set(layer["attn"])


@pytest.mark.parametrize("tensor", corners([2, 4], [2]))
@pytest.mark.parametrize("name", ["llama3.1", pytest.param("deepseek-v3", marks=pytest.mark.slow)])
def test_joined_weights_are_sharded_on_a_mesh(name, tensor):
    """From one device, from a trainer's mesh of the same devices, and from another set of devices."""
    cfg, placement = model(name).config, on(tensor=tensor)
    ours = publish(model(name).params, cfg, "float32", placement)
    check_form(ours, cfg, "float32", placement)
    attn, mlp = (ours["layers"][0][half] for half in ("attn", "mlp"))
    assert mlp["gate+up"].addressable_shards[0].data.shape == (1, 160 // tensor, 48)
    assert ("q+k+v" in attn) == (name == "llama3.1" and tensor == 2), "2 key heads cannot be cut for 4 devices"
    np.testing.assert_allclose(logits(ours, cfg, placement), logits(model(name).params, cfg), atol=1e-5, rtol=0)
    for devices in (jax.devices()[:tensor], jax.devices()):
        trainer = Placement(make_mesh(dict(fsdp=len(devices)), devices), TRAIN)
        masters = jax.device_put(model(name).params, trainer.shardings(spec(cfg)))
        again = publish(masters, cfg, "float32", placement)
        jax.tree.map(np.testing.assert_array_equal, again, ours)
        check_form(again, cfg, "float32", placement)


def test_published_weights_do_not_share_the_trainers_buffers():
    cfg = model("deepseek-v3").config
    masters = init(with_mtp(spec(cfg), cfg), jax.random.key(0), "float32")
    ours = publish(masters, cfg, "bfloat16")
    check_form(ours, cfg, "bfloat16")
    before = jax.tree.map(np.asarray, ours)
    jax.tree.map(lambda x: x.delete(), masters)  # as a step that they are donated to
    jax.tree.map(np.testing.assert_array_equal, ours, before)
    assert ours["layers"][1]["moe"]["choice_bias"].dtype == jnp.float32, "it says its own dtype"


def test_donated_weights_are_not_copied():
    cfg = model("llama3.1").config
    params = init(spec(cfg), jax.random.key(0), "float32")
    embed = params["embed"].unsafe_buffer_pointer()
    ours = publish(params, cfg, "float32", take=True)
    assert ours["embed"].unsafe_buffer_pointer() == embed and not params


def test_weights_of_another_model_are_refused():
    cfg = model("llama3.1").config
    params = dict(model("llama3.1").params)
    with refuses("embed", CheckpointError, naming="must have shape [160, 48], got [150, 48]"):
        publish({**params, "embed": params["embed"][:150]}, cfg, "float32")
    with refuses("norm", CheckpointError):
        publish({"embed": params["embed"], "layers": params["layers"], "head": params["head"]}, cfg, "float32")
    with refuses("adapter", CheckpointError):
        publish({**params, "adapter": np.zeros(2)}, cfg, "float32")
    with refuses(None, CheckpointError, naming="dt.load"):
        publish([1, 2], cfg, "float32")
