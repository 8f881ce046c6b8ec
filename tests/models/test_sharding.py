"""Test models on eight devices: sharded loading and running give the numbers of one device."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from corners import corners
from jax.sharding import PartitionSpec
from reference_models import reference
from refusals import refuses

from dovetail.core.mesh import SERVE, TRAIN, Placement, make_mesh
from dovetail.core.spec import leaves
from dovetail.core.types import Packed, Paged
from dovetail.io.load import load
from dovetail.models.decoder import forward, init_cache, unembed
from dovetail.models.spec import spec
from dovetail.ops.paged import token_rows

pytestmark = pytest.mark.slow

# name -> (family, what differs from the reference): two layers, for compiling is all the time; experts that divide
MODELS = {
    "dense": ("llama3.1", {}),
    "gpt-oss": ("gpt-oss", dict(num_local_experts=8)),
    "gpt-oss, 5 experts": ("gpt-oss", {}),
    "deepseek-v3": ("deepseek-v3", {}),
    "qwen3-moe": ("qwen3-moe", {}),
    "phi4-mini": ("phi4-mini", {}),  # q, k and v in one stored tensor
    "gemma4-moe": ("gemma4-moe", dict(num_experts=8, layer_types=("sliding_attention", "full_attention"))),
}
MESHES = {
    "three axes": dict(fsdp=2, tensor=2, expert=2),
    "fsdp": dict(fsdp=8),
    "tensor": dict(tensor=4, data=2),
    "expert": dict(expert=8),
}
RULES = {"train": TRAIN, "serve": SERVE}
FAST = {("dense", "three axes", "train")}
USUAL = {("dense", "tensor", "serve"), ("dense", "fsdp", "train"), ("gpt-oss", "expert", "train")}


def _marks(case: tuple[str, str, str]):
    usual = case in USUAL or case[1:] == ("three axes", "train")
    return () if case in FAST else pytest.mark.slow if usual else pytest.mark.thorough


CASES = [
    pytest.param(model, mesh, rules, marks=_marks((model, mesh, rules)))
    for model in MODELS
    for mesh in MESHES
    for rules in RULES
    if (mesh, rules) != ("fsdp", "serve")  # nothing is split there
    if model != "gpt-oss, 5 experts" or mesh == "three axes"
]
PAGE, PAGES = 4, 6


@functools.cache
def placed(mesh: str, rules: str) -> Placement:
    return Placement(make_mesh(MESHES[mesh]), RULES[rules])


def _folder(model: str):
    family, changes = MODELS[model]
    return reference(family, num_hidden_layers=2, **changes)[1]


@functools.cache
def on_one(model: str):
    return load(_folder(model), dtype="f32")


@functools.cache
def on_eight(model: str, mesh: str, rules: str):
    return load(_folder(model), dtype="f32", placement=placed(mesh, rules))


@functools.partial(jax.jit, static_argnames="cfg")
def packed_logits(params, cfg, tokens, ctx):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return unembed(params, cfg, forward(params, cfg, tokens, positions, ctx)[0])


def packed(model, rows: int, length: int, placement: Placement | None = None) -> np.ndarray:
    tokens = np.random.default_rng(0).integers(3, 160, (rows, length)).astype(np.int32)
    segments = (np.arange(length) // 9 + np.zeros((rows, 1))).astype(np.int32)
    return np.asarray(packed_logits(model.params, model.config, tokens, Packed(segments, placement=placement)))


@functools.cache
def expected(model: str, rows: int, length: int) -> np.ndarray:
    return packed(on_one(model), rows, length)


# --------------------------------------------------------------------------------------------------------- loading


@pytest.mark.parametrize(("model", "mesh", "rules"), CASES)
def test_sharded_loading_equals_whole_loading(model, mesh, rules):
    whole, parts, placement = on_one(model), on_eight(model, mesh, rules), placed(mesh, rules)
    tree = leaves(spec(whole.config))
    for (path, leaf), a, b in zip(tree, jax.tree.leaves(whole.params), jax.tree.leaves(parts.params), strict=True):
        assert b.sharding == placement.sharding(leaf.axes, leaf.shape), path
        np.testing.assert_array_equal(a, b, err_msg=path)


def share(model) -> float:
    """The part of the weights' bytes that one device holds."""
    arrays = jax.tree.leaves(model.params)
    return sum(a.addressable_shards[0].data.nbytes for a in arrays) / sum(a.nbytes for a in arrays)


def test_each_device_has_its_shard():
    """Norms and biases stay whole, so a little more than the mesh's quotient."""
    assert 1 / 4 < share(on_eight("dense", "three axes", "train")) < 1.1 / 4
    assert 1 / 8 < share(on_eight("dense", "fsdp", "train")) < 1.2 / 8
    assert 1 / 2 < share(on_eight("dense", "three axes", "serve")) < 1.1 / 2
    assert 1 / 8 < share(on_eight("gpt-oss", "three axes", "train")) < 1.4 / 8
    assert (
        share(on_eight("gpt-oss", "expert", "serve")) < 0.4 < share(on_eight("gpt-oss, 5 experts", "expert", "serve"))
    )


def shard_shape(array) -> tuple[int, ...]:
    return array.addressable_shards[0].data.shape


