"""Test the small NVIDIA kernels around attention, interpreted, against their references."""

from __future__ import annotations

import functools
import os
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from described import TRITON, a_device, a_mesh

from dovetail.core.types import Paged
from dovetail.ops.kernels.gpu.cross_entropy import cross_entropy_rows
from dovetail.ops.kernels.gpu.layer_norm import add_layer_norm
from dovetail.ops.kernels.gpu.norm import add_rms_norm
from dovetail.ops.kernels.gpu.store import rotate_store
from dovetail.ops.kernels.gpu.store import write_heads as write_kernel
from dovetail.ops.norm import layer_norm, rms_norm
from dovetail.ops.paged import round_rows, write_heads
from dovetail.ops.rope import Rope, rotate

pytestmark = pytest.mark.slow

TOKENS, PAGES, PAGE = 10, 6, 16
# two sequences, the second at its first page; then padding
CTX = Paged(*(jnp.asarray(x, jnp.int32) for x in ([[3, 1], [2, 5], [0, 0]], [20, 5, 0], [0, 6, 7, 7], [2])))


def normal(seed: int, *shape: int, dtype=jnp.float32) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


@pytest.mark.parametrize("delta", [True, False], ids=["sum", "alone"])
@pytest.mark.parametrize("dim", [64, 96])
def test_norm(dim, delta):
    x, weight = normal(0, 7, dim, dtype=jnp.bfloat16), normal(1, dim, dtype=jnp.bfloat16)
    more = normal(2, 7, dim, dtype=jnp.bfloat16) if delta else None
    total, normed = add_rms_norm(x, more, weight, 1e-5, 1.0, interpret=True)
    expected = x if more is None else x + more
    np.testing.assert_array_equal(total, expected)
    got, want = (np.asarray(y, np.float32) for y in (normed, rms_norm(expected, weight, 1e-5, 1.0)))
    np.testing.assert_allclose(got, want, rtol=1e-2)


@pytest.mark.parametrize("alone", [True, False], ids=["alone", "sum"])
def test_layer_norm_and_its_gradient(alone):
    x, delta, *grads = (normal(seed, 3, 15, 24) for seed in range(4))  # no multiple of a tile's tokens or lanes
    given = (x, None if alone else delta, normal(4, 24), normal(5, 24))

    def reference(x, delta, weight, bias):
        total = x if delta is None else x + delta
        return total, layer_norm(total, weight, bias, 1e-6)

    want, expected = jax.vjp(reference, *given)
    got, computed = jax.vjp(lambda *given: add_layer_norm(*given, 1e-6, True), *given)
    pairs = (got, computed(tuple(grads))), (want, expected(tuple(grads)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), *pairs)


@pytest.mark.parametrize("heads", [1, 3, 8])
def test_store(heads):
    pages, k, v = normal(0, PAGES, PAGE, 2 * heads, 64), normal(1, TOKENS, heads, 64), normal(2, TOKENS, heads, 64)
    np.testing.assert_array_equal(write_kernel(CTX, pages, k, v, interpret=True), write_heads(CTX, pages, k, v))


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int8"])
def test_store_of_rounded_pages(dtype):
    pages, k, v = normal(0, PAGES, PAGE, 6, 64), normal(1, TOKENS, 3, 64), normal(2, TOKENS, 3, 64)
    pages = round_rows(pages, jnp.dtype(dtype))
    got, want = write_kernel(CTX, pages, k, v, interpret=True), write_heads(CTX, pages, k, v)
    assert got.dtype == pages.dtype
    np.testing.assert_array_equal(got.view(jnp.uint8), want.view(jnp.uint8))


@pytest.mark.parametrize("normed", [True, False], ids=["normed", "plain"])
@pytest.mark.parametrize("heads", [(4, 2), (9, 3)], ids=str)
def test_rotate_store(heads, normed):
    N, K = heads
    H, rope = 32, Rope(1e4, 32)
    qkv, pages = normal(0, TOKENS, N + 2 * K, H), normal(1, PAGES, PAGE, 2 * K, H)
    table = rope.tables(jnp.arange(TOKENS) * 3)
    norms = (normal(2, H), normal(3, H)) if normed else None
    q, k, v = jnp.split(qkv, [N, N + K], axis=1)
    if norms:
        q, k = (rms_norm(x, weight, 1e-6, 1.0) for x, weight in zip((q, k), norms, strict=True))
    got_q, got_pages = rotate_store(CTX, pages, qkv, table, norms, 1e-6, 1.0, interpret=True)
    np.testing.assert_allclose(got_q, rotate(q, rope, table), atol=1e-5)
    np.testing.assert_allclose(got_pages, write_heads(CTX, pages, rotate(k, rope, table), v), atol=1e-5)


@pytest.mark.parametrize(
    "more", [dict(z=0.0, softcap=None), dict(z=1e-2, softcap=3.0)], ids=["plain", "z and soft cap"]
)
def test_cross_entropy(more):
    """Words that do not fill the last block, a logit far above the others, a target that is no word."""
    R, V = 6, 300
    raw, weight = 4 * normal(0, R, V).at[2, 7].add(80.0), jnp.asarray([1.0, 0.5, 1.0, 0.0, 2.0, 1.0])
    targets = jnp.asarray([0, 299, 7, -100, 5, 128])

    def parts(raw):
        logits = more["softcap"] * jnp.tanh(raw / more["softcap"]) if more["softcap"] else raw
        lse = jax.nn.logsumexp(logits, axis=1)
        chosen = jnp.where(targets >= 0, jnp.take_along_axis(logits, jnp.maximum(targets, 0)[:, None], 1)[:, 0], 0.0)
        return jnp.sum(weight * (lse - chosen + more["z"] * lse**2)), (logits, chosen - lse, lse, chosen)

    grad, (logits, logp, lse, chosen) = jax.jit(jax.grad(parts, has_aux=True))(raw)
    got = cross_entropy_rows(raw, targets, weight, **more, dtype=jnp.float32, block=64, interpret=True)
    for ours, theirs in zip(got, (logp, lse, chosen >= logits.max(axis=1), grad), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


def test_cross_entropy_lowers_for_cuda():
    args = [jax.ShapeDtypeStruct((8, 128256), jnp.bfloat16), jax.ShapeDtypeStruct((8,), jnp.int32)]
    run = jax.jit(functools.partial(cross_entropy_rows, z=0.0, softcap=30.0, dtype=jnp.bfloat16))
    with a_device("cuda"):
        text = run.trace(*args, jax.ShapeDtypeStruct((8,), jnp.float32)).lower(lowering_platforms=("cuda",)).as_text()
    assert "cross_entropy_rows" in text


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="jax warns of Triton since 0.11")
def test_jax_warns_of_triton_and_the_warning_is_not_shown_to_users():
    """Python shows a DeprecationWarning of code in `__main__` only; this one is of jax's own code."""
    run = jax.jit(functools.partial(add_rms_norm, eps=1e-5, offset=1.0))
    x, weight = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((8, 128), (128,)))
    with warnings.catch_warnings(record=True) as found, jax.sharding.use_abstract_mesh(a_mesh({})):
        warnings.simplefilter("always")
        run.trace(x, x, weight).lower(lowering_platforms=("cuda",))
    assert [TRITON in str(warning.message) for warning in found] == [True]
    assert f"{os.sep}jax{os.sep}" in found[0].filename and found[0].category is DeprecationWarning
