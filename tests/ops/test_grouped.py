"""The NVIDIA grouped matmul, interpreted, against XLA's; experts that use it, on one device and on a mesh."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from described import a_device, a_mesh
from jax import lax
from jax.experimental import pallas as pl

from dovetail.core.mesh import TRAIN, Placement, make_mesh
from dovetail.ops import linear, moe
from dovetail.ops.glu import Glu
from dovetail.ops.kernels.gpu.grouped import Blocks, default_blocks, grouped_matmul, tiles_of

pytestmark = pytest.mark.slow

M, K, N = 70, 40, 24
SIZES = {
    "uneven": [33, 1, 20, 16],
    "a multiple of the block": [16, 32, 16, 6],
    "empty groups": [0, 0, 70, 0],
    "rows in no group": [7, 0, 30, 0],
    "no rows at all": [0, 0, 0, 0],
}
SMALL = Blocks(16, 16, 16, swizzle=2)
interpreted = functools.partial(
    grouped_matmul, forward=SMALL, to_x=Blocks(32, 16, 16), to_w=Blocks(16, 32, 16), interpret=True
)


def normal(seed: int, *shape: int, dtype=jnp.float32) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


def ragged(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
    numbers = lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), [0], [0])
    real = jnp.arange(len(x)) < sizes.sum()
    return jnp.where(real[:, None], lax.ragged_dot_general(x, w, sizes, numbers), 0)


@functools.partial(jax.jit, static_argnames="multiply")
def product_and_gradients(multiply, x, w, sizes):
    def loss(x, w):
        y = multiply(x, w, sizes)
        return jnp.sum(jnp.sin(y.astype(jnp.float32))), y

    return jax.grad(loss, (0, 1), has_aux=True)(x, w)


def check(multiply, x, w, sizes: list[int], atol: float) -> None:
    """Product and gradients are those of XLA's own."""
    ours, theirs = (product_and_gradients(run, x, w, jnp.asarray(sizes, jnp.int32)) for run in (multiply, ragged))
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert a.dtype == x.dtype
        np.testing.assert_allclose(a.astype(jnp.float32), b.astype(jnp.float32), atol=atol)


@pytest.mark.parametrize("kind", SIZES)
def test_equals_ragged_dot(kind):
    check(interpreted, normal(0, M, K), normal(1, 4, N, K), SIZES[kind], atol=5e-5)


@pytest.mark.thorough
@pytest.mark.slow  # the interpreter takes its time
def test_bf16_and_default_blocks():
    x, w = normal(0, M, K, dtype=jnp.bfloat16), normal(1, 4, N, K, dtype=jnp.bfloat16)
    check(functools.partial(grouped_matmul, interpret=True), x, w, SIZES["uneven"], atol=0.15)


@pytest.mark.parametrize("rows", [1, 4, 16, 64])
@pytest.mark.parametrize("kind", SIZES)
def test_tiles_cover_each_row_once_and_no_two_groups(kind, rows):
    group, first, count = (np.asarray(a) for a in tiles_of(jnp.asarray(SIZES[kind], jnp.int32), M, rows))
    expected = np.repeat(np.arange(5), [*SIZES[kind], M - sum(SIZES[kind])])
    seen = np.concatenate([np.arange(f, f + c) for f, c in zip(first, count, strict=True)])
    np.testing.assert_array_equal(seen, np.arange(M))
    np.testing.assert_array_equal(np.repeat(group, count), expected)


def test_default_blocks_follow_the_rows_of_a_group():
    assert default_blocks(32768, 8, jnp.bfloat16).rows == 128
    assert default_blocks(256, 128, jnp.bfloat16).rows == 16
    assert default_blocks(32768, 8, jnp.float32).inner == default_blocks(32768, 8, jnp.bfloat16).inner // 2


# ----------------------------------------------------------------------------------------------------------- experts

B, T, D, E, F, TOP = 4, 6, 16, 4, 24, 2


def some_experts():
    shapes = {"gate": (E, F, D), "up": (E, F, D), "down": (E, D, F)}
    shapes |= {"gate_bias": (E, F), "up_bias": (E, F), "down_bias": (E, D)}
    return {name: normal(i, *shape) * 0.3 for i, (name, shape) in enumerate(shapes.items())}


