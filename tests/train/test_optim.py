"""Test optimizers against torch and optax, muon's properties, bf16 weights, and meshes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
import transformers
from jax.sharding import PartitionSpec
from reference_models import BASE, FAMILIES

from dovetail.core.mesh import TRAIN, Placement, make_mesh, state_shardings
from dovetail.core.spec import ParamSpec, Stored, abstract, leaves, tree_map
from dovetail.core.training import Optimizer
from dovetail.models.registry import parse_config
from dovetail.models.spec import spec
from dovetail.train.optim import (
    RMS,
    apply,
    clip,
    ema_update,
    global_norm,
    is_hidden_matrix,
    make_optimizer,
    matrix_shape,
    orthogonalize,
)

pytestmark = pytest.mark.slow

LR = 1e-2
V, D, N, H, F, E = 24, 16, 4, 6, 32, 8


def declare(shape, axes, stored=None, **more):
    return ParamSpec(shape, axes, Stored(("w",), stored or shape), **more)


# One weight of each kind.
SPECS = {
    "embed": declare((V, D), ("vocab", "embed"), active=0.0),
    "head": declare((V, D), ("vocab", "embed")),
    "layers": tuple(
        {
            "norm": declare((D,), (None,), init="ones", active=0.0),
            "q": declare((N, H, D), ("heads", None, "embed"), (N * H, D)),
            "o": declare((D, N, H), ("embed", "heads", None), (D, N * H)),
            "q_bias": declare((N, H), ("heads", None), (N * H,), init="zeros", active=0.0),
            "experts": declare((E, F, D), ("experts", "mlp", "embed"), active=0.25),
        }
        for _ in range(2)
    ),
}
MATRICES = ("q", "o", "experts")


def rate(step):
    return jnp.float32(LR) / (1.0 + jnp.asarray(step, jnp.float32))


def draw(seed, std, dtype=jnp.float32, specs=SPECS):
    """Made by numpy: nothing to compile."""
    rng = np.random.default_rng(seed)
    return tree_map(lambda s: jnp.asarray(rng.normal(size=s.shape) * std, dtype), specs)


def weights(dtype=jnp.float32):
    return draw(0, 0.5, dtype)


def gradients(step, like=jnp.float32, specs=SPECS):
    return draw(100 + step, 1.0, like, specs)


def stepper(optimizer, **more):
    def step(params, state, grads, key):
        updates, state = optimizer.update(grads, state, params)
        return apply(params, updates, key), state

    return jax.jit(step, **more)


def train(optimizer, params, steps, specs=SPECS):
    dtype = jax.tree.leaves(params)[0].dtype
    state, step = jax.jit(optimizer.init)(params), stepper(optimizer)
    for i in range(steps):
        params, state = step(params, state, gradients(i, dtype, specs), jax.random.key(i))
    return params, state


def first_updates(settings, grads, params) -> Any:
    """The updates of the first step, and the state after it."""
    optimizer = make_optimizer(settings, rate, SPECS)
    return jax.jit(lambda g, p: optimizer.update(g, optimizer.init(p), p))(grads, params)


def by_name(tree):
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(x, np.float32) for path, x in flat}


def assert_same(got, want, tol):
    got, want = by_name(got), by_name(want)
    assert got.keys() == want.keys()
    for name in want:
        np.testing.assert_allclose(got[name], want[name], rtol=tol, atol=tol, err_msg=name)


# --- what each weight is ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama3.1", "llama3.2", "gpt-oss", "deepseek-v3", "gemma4-moe"])
def test_specs_distinguish_matrices_from_the_rest(family):
    kind, more = FAMILIES[family]
    specs = spec(parse_config(getattr(transformers, kind)(**BASE | more).to_dict()))
    for path, s in leaves(specs):
        name = path.rpartition(".")[2]
        vector = name.endswith(("norm", "bias", "scale")) or name in ("sinks", "scalar")
        assert is_hidden_matrix(s) == (not vector and name not in ("embed", "head")), path
        if is_hidden_matrix(s) and "experts" not in path and not (s.stored.at or s.stored.view):
            assert matrix_shape(s) == s.stored.shape, path


@pytest.mark.parametrize("name", ["adamw", "muon", "adafactor"])
def test_only_weights_that_multiply_decay(name):
    params = weights()
    updates, _ = first_updates(Optimizer(name, weight_decay=0.1), draw(0, 0.0), params)
    updates, params = by_name(updates), by_name(params)
    for path in params:
        decays = path == "head" or path.rpartition(".")[2] in MATRICES
        np.testing.assert_allclose(updates[path], -LR * 0.1 * params[path] * decays, rtol=1e-5, atol=1e-9, err_msg=path)


# --- against others ---------------------------------------------------------------------------------------------------


def test_adamw_equals_torch():
    settings = Optimizer(lr=LR, weight_decay=0.1, beta1=0.8, beta2=0.9)
    start = weights()
    got, _ = train(make_optimizer(settings, rate, SPECS), start, 10)

    tensors = {k: torch.nn.Parameter(torch.tensor(v)) for k, v in by_name(start).items()}
    decays = {k: k == "head" or k.rpartition(".")[2] in MATRICES for k in tensors}
    groups = [
        dict(params=[t for k, t in tensors.items() if decays[k] == d], weight_decay=0.1 * d) for d in (True, False)
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.8, 0.9), eps=1e-8)
    for step in range(10):
        grads = by_name(gradients(step))
        for k, t in tensors.items():
            t.grad = torch.tensor(grads[k])
        for group in optimizer.param_groups:
            group["lr"] = float(rate(step))
        optimizer.step()
    for k, x in by_name(got).items():
        np.testing.assert_allclose(x, tensors[k].detach().numpy(), rtol=1e-6, atol=1e-6, err_msg=k)


def test_adafactor_equals_optax():
    specs = {"w": declare((160, 200), ("mlp", "embed")), "norm": declare((200,), (None,), active=0.0)}
    start = draw(0, 0.02, specs=specs)
    got, state = train(make_optimizer(Optimizer("adafactor", weight_decay=0.0), rate, specs), start, 5, specs)
    want, _ = train(optax.adafactor(rate, multiply_by_parameter_scale=False), start, 5, specs)
    assert_same(got, want, 1e-6)
    assert max(x.size for x in jax.tree.leaves(state)) == 200  # a row and a column, nothing of the matrix's size


def test_clipping_equals_torch():
    grads = gradients(0)
    tensors = [torch.nn.Parameter(torch.zeros(x.shape)) for x in jax.tree.leaves(grads)]
    for limit in (1.0, 1e6):
        for t, g in zip(tensors, jax.tree.leaves(grads), strict=True):
            t.grad = torch.tensor(np.asarray(g))
        norm = torch.nn.utils.clip_grad_norm_(tensors, limit)
        assert float(global_norm(grads)) == pytest.approx(float(norm), rel=1e-6)
        clipped = jax.tree.leaves(clip(grads, global_norm(grads), limit))
        for t, g in zip(tensors, clipped, strict=True):
            assert t.grad is not None
            np.testing.assert_allclose(g, t.grad.numpy(), rtol=1e-5)
    assert clip(grads, global_norm(grads), 0.0) is grads


# --- Muon -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(24, 64), (3, 64, 24)], ids=str)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_orthogonalized_singular_values_are_near_one(shape, dtype):
    x = np.random.default_rng(0).normal(size=shape)
    x = x * np.logspace(0, -1.5, shape[-1])  # far from orthogonal: a gradient's directions differ in strength
    ours = jax.jit(orthogonalize)
    values = np.linalg.svd(np.asarray(ours(jnp.asarray(x, dtype)), np.float32), compute_uv=False)
    assert values.min() > 0.5 and values.max() < 1.3
    assert not np.any(ours(jnp.zeros(shape, dtype)))


def test_muon_steps_are_orthogonal_for_matrices_and_adams_for_the_rest():
    params = weights()
    updates, state = first_updates(Optimizer("muon", weight_decay=0.0), gradients(0), params)
    adams, _ = first_updates(Optimizer(weight_decay=0.0), gradients(0), params)
    layer = {k: np.asarray(v) / -LR for k, v in updates["layers"][1].items()}
    for name, (r, c) in dict(q=(N * H, D), o=(D, N * H), experts=(F, D)).items():
        values = np.linalg.svd(layer[name].reshape(-1, r, c), compute_uv=False) / (RMS * np.sqrt(max(r, c)))
        assert values.min() > 0.5 and values.max() < 1.3, name
        rms = np.sqrt(np.mean(layer[name] ** 2))
        assert 0.7 * RMS < rms < 1.2 * RMS, name  # what an Adam step has
    for name in ("norm", "q_bias"):
        np.testing.assert_array_equal(updates["layers"][1][name], adams["layers"][1][name])
    for name in ("embed", "head"):
        np.testing.assert_array_equal(updates[name], adams[name])
    held = sum(x.size for x in jax.tree.leaves(state))
    hidden = sum(s.size for _, s in leaves(SPECS) if is_hidden_matrix(s))
    assert held < 2 * sum(s.size for _, s in leaves(SPECS)) - hidden + 10  # one moment for a matrix, not two


@pytest.mark.parametrize("name", ["adamw", "muon", "adafactor"])
def test_a_small_problem_is_learnt(name):
    """Two layers fitted to two others; the same learning rate serves all optimizers."""
    specs = {"up": declare((32, 16), ("mlp", "embed")), "down": declare((16, 32), ("embed", "mlp"))}
    true, params = (draw(k, 0.3, specs=specs) for k in (1, 2))
    x = jnp.asarray(np.random.default_rng(3).normal(size=(256, 16)), jnp.float32)

    def predict(p):
        return jnp.tanh(x @ p["up"].T) @ p["down"].T

    def loss(p):
        return jnp.mean(jnp.square(predict(p) - predict(true)))

    optimizer = make_optimizer(Optimizer(name, weight_decay=0.0), lambda step: jnp.float32(0.01), specs)

    def step(carry, _):
        params, state = carry
        updates, state = optimizer.update(jax.grad(loss)(params), state, params)
        return (apply(params, updates, jax.random.key(0)), state), None

    (end, _), _ = jax.jit(lambda p: jax.lax.scan(step, (p, optimizer.init(p)), length=300))(params)
    assert float(loss(end)) < 0.05 * float(loss(params))


# --- bf16 -------------------------------------------------------------------------------------------------------------


def test_rounding_is_unbiased():
    param = jnp.asarray([1.0, -1.0, 3.0, 1e-3, 0.0], jnp.bfloat16)
    update = jnp.asarray([1e-3, 3e-3, -1e-3, 1e-7, 1e-9], jnp.float32)  # each below half a step of bf16
    once = jax.vmap(lambda key: apply({"w": param}, {"w": update}, key)["w"])
    many = jax.jit(lambda key: once(jax.random.split(key, 20000)))(jax.random.key(0))
    assert many.dtype == jnp.bfloat16
    exact = np.asarray(param, np.float32) + np.asarray(update)
    many = np.asarray(many, np.float32)
    spread = many.std(0) / np.sqrt(len(many))
    assert np.all(np.abs(many.mean(0) - exact) <= 4 * spread + 1e-12)
    assert all(len(np.unique(column)) <= 2 for column in many.T)  # one of the two neighbours
    assert np.all(spread[:3] > 0)


def test_rounding_draws_independently_for_each_element():
    one = jnp.ones((64, 512), jnp.bfloat16)
    rounded = [jax.jit(apply)(one, 2.0**-9 + 0 * one, jax.random.key(k)) for k in (0, 1)]  # a quarter of bf16's step
    up = np.asarray(rounded, np.float32) > 1
    assert np.all(np.abs(up.mean((1, 2)) - 0.25) < 0.015)
    assert np.abs(up.mean((0, 1)) - 0.25).max() < 0.2 and np.abs(up.mean((0, 2)) - 0.25).max() < 0.07
    assert abs(np.corrcoef(up[0].ravel(), up[1].ravel())[0, 1]) < 0.03
    assert abs(np.corrcoef(up[0, :, 1:].ravel(), up[0, :, :-1].ravel())[0, 1]) < 0.03


def test_rounding_keeps_nan_and_infinity():
    x = jnp.asarray([np.nan, np.inf, -np.inf], jnp.bfloat16)
    got = np.asarray(jax.jit(apply)(x, jnp.zeros(3), jax.random.key(0)), np.float32)
    np.testing.assert_array_equal(got, np.asarray(x, np.float32))


def test_f32_weights_are_updated_exactly():
    params = weights()
    updates = gradients(0)
    assert_same(jax.jit(apply)(params, updates, jax.random.key(0)), jax.tree.map(np.add, params, updates), 0)


@pytest.mark.parametrize("name", ["adamw", "muon", "adafactor"])
def test_the_state_of_a_bf16_model_is_f32(name):
    optimizer, params = make_optimizer(Optimizer(name), rate, SPECS), abstract(SPECS, jnp.bfloat16)
    state = jax.eval_shape(optimizer.init, params)
    got, after = jax.eval_shape(stepper(optimizer), params, state, params, jax.random.key(0))
    assert after == state
    assert {x.dtype for x in jax.tree.leaves(state)} == {jnp.dtype("float32"), jnp.dtype("int32")}
    assert {x.dtype for x in jax.tree.leaves(got)} == {jnp.dtype("bfloat16")}


def test_ema():
    params = {"w": jnp.asarray([1.0, 3.0], jnp.bfloat16)}
    ema = ema_update({"w": jnp.asarray([0.0, 3.0], jnp.float32)}, params, 0.9)
    np.testing.assert_allclose(ema["w"], [0.1, 3.0], rtol=1e-6)
    assert ema["w"].dtype == jnp.float32


# --- a mesh -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["adamw", "muon", "adafactor"])
def test_a_mesh_gives_what_one_device_gives(name):
    placement = Placement(make_mesh(dict(fsdp=2, expert=2, tensor=2)), TRAIN)
    shardings = placement.shardings(SPECS)
    optimizer = make_optimizer(Optimizer(name), rate, SPECS)
    of_state = state_shardings(optimizer, abstract(SPECS, jnp.float32), shardings)
    one = weights()
    params = jax.device_put(one, shardings)
    state = jax.jit(optimizer.init, out_shardings=of_state)(params)
    step = stepper(optimizer, out_shardings=(shardings, of_state))
    for i in range(3):
        params, state = step(params, state, jax.device_put(gradients(i), shardings), jax.random.key(i))
    want, want_state = train(optimizer, one, 3)
    assert_same(params, want, 1e-5)
    assert_same(state, want_state, 1e-4)
    held = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state))
    assert held < 0.4 * sum(x.nbytes for x in jax.tree.leaves(state))


def test_factored_state_is_sharded_by_its_remaining_dims():
    specs = {"w": declare((128, 256), ("mlp", "embed"))}
    placement = Placement(make_mesh(dict(fsdp=4, tensor=2)), TRAIN)
    optimizer = make_optimizer(Optimizer("adafactor"), rate, specs)
    shardings = state_shardings(optimizer, abstract(specs, jnp.float32), placement.shardings(specs))
    shapes = jax.tree.leaves(jax.eval_shape(optimizer.init, abstract(specs, jnp.float32)))
    found = {x.shape: s.spec for x, s in zip(shapes, jax.tree.leaves(shardings), strict=True)}
    assert found[(128,)] == PartitionSpec(("tensor",)) and found[(256,)] == PartitionSpec(("fsdp",))
    assert found[()] == PartitionSpec()
