"""Test the tiled numba product for many rows on XLA's threads against numpy; Arm CPUs use it in engine steps."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from later import later

from dovetail.ops import dispatch_products, linear
from dovetail.ops.describe import describe

pytestmark = pytest.mark.slow

kernels = later("dovetail.ops.kernels.cpu.many_rows")
BLOCK, SLICE = 64, 640  # of the kernel

KEPT = """
import jax, jax.numpy as jnp
from dovetail.io.compiled import compile_program, load_program
from dovetail.ops.dispatch import import_kernels
from dovetail.ops.kernels.cpu.many_rows import many_rows_matmul

import_kernels("cpu")
forms = jax.ShapeDtypeStruct((70, 12), jnp.float32), jax.ShapeDtypeStruct((40, 12), jnp.float32)
program = load_program("key", jax.devices()[:1])
was_kept = program is not None
program = program or compile_program("key", lambda: jax.jit(many_rows_matmul).lower(*forms).compile())
print(was_kept, float(program(jnp.ones((70, 12)), jnp.ones((40, 12))).sum()))
"""


def many_rows_matmul(x, w):
    return kernels.many_rows_matmul(x, w)


def test_duplicated_constants_agree():
    assert (kernels.BLOCK, kernels.SLICE) == (BLOCK, SLICE)


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("rows", [1, 8, 13, BLOCK, BLOCK + 1, 3 * BLOCK + 20])
@pytest.mark.parametrize(("size", "out"), [(1, 1), (33, 3), (96, 64), (SLICE + 2, 77), (2 * SLICE + 5, 8)])
def test_equals_numpy(rows, size, out):
    x, w = random(rows, size), random(out, size)
    ours = jax.jit(many_rows_matmul)(x, w)
    np.testing.assert_allclose(ours, x.astype(np.float64) @ w.T.astype(np.float64), atol=1e-3, rtol=1e-4)


def test_a_row_does_not_depend_on_the_other_rows():
    x, w = random(3 * BLOCK + 5, SLICE + 40), random(50, SLICE + 40)
    together = np.asarray(jax.jit(many_rows_matmul)(x, w))
    for some in (slice(0, 9), slice(BLOCK, 2 * BLOCK), slice(BLOCK + 3, None)):
        np.testing.assert_array_equal(together[some], jax.jit(many_rows_matmul)(x[some], w))


def test_non_finite_values_stay_in_their_rows():
    x, w = random(BLOCK + 5, 41), random(43, 41)
    x[1, 3], x[BLOCK + 4, 40], w[42, 0] = np.nan, np.inf, np.nan
    ours = np.asarray(jax.jit(many_rows_matmul)(x, w))
    assert np.isnan(ours[1]).all() and np.isnan(ours[:, 42]).all() and np.isinf(ours[BLOCK + 4, :42]).all()
    assert np.isfinite(np.delete(ours, (1, BLOCK + 4), axis=0)[:, :42]).all()


def test_many_at_once_from_many_threads():
    x, weights = random(BLOCK + 9, 64), [random(40 * n + n, 64) for n in range(1, 9)]
    run = jax.jit(lambda x, ws: [many_rows_matmul(x, w) for w in ws])
    expected = [x @ w.T for w in weights]
    with ThreadPoolExecutor(8) as pool:
        for found in pool.map(lambda _: run(x, weights), range(50)):
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), found, expected)


def test_a_cached_program_finds_the_kernel_in_another_process(tmp_path):
    def run() -> str:
        environment = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path), "JAX_PLATFORMS": "cpu", "PATH": ""}
        return subprocess.check_output([sys.executable, "-c", KEPT], env=environment, text=True).strip()

    assert run() == "False 33600.0"
    assert run() == "True 33600.0"


def test_matmul_uses_it_for_many_rows_of_f32(monkeypatch):
    monkeypatch.setattr(dispatch_products, "machine", lambda: "aarch64")
    rows = dispatch_products.FEW_ROWS["aarch64"] + 1
    x, w = jnp.ones((rows, 8)), jnp.ones((6, 8))
    assert dispatch_products.choose_product(x, w) == "many_rows"
    assert "dovetail_many_rows" in jax.jit(linear.matmul).lower(x, w).as_text()
    other = jax.jit(linear.matmul).trace(x, w).lower(lowering_platforms=("tpu",)).as_text()
    assert "dovetail_many_rows" not in other and "dot_general" in other
    np.testing.assert_array_equal(linear.matmul(x, w), np.full((rows, 6), 8.0))


def test_the_table_says_why_it_is_not_used(monkeypatch):
    def on_cpu() -> str:
        return next(name for operation, platform, name in describe() if (operation, platform) == ("products", "cpu"))

    monkeypatch.setattr(dispatch_products, "machine", lambda: "aarch64")
    assert on_cpu() == "numba"
    monkeypatch.setattr(dispatch_products, "has_numba", lambda: False)
    assert on_cpu() == "xla (numba is not installed)"
    monkeypatch.setattr(dispatch_products, "machine", lambda: "riscv64")
    assert on_cpu() == "xla (not measured on riscv64)"


def test_on_x86_xla_multiplies_many_rows(monkeypatch):
    monkeypatch.setattr(dispatch_products, "machine", lambda: "x86_64")
    w = jnp.ones((6, 8))
    chosen = [dispatch_products.choose_product(jnp.ones((rows, 8)), w) for rows in (1, 2, 16, 17, 1024)]
    assert chosen == ["few_rows"] * 3 + ["xla"] * 2
    assert ("products", "cpu", "numba; xla for more than 16 rows") in describe()
