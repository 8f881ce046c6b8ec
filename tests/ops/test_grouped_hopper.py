"""The grouped products for Hopper: lowered for a GPU, interpreted where jax can, and chosen where they run."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from dovetail.ops import dispatch_products
from dovetail.ops.glu import Glu
from dovetail.ops.kernels.gpu import grouped_gated, grouped_parts
from dovetail.ops.kernels.gpu import grouped_hopper as kernel
from dovetail.ops.linear import grouped_each

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Passing the index separately:DeprecationWarning"),  # of jax 0.11
]

M, N, K, E = 256, 128, 128, 3
SIZES = {"uneven": [77, 0, 179], "rows in no group": [3, 128, 50]}
INTERPRETS = jax.__version_info__ >= (0, 11, 2)


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape).astype(jnp.bfloat16)


def ragged(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
    numbers = lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), [0], [0])
    product = lax.ragged_dot_general(x, w, sizes, numbers, preferred_element_type=jnp.float32)
    return jnp.where((jnp.arange(len(x)) < sizes.sum())[:, None], product, 0).astype(x.dtype)


def interpreted(monkeypatch) -> None:
    interpret = kernel.plgpu.InterpretGPUParams()
    monkeypatch.setattr(kernel.plgpu, "kernel", functools.partial(kernel.plgpu.kernel, interpret=interpret))
    monkeypatch.setattr(grouped_parts, "PROGRAMS", 2)
    for module in (kernel, grouped_gated):  # the kernel that finds tiles cannot be interpreted
        monkeypatch.setattr(module, "find_tiles", grouped_parts.tiles_of)


@pytest.mark.thorough
@pytest.mark.skipif(not INTERPRETS, reason="the interpreter of jax < 0.11.2 knows no transposed operands")
@pytest.mark.parametrize("kind", SIZES)
def test_product_and_gradients_equal_ragged_dot(monkeypatch, kind):
    interpreted(monkeypatch)
    x, w, dy, sizes = normal(0, M, K), normal(1, E, N, K), normal(2, M, N), jnp.asarray(SIZES[kind], jnp.int32)

    def outputs(multiply):
        y, back = jax.vjp(lambda x, w: multiply(x, w, sizes), x, w)
        return y, *back(dy)

    for a, b in zip(outputs(kernel.grouped_matmul), outputs(ragged), strict=True):
        np.testing.assert_allclose(a.astype(jnp.float32), b.astype(jnp.float32), atol=0.3)


@pytest.mark.thorough
@pytest.mark.skipif(not INTERPRETS, reason="jax < 0.11.2 has no interpreter")
@pytest.mark.parametrize("kind", SIZES)
def test_one_gradient_to_the_rows_is_the_sum_of_two(monkeypatch, kind):
    interpreted(monkeypatch)
    dys, ws = (normal(0, M, N), normal(1, M, N)), (normal(2, E, N, K), normal(3, E, N, K))
    sizes = jnp.asarray(SIZES[kind], jnp.int32)
    got = kernel.rows_products(dys, ws, sizes, transposed=False)
    want = sum(ragged(dy, w.mT, sizes).astype(jnp.float32) for dy, w in zip(dys, ws, strict=True))
    np.testing.assert_allclose(got.astype(jnp.float32), want, atol=0.5)


@pytest.mark.thorough
@pytest.mark.skipif(not INTERPRETS, reason="jax < 0.11.2 has no interpreter")
@pytest.mark.parametrize("kind", SIZES)
@pytest.mark.parametrize("glu", [Glu(), Glu(limit=7.0)], ids=["silu", "clamped"])
def test_the_gated_unit_and_its_gradients_equal_those_of_its_parts(monkeypatch, kind, glu):
    interpreted(monkeypatch)
    sizes = jnp.asarray(SIZES[kind], jnp.int32)
    x, ws, share = normal(0, M, K), (normal(1, E, N, K) / 4, normal(2, E, N, K) / 4), jnp.abs(normal(3, M, 1))

    def outputs(unit):
        y, back = jax.vjp(unit, x, ws, share.astype(jnp.float32))
        return y, *jax.tree.leaves(back(normal(4, M, N)))

    ours = outputs(lambda x, ws, share: grouped_gated.grouped_gated(x, ws, share, sizes, glu))
    theirs = outputs(lambda x, ws, s: grouped_gated.weighted(glu, *(ragged(x, w, sizes) for w in ws), s))
    for a, b in zip(ours, theirs, strict=True):
        a, b = (np.asarray(each, np.float32) for each in (a, b))
        np.testing.assert_allclose(a, b, atol=np.abs(b).max() * 2**-7, rtol=2**-6)


@pytest.mark.thorough
@pytest.mark.skipif(not INTERPRETS, reason="jax < 0.11.2 has no interpreter")
@pytest.mark.parametrize("kind", SIZES)
def test_the_order_of_groups_changes_no_gradient_of_the_weights(monkeypatch, kind):
    interpreted(monkeypatch)
    dy, x, sizes = normal(0, M, N), normal(1, M, 3 * K), jnp.asarray(SIZES[kind], jnp.int32)  # 9 tiles of 2 programs
    run = functools.partial(kernel.weights_product, dy, x, sizes, dtype=jnp.bfloat16)
    np.testing.assert_array_equal(run(balanced=True), run(balanced=False))


def test_groups_are_ordered_by_size_and_their_tiles_divided_evenly(monkeypatch):
    sizes = np.random.default_rng(0).geometric(1e-3, 64).astype(np.int32) * (np.arange(64) % 5 > 0)
    order = np.asarray(grouped_parts.by_size(jnp.asarray(sizes)))
    np.testing.assert_array_equal(order, np.argsort(-sizes, kind="stable"))
    tiles, programs = np.repeat(sizes[order], 64), grouped_parts.PROGRAMS
    turns = np.pad(tiles, (0, -len(tiles) % programs)).reshape(-1, programs)
    turns[1::2] = turns[1::2, ::-1]
    assert turns.sum(axis=0).max() < 1.08 * tiles.sum() / programs  # in the order of the groups: 1.2


@pytest.mark.parametrize("kind", [*SIZES, "no rows at all"])
def test_tiles_cover_the_rows_of_each_group_once(kind):
    sizes = SIZES.get(kind, [0, 0, 0])
    group, first, start, end, count = (np.asarray(a) for a in grouped_parts.tiles_of(jnp.asarray(sizes, jnp.int32), M))
    seen = np.full(M, -1)
    for i in range(count[0]):
        assert first[i] % grouped_parts.ALIGNED == 0
        rows = np.arange(start[i], min(end[i], first[i] + grouped_parts.ROWS))
        assert (seen[rows] == -1).all()
        seen[rows] = group[i]
    np.testing.assert_array_equal(seen, np.repeat(np.arange(E + 1), [*sizes, M - sum(sizes)]))


@pytest.mark.parametrize("dims", [pytest.param((1024, 512), marks=pytest.mark.thorough), (2880, 192)], ids=str)
def test_lowers_for_a_gpu(dims):
    x, w = jax.ShapeDtypeStruct((512, dims[1]), jnp.bfloat16), jax.ShapeDtypeStruct((4, *dims), jnp.bfloat16)
    run = jax.grad(lambda x, w, sizes: jnp.sum(kernel.grouped_matmul(x, w, sizes) ** 2), (0, 1))
    traced = jax.jit(run).trace(x, w, jax.ShapeDtypeStruct((4,), jnp.int32))
    assert traced.lower(lowering_platforms=("cuda",)).as_text().count("mosaic_gpu") >= 3


def test_two_weights_have_one_gradient_to_the_rows(monkeypatch):
    monkeypatch.setattr(dispatch_products, "is_hopper", lambda: True)
    x, w = jax.ShapeDtypeStruct((512, 192), jnp.bfloat16), jax.ShapeDtypeStruct((4, 320, 192), jnp.bfloat16)

    def loss(x, ws, sizes):
        return sum(jnp.sum(y**2) for y in grouped_each(x, ws, sizes, "cuda"))

    traced = jax.jit(jax.grad(loss, (0, 1))).trace(x, (w, w), jax.ShapeDtypeStruct((4,), jnp.int32))
    text = traced.lower(lowering_platforms=("cuda",)).as_text(debug_info=True)
    assert sum("custom_call @mosaic_gpu" in line for line in text.splitlines()) <= 5
    calls = sum(line.count("call @rows_products") + line.count("call @weights_product") for line in text.splitlines())
    assert calls == 5


def test_the_gated_unit_is_chosen_and_lowers(monkeypatch):
    monkeypatch.setattr(dispatch_products, "is_hopper", lambda: True)
    x, w = jax.ShapeDtypeStruct((512, 192), jnp.bfloat16), jax.ShapeDtypeStruct((4, 256, 192), jnp.bfloat16)
    params = {"gate": w, "up": w}
    monkeypatch.setattr(dispatch_products, "grouped_each_kernel", lambda *_: kernel.grouped_matmuls)
    assert dispatch_products.grouped_gated_kernel("cuda", x, params, Glu()) is None
    monkeypatch.setenv("DOVETAIL_UNMEASURED_KERNELS", "1")
    assert dispatch_products.grouped_gated_kernel("cuda", x, params | {"gate_bias": w}, Glu()) is None
    assert dispatch_products.grouped_gated_kernel("cuda", x, params, Glu("gelu")) is None
    run = dispatch_products.grouped_gated_kernel("cuda", x, params, Glu())
    assert run is grouped_gated.grouped_gated
    loss = jax.grad(lambda x, ws, share, sizes: jnp.sum(run(x, ws, share, sizes, Glu()) ** 2), (0, 1, 2))
    share, sizes = jax.ShapeDtypeStruct((512, 1), jnp.float32), jax.ShapeDtypeStruct((4,), jnp.int32)
    text = jax.jit(loss).trace(x, (w, w), share, sizes).lower(lowering_platforms=("cuda",)).as_text(debug_info=True)
    assert "grouped_gated_hopper" in text


@pytest.mark.parametrize(
    ("rows", "dims", "dtype", "name"),
    [
        (4096, (1024, 2048), jnp.bfloat16, "mosaic"),
        (4096, (2880, 2880), jnp.bfloat16, "mosaic"),
        (4096, (1024, 2048), jnp.float32, "triton"),
        (4096, (1024, 360), jnp.bfloat16, "triton"),
        (4095, (1024, 2048), jnp.bfloat16, "triton"),
    ],
)
def test_the_kernels_are_chosen_where_they_run(monkeypatch, rows, dims, dtype, name):
    x, w = jax.ShapeDtypeStruct((rows, dims[1]), dtype), jax.ShapeDtypeStruct((4, *dims), dtype)
    assert dispatch_products.choose_grouped("cuda", x, w) == "triton"  # no Hopper here
    monkeypatch.setattr(dispatch_products, "is_hopper", lambda: True)
    assert dispatch_products.choose_grouped("cuda", x, w) == name
    assert dispatch_products.choose_grouped("tpu", x, w) == "xla"