def test_sharded_dims():
    train = on_eight("gpt-oss", "three axes", "train").params
    layer = train["layers"][0]
    assert shard_shape(train["embed"]) == (160 // 2, 48 // 2)
    assert shard_shape(layer["attn"]["q"]) == (4 // 2, 16, 48 // 2)
    assert shard_shape(layer["attn"]["k"]) == (2 // 2, 16, 48 // 2)
    assert shard_shape(layer["moe"]["experts"]["gate"]) == (8 // 2, 80 // 2, 48 // 2)
    assert shard_shape(layer["moe"]["experts"]["down"]) == (8 // 2, 48 // 2, 80 // 2)
    assert shard_shape(layer["attn_norm"]) == (48,)


def test_dims_that_the_mesh_does_not_divide_are_replicated():
    params = on_eight("dense", "tensor", "train").params
    assert shard_shape(params["layers"][0]["attn"]["q"]) == (1, 16, 48)
    assert shard_shape(params["layers"][0]["attn"]["k"]) == (2, 16, 48), "2 key heads over 4 devices"
    experts = on_eight("gpt-oss, 5 experts", "three axes", "train").params["layers"][0]["moe"]["experts"]
    assert shard_shape(experts["up"]) == (5, 80 // 2, 48 // 2)
    cut = placed("tensor", "train").partition
    assert cut(("vocab", "embed"), (161, 48)) == PartitionSpec(None, None)
    assert cut(("vocab", "embed"), (160, 48)) == PartitionSpec("tensor", None)


def test_a_mesh_of_another_size_is_refused():
    with refuses(naming="needs 6 devices; there are 8"):
        make_mesh(dict(fsdp=3, tensor=2))
    with refuses(naming="pipeline"):
        make_mesh(dict(pipeline=8))


# --------------------------------------------------------------------------------------------------------- running


@pytest.mark.parametrize(("model", "mesh", "rules"), CASES)
def test_packed(model, mesh, rules):
    ours = packed(on_eight(model, mesh, rules), 8, 24, placed(mesh, rules))
    np.testing.assert_allclose(ours, expected(model, 8, 24), atol=1e-5, rtol=0)


@pytest.mark.parametrize("model", corners(["gpt-oss", "deepseek-v3"], ["gpt-oss"]))
def test_packed_rows_that_the_mesh_does_not_divide(model):
    ours = packed(on_eight(model, "three axes", "train"), 3, 7, placed("three axes", "train"))
    np.testing.assert_allclose(ours, expected(model, 3, 7), atol=1e-5, rtol=0)


def test_activations_are_split_by_token():
    placement = placed("three axes", "train")
    model = on_eight("dense", "three axes", "train")
    tokens = jnp.zeros((8, 24), jnp.int32)
    run = jax.jit(lambda params: forward(params, model.config, tokens, tokens, Packed(tokens, placement=placement))[0])
    assert shard_shape(run(model.params)) == (8 // 4, 24, 48)


@functools.partial(jax.jit, static_argnames="cfg")
def paged_logits(params, cfg, tokens, ctx, cache):
    _, positions, _ = token_rows(ctx, tokens.shape[0])
    hidden, cache = forward(params, cfg, tokens, positions, ctx, cache)
    return unembed(params, cfg, hidden), cache


def paged(model, placement: Placement | None = None) -> np.ndarray:
    """Two prompts of 9 and 13 tokens, then one more token of each."""
    cache = init_cache(model.config, 2 * PAGES, PAGE, jnp.float32)
    if placement:
        axes = (None, None, "kv_heads", None)
        cache = jax.tree.map(lambda x: jax.device_put(x, placement.sharding(axes, x.shape)), cache)
    tables = jnp.arange(2 * PAGES, dtype=jnp.int32)[::-1].reshape(2, PAGES)
    logits = []
    for lens, cu, size in (([9, 13], [0, 9, 22], 24), ([10, 14], [0, 1, 2], 2)):
        tokens = np.random.default_rng(size).integers(3, 160, size).astype(np.int32)
        cu_q_lens, kv_lens = jnp.asarray(cu, jnp.int32), jnp.asarray(lens, jnp.int32)
        ctx = Paged(tables, kv_lens, cu_q_lens, jnp.asarray([2], jnp.int32), placement=placement)
        out, cache = paged_logits(model.params, model.config, tokens, ctx, cache)
        logits.append(np.asarray(out[: cu[-1]]))
    return np.concatenate(logits)


@pytest.mark.parametrize("mesh", ["three axes", pytest.param("tensor", marks=pytest.mark.thorough)])
@pytest.mark.parametrize(
    "model",
    corners(MODELS, ["dense"]),
)
def test_paged(model, mesh):
    ours = paged(on_eight(model, mesh, "serve"), placed(mesh, "serve"))
    np.testing.assert_allclose(ours, _paged_on_one(model), atol=1e-5, rtol=0)


@functools.cache
def _paged_on_one(model: str) -> np.ndarray:
    return paged(on_one(model))


@pytest.mark.parametrize("model", corners(["dense", "gpt-oss", "deepseek-v3"], ["gpt-oss"]))
def test_gradients(model):
    """The backward pass too, through the experts' exchange."""

    def loss(params, ctx):
        return jnp.mean(jnp.square(packed_logits(params, on_one(model).config, tokens, ctx)))

    tokens = np.random.default_rng(0).integers(3, 160, (8, 24)).astype(np.int32)
    segments = np.zeros((8, 24), np.int32)
    placement = placed("three axes", "train")
    grad = jax.jit(jax.grad(loss))
    theirs = grad(on_one(model).params, Packed(segments))
    ours = grad(on_eight(model, "three axes", "train").params, Packed(segments, placement=placement))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5 * max(1, np.abs(b).max())), ours, theirs)
