"""Hopper's small kernels for few tokens: their programs on all threads against the references, lowered, and chosen."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from row_threads import Rows, simulate

from dovetail.core.types import Paged
from dovetail.ops import dispatch
from dovetail.ops.kernels.gpu.mosaic import norm_few, row_ops, store_few
from dovetail.ops.kernels.gpu.mosaic.threads import THREADS
from dovetail.ops.norm import rms_norm
from dovetail.ops.rope import Rope, rotate

BF16 = ml_dtypes.bfloat16


def normal(seed: int, *shape: int, dtype=BF16) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def near(got, want) -> None:
    """Compare within one rounding to bf16."""
    np.testing.assert_allclose(np.asarray(got, np.float32), np.asarray(want, np.float32), rtol=0.01, atol=1e-6)


@pytest.mark.parametrize(("D", "dtype"), [(64, BF16), (2880, np.float32), (4096, BF16), (5120, BF16)])
def test_the_norm_is_the_references(monkeypatch, D, dtype):
    monkeypatch.setattr(norm_few, "launch", simulate)
    x, delta, weight = normal(0, 3, D), normal(1, 3, D), normal(2, D, dtype=dtype)
    for added in (delta, None):
        total, normed = norm_few.add_rms_norm.__wrapped__(x, added, weight, 1e-6, 1.0)
        want = jnp.asarray(x) + (0 if added is None else jnp.asarray(added))
        np.testing.assert_array_equal(total, want)
        near(normed, rms_norm(want, jnp.asarray(weight), 1e-6, 1.0))


@pytest.mark.parametrize(
    ("T", "N", "K", "H", "has_norms"), [(1, 16, 8, 128, True), (5, 3, 1, 64, False), (3, 4, 2, 256, True)]
)
def test_rotated_heads_are_the_references(T, N, K, H, has_norms):
    rope, places = Rope(1e4, H), np.random.default_rng(0).permutation(40)[:T].astype(np.int32)
    places[1:2] = 40  # padding
    qkv, pages, queries = normal(0, T, N + 2 * K, H), normal(1, 40, 2 * K, H), np.zeros((T, N, H), BF16)
    tables = [np.asarray(x, np.float32) for x in rope.tables(jnp.arange(T) * 3)]
    weights = [normal(2, H), normal(3, H)] if has_norms else []
    got, heads = pages.copy(), store_few.HeadSizes(T, N, K, H, 40, 1e-6, 1.0)
    refs = [x.reshape(-1) for x in (places, *tables, *weights, qkv, got, queries)]
    for program in range(-(-T * (N + 2 * K) * heads.lanes // THREADS)):
        store_few.rotate(Rows([]), np.full(row_ops.THREADS, program, np.int32), *refs, heads=heads)
    q, k, v = (jnp.asarray(x) for x in np.split(qkv, [N, N + K], axis=1))
    if has_norms:
        q, k = (rms_norm(x, jnp.asarray(w), 1e-6, 1.0) for x, w in zip((q, k), weights, strict=True))
    q, k = (rotate(x, rope, tables) for x in (q, k))
    near(queries, q)
    near(got, stored(pages, places, k, v))


@pytest.mark.parametrize("dtype", [BF16, np.int8, ml_dtypes.float8_e4m3fn])
def test_copied_heads_are_where_they_belong(dtype):
    T, K, H = 5, 3, 36
    k, v, pages = (normal(i, *shape).astype(dtype) for i, shape in enumerate(((T, K, H), (T, K, H), (40, 2 * K, H))))
    places, got = np.array([7, 40, 0, 39, 8], np.int32), pages.copy()
    options = dict(rows=T * K, K=K, width=H * pages.itemsize, places=40)
    for program in range(-(-T * K * H * pages.itemsize // (4 * THREADS))):
        refs = places, k.reshape(-1), v.reshape(-1), got.reshape(-1)
        store_few.copy(Rows([]), np.full(row_ops.THREADS, program, np.int32), *refs, **options)
    np.testing.assert_array_equal(got.view(np.uint8), stored(pages, places, k, v).view(np.uint8))


def stored(pages: np.ndarray, places: np.ndarray, k, v) -> np.ndarray:
    """Return the pages with keys and values side by side."""
    pages, rows = pages.copy(), np.stack([np.asarray(k), np.asarray(v)], axis=2).reshape(len(places), -1, k.shape[-1])
    pages[places[places < len(pages)]] = rows[places < len(pages)]
    return pages


@pytest.mark.slow
def test_the_kernels_lower_for_a_gpu():
    def array(*shape: int, dtype=jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    ints = functools.partial(array, dtype=jnp.int32)
    T, ctx = 4, Paged(ints(4, 8), ints(4), ints(5), ints(1))
    pages, tables = array(32, 16, 4, 128), [array(T, 64, dtype=jnp.float32)] * 2
    runs = {
        "add_rms_norm": (lambda *given: norm_few.add_rms_norm(*given, 1e-6, 0.0), *[array(T, 2880)] * 2, array(2880)),
        "rotate_store": (lambda ctx, pages, qkv, *tables: store_few.rotate_store(
            ctx, pages, qkv, tables, None, 1e-6, 0.0), ctx, pages, array(T, 8, 128), *tables),
        "write_pages": (store_few.write_heads, ctx, pages, *[array(T, 2, 128)] * 2),
    }  # fmt: skip
    for name, (run, *given) in runs.items():
        text = jax.jit(run).trace(*given).lower(lowering_platforms=("cuda",)).as_text()
        assert "mosaic_gpu" in text, name


def test_the_kernels_of_language_models_are_not_in_triton_on_hopper(monkeypatch):
    monkeypatch.setattr(dispatch, "is_one_gpu", lambda *_: True)
    none = jnp.zeros((1,), jnp.int32)
    ctx, rope = Paged(none[None], none, none, none, platform="cuda"), Rope(1e4, 128)

    def array(*shape: int, dtype=jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    assert dispatch.choose_norm(ctx, array(1, 4096)) == "triton"
    monkeypatch.setattr(dispatch, "is_hopper", lambda: True)
    shapes = (1, 4096), (64, 2880), (8192, 4096), (64, 1024)
    assert [dispatch.choose_norm(ctx, array(*shape)) for shape in shapes] == ["mosaic_few"] * 2 + ["mosaic"] * 2
    assert dispatch.choose_norm(ctx, array(4, 2880, dtype=jnp.float16)) == "triton"
    assert dispatch.choose_sample("cuda", None) == "mosaic"
    kernels = [
        dispatch.norm_kernel(ctx, array(1, 4096)),
        dispatch.rotate_store_kernel(array(1, 32, 128), 8),
        dispatch.rotate_store_kernel(array(64, 26, 64), 8),
        dispatch.layer_norm_kernel(None, array(64, 1152)),
    ]
    assert all(".mosaic." in kernel.__module__ for kernel in kernels if kernel)
    given = ctx, array(4, 8, 128), array(32, 16, 16, 128)
    assert dispatch.store_kernel(*given).__module__.endswith("gpu.store"), "Mosaic's has not run on a card"
    monkeypatch.setattr(dispatch, "has_triton", lambda: False)
    assert ".mosaic." in dispatch.store_kernel(*given).__module__
    stores = functools.partial(dispatch.rotates_and_stores, ctx, rope, 128, "head", False)
    assert stores() and not stores(jnp.float32)