def tokens():
    x = normal(10, B, T, D)
    weights, chosen = lax.top_k(jax.nn.softmax(normal(11, B * T, E)), TOP)
    return x, weights, chosen


def outputs_and_gradients(run):
    x, weights, chosen = tokens()

    def loss(x, weights, params):
        out = run(x, weights, chosen, params, Glu())
        return jnp.sum(jnp.sin(out)), out

    return jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(x, weights, some_experts())


def flat_reference(x, weights, chosen, params, glu):
    return moe.experts_reference(x.reshape(-1, D), weights, chosen, params, glu).reshape(x.shape)


@pytest.mark.slow
@pytest.mark.parametrize(
    "axes",
    [None, dict(expert=2, tensor=2, fsdp=2), dict(context=2, expert=2, fsdp=2), dict(context=4, tensor=2)],
    ids=str,
)
@pytest.mark.thorough
def test_experts_by_the_kernel_equal_the_reference(monkeypatch, axes):
    monkeypatch.setattr(linear, "grouped_kernel", lambda *_: interpreted)
    placement = Placement(make_mesh(axes), TRAIN) if axes else None
    ours = outputs_and_gradients(functools.partial(moe.experts, placement=placement))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=3e-5), ours, outputs_and_gradients(flat_reference))


@pytest.mark.parametrize(
    ("axes", "tokens_a_device"),
    [
        (dict(fsdp=2, context=2, tensor=2), B * T // 4),
        (dict(context=2, expert=4), B * T // 2),  # an expert serves all the tokens of its slice
    ],
    ids=str,
)
def test_a_device_computes_its_own_tokens(monkeypatch, axes, tokens_a_device):
    seen = []

    def multiply(x, w, sizes):
        seen.append(len(x))
        return ragged(x, w, sizes)

    monkeypatch.setattr(linear, "grouped_kernel", lambda *_: multiply)
    placement = Placement(make_mesh(axes), TRAIN)
    ours = outputs_and_gradients(functools.partial(moe.experts, placement=placement))
    assert set(seen) == {tokens_a_device * TOP}
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=3e-5), ours, outputs_and_gradients(flat_reference))


# ---------------------------------------------------------------------------------------------------------- lowering


def lower(function, platform: str, *args) -> str:
    with a_device(platform):
        return jax.jit(function).trace(*args).lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=["bf16", "f32"])
@pytest.mark.parametrize(
    "shape", [(4096, 8, 256, 512), (64, 32, 2880, 360), (70, 4, 40, 24)], ids=["prefill", "decode", "odd dims"]
)
def test_lowers_for_cuda(monkeypatch, capsys, shape, dtype):
    monkeypatch.setattr(pl, "pallas_call", functools.partial(pl.pallas_call, debug=True))
    rows, groups, inner, out = shape
    x, w = jax.ShapeDtypeStruct((rows, inner), dtype), jax.ShapeDtypeStruct((groups, out, inner), dtype)
    sizes = jax.ShapeDtypeStruct((groups,), jnp.int32)

    def run(x, w, sizes):
        return jax.value_and_grad(lambda x, w: jnp.sum(grouped_matmul(x, w, sizes) ** 2), (0, 1))(x, w)

    text = lower(run, "cuda", x, w, sizes)
    assert all(f"grouped_matmul_{name}" in text for name in ("forward", "to_x", "to_w"))
    printed = capsys.readouterr().out
    assert printed.count("tt.dot") == 4
    assert '"builtin.module"' not in printed, "a module that does not verify is printed in its generic form"


@pytest.mark.parametrize("axes", [None, dict(expert=2, context=2, tensor=2)], ids=["one device", "mesh"])
def test_the_platform_chooses(axes):
    for platform in ("cuda", "tpu"):
        mesh = a_mesh if platform == "cuda" else make_mesh
        placement = Placement(mesh(axes), TRAIN) if axes else None
        run = functools.partial(moe.experts, glu=Glu(), placement=placement, platform=platform)
        text = lower(lambda x, w, c, p, run=run: run(x, w, c, p), platform, *tokens(), some_experts())
        assert ("grouped_matmul_forward" in text) == (platform == "cuda")
