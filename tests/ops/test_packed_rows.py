"""Test the numba products with quantised weights on XLA's threads against the reference, which unpacks them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from later import later
from ops.test_quant import blocks, packed, random

from dovetail.core.formats import BLOCKS, Format
from dovetail.ops import dispatch_products
from dovetail.ops.kernels.cpu import needs
from dovetail.ops.quant.weight import Quantized

pytestmark = pytest.mark.slow

kernels = later("dovetail.ops.kernels.cpu.packed_rows")
FORMATS = (*BLOCKS, "int8", "int4", "int4_asym")
X = jax.ShapeDtypeStruct((1, 256), jnp.float32)


@pytest.fixture(scope="module", autouse=True)
def _has_kernel():
    if why := dispatch_products.why_not_packed(Format("q4_1"), X, "cpu", None):
        pytest.skip(why)


def made(name: str, *out: int, size: int) -> Quantized:
    return blocks(name, *out, size=size) if name in BLOCKS else packed(name, random(*out, size))


def products(x: np.ndarray, w: Quantized) -> tuple[np.ndarray, np.ndarray]:
    """Return x wT in f64, and the bound of its error: |x| |w|T."""
    x, dense = np.asarray(x, np.float64), np.asarray(w.dense(), np.float64)
    return x @ dense.T, np.abs(x) @ np.abs(dense).T


@pytest.mark.parametrize("name", FORMATS)
def test_equals_unpacking_and_multiplying(name):
    """Odd rows and columns, several slices of the input, rows that are rounded by several threads."""
    for rows, out, size in [(1, 3, 256), (37, 21, 1280)]:
        x, w = random(rows, size), made(name, out, size=size)
        want, bound = products(x, w)
        exact, rounded = (np.asarray(kernels.packed_rows_matmul(x, w, None, how)) for how in (True, False))
        np.testing.assert_array_less(np.abs(exact - want), 1e-6 * bound)
        # a factor is off by at most half a step of its group's greatest value over 127
        np.testing.assert_array_less(np.abs(rounded - want), 0.02 * bound)
        assert np.sqrt(np.mean((rounded - want) ** 2) / np.mean(want**2)) < 0.03


@pytest.mark.parametrize("size", [16, 48, 96, 1040])
def test_rows_of_odd_sizes(size):
    """Rows that are not whole groups of 32 have groups of 16."""
    x, w = random(5, size), packed("int8", random(18, size))
    want, bound = products(x, w)
    np.testing.assert_array_less(np.abs(kernels.packed_rows_matmul(x, w, None, True) - want), 1e-6 * bound)
    np.testing.assert_array_less(np.abs(kernels.packed_rows_matmul(x, w, None) - want), 0.02 * bound)


@pytest.mark.thorough
@settings(max_examples=25, deadline=None)
@given(
    name=st.sampled_from(FORMATS), rows=st.integers(1, 40), out=st.integers(1, 70), blocks=st.integers(1, 12),
    exact=st.booleans(),
)  # fmt: skip
def test_any_shape(name, rows, out, blocks, exact):
    """Rows of whole blocks, as every format has them."""
    size = blocks * (BLOCKS[name][0] if name in BLOCKS else 32)
    x, w = np.random.default_rng(rows).normal(size=(rows, size)).astype(np.float32), made(name, out, size=size)
    want, bound = products(x, w)
    got = np.asarray(kernels.packed_rows_matmul(x, w, None, exact))
    np.testing.assert_array_less(np.abs(got - want), (1e-6 if exact else 0.02) * bound + 1e-6)


def test_experts():
    rows, w = random(9, 64), made("q4_1", 4, 20, size=64)
    sizes = np.asarray([2, 0, 6, 1])
    got = np.asarray(jax.jit(lambda x, w, sizes: w.grouped(x, sizes, None))(rows, w, jnp.asarray(sizes)))
    of_row = np.repeat(np.arange(4), sizes)
    want = np.einsum("md,mfd->mf", np.asarray(rows), np.asarray(w.dense())[of_row])
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_nan_stays_nan():
    x, w = np.array(random(2, 64)), made("q4_1", 8, size=64)
    x[1, 40] = np.nan
    for exact in (True, False):
        got = np.asarray(kernels.packed_rows_matmul(jnp.asarray(x), w, None, exact))
        assert np.isfinite(got[0]).all() and np.isnan(got[1]).all()


def test_the_formats_of_the_kernel():
    assert set(kernels.KINDS) == needs.FORMATS


def test_the_choice():
    """One CPU and f32; formats and shapes that the kernel does not know are unpacked."""
    assert dispatch_products.quantized_kernel(Format("q4_1"), X, "cpu", None) is not None
    half = jax.ShapeDtypeStruct((1, 256), jnp.bfloat16)
    odd = jax.ShapeDtypeStruct((1, 40), jnp.float32)
    for form, x, platform in [
        (Format("q4_1"), half, "cpu"),
        (Format("q4_1"), X, "tpu"),
        (Format("nf4", 64), X, "cpu"),
        (Format("int8"), odd, "cpu"),
    ]:
        assert dispatch_products.quantized_kernel(form, x, platform, None) is None
    one_row_of_tokens = jax.ShapeDtypeStruct((1, 3, 256), jnp.float32)  # as dt.load's `generate` has them
    two_rows_of_tokens = jax.ShapeDtypeStruct((2, 3, 256), jnp.float32)  # which training may split over devices
    for x, has_kernel in ((X, True), (one_row_of_tokens, True), (two_rows_of_tokens, False)):
        text = jax.jit(lambda x, w: w.matmul(x, 1, None)).lower(x, made("q4_1", 8, size=256)).as_text()
        assert (kernels.NAME in text) == has_kernel


def test_one_row_of_tokens_is_a_matrix():
    x, w = random(3, 64), made("int8", 12, size=64)
    np.testing.assert_array_equal(w.matmul(x[None], 1, None)[0], w.matmul(x, 1, None))


def test_the_gradient_is_that_of_the_unpacked_weight():
    x, w = random(2, 64), made("int8", 12, size=64)
    ours = jax.grad(lambda x: jnp.sum(w.matmul(x, 1, None) ** 2))(x)
    want = jax.grad(lambda x: jnp.sum((x @ w.dense().T) ** 2))(x)
    np.testing.assert_allclose(ours, want, rtol=1e-4, atol=1e-4)
