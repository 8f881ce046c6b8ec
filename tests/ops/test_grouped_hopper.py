"""The grouped products for Hopper: lowered for a GPU, interpreted where jax can, and chosen where they run."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from dovetail.ops import dispatch_products
from dovetail.ops.kernels.gpu import grouped_hopper as kernel
from dovetail.ops.kernels.gpu import grouped_parts
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
    monkeypatch.setattr(kernel, "find_tiles", grouped_parts.tiles_of)  # whose kernel cannot be interpreted


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
def test_each_tile_of_the_weights_gradient_is_computed_by_one_program(monkeypatch, kind):
    interpreted(monkeypatch)
    dy, x, sizes = normal(0, M, N), normal(1, M, 3 * K), jnp.asarray(SIZES[kind], jnp.int32)  # 6 tiles of 2 programs
    got = kernel.weights_product(dy, x, sizes, dtype=jnp.bfloat16)
    ends = np.cumsum(SIZES[kind])
    a, b = (np.asarray(each, np.float32) for each in (dy, x))
    want = [a[end - size : end].T @ b[end - size : end] for end, size in zip(ends, SIZES[kind], strict=True)]
    np.testing.assert_allclose(got.astype(jnp.float32), np.stack(want), rtol=2**-7, atol=1e-3)


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
