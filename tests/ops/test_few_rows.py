"""Test the numba product for few rows on XLA's threads against numpy."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from later import later

from dovetail.ops import dispatch_products, linear

pytestmark = pytest.mark.slow

kernels = later("dovetail.ops.kernels.cpu.few_rows")
CHUNK = 64  # of the kernel


def few_rows_matmul(x, w):
    return kernels.few_rows_matmul(x, w)


def test_duplicated_constants_agree():
    assert kernels.CHUNK == CHUNK


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 7, 16])
@pytest.mark.parametrize(("size", "out"), [(1, 1), (33, 3), (96, 2 * CHUNK), (40, 5 * CHUNK + 6)])
def test_equals_numpy(rows, size, out):
    x, w = random(rows, size), random(out, size)
    ours = jax.jit(few_rows_matmul)(x, w)
    np.testing.assert_allclose(ours, x.astype(np.float64) @ w.T.astype(np.float64), atol=1e-5)


def test_non_finite_values_stay():
    x, w = random(5, 40), random(CHUNK, 40)
    x[1, 3], x[4, 7] = np.nan, np.inf
    ours = np.asarray(jax.jit(few_rows_matmul)(x, w))
    assert np.isnan(ours[1]).all() and np.isinf(ours[4]).all() and np.isfinite(ours[[0, 2, 3]]).all()


def test_many_at_once_from_many_threads():
    """Tasks that XLA's pool runs late find a job that is still there."""
    x, weights = random(3, 64), [random(n * CHUNK + n, 64) for n in range(1, 9)]
    run = jax.jit(lambda x, ws: [few_rows_matmul(x, w) for w in ws])
    expected = [x @ w.T for w in weights]
    with ThreadPoolExecutor(8) as pool:
        for found in pool.map(lambda _: run(x, weights), range(200)):
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), found, expected)


@pytest.fixture(params=["aarch64", "x86_64"])
def cpu(monkeypatch, request):
    monkeypatch.setattr(dispatch_products, "machine", lambda: request.param)


def test_matmul_uses_it_for_few_rows_of_f32(cpu):
    x, w = jnp.ones((4, 8)), jnp.ones((6, 8))
    assert dispatch_products.choose_product(x, w) == "few_rows"
    assert dispatch_products.choose_product(x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)) == "xla"
    assert dispatch_products.choose_product(x[None], w) == "xla"
    assert "dovetail_few_rows" in jax.jit(linear.matmul).lower(x, w).as_text()
    other = jax.jit(linear.matmul).trace(x, w).lower(lowering_platforms=("tpu",)).as_text()
    assert "dovetail_few_rows" not in other and "dot_general" in other


def test_its_gradient_is_that_of_a_product(cpu):
    x, w = random(4, 8), random(6, 8)
    ours = jax.grad(lambda x, w: jnp.sum(jnp.sin(linear.matmul(x, w))), argnums=(0, 1))(x, w)
    theirs = jax.grad(lambda x, w: jnp.sum(jnp.sin(x @ w.T)), argnums=(0, 1))(x, w)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), ours, theirs)
