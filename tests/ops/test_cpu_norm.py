"""The residual add and RMS norm on a CPU (numba) against the reference."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from later import later

from dovetail.core.types import Paged
from dovetail.ops.dispatch import NORM_VALUES, choose_norm
from dovetail.ops.norm import rms_norm

norm = later("dovetail.ops.kernels.cpu.norm")

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("has_delta", [True, False])
@pytest.mark.parametrize("shape", [(1, 576), (5, 33)])
def test_equals_the_reference(shape, has_delta, offset):
    x, delta = np.random.default_rng(0).normal(size=(2, *shape)).astype(np.float32)
    weight = jnp.linspace(-1, 2, shape[1], dtype=jnp.bfloat16)
    given = delta if has_delta else None
    total, normed = jax.jit(lambda x, d: norm.add_rms_norm(x, d, weight, 1e-5, offset))(x, given)
    np.testing.assert_array_equal(total, x + delta if has_delta else x)
    np.testing.assert_allclose(normed, rms_norm(total, weight, 1e-5, offset), rtol=1e-5, atol=1e-6)


def test_a_nan_row_does_not_affect_others():
    x = jnp.ones((3, 32)).at[1].set(jnp.nan)
    _, normed = jax.jit(lambda x: norm.add_rms_norm(x, None, jnp.ones(32), 1e-5, 0.0))(x)
    assert np.isnan(normed[1]).all() and np.isfinite(normed[::2]).all()


def test_it_is_chosen_for_streams_that_one_thread_is_enough_for():
    ctx = Paged(*(jnp.zeros(1, jnp.int32) for _ in range(4)), platform="cpu")
    stream = lambda rows, dtype=jnp.float32: jax.ShapeDtypeStruct((rows, 1024), dtype)  # noqa: E731
    assert choose_norm(ctx, stream(8)) == "numba"
    assert choose_norm(ctx, stream(NORM_VALUES // 1024 + 1)) == choose_norm(ctx, stream(8, jnp.bfloat16)) == "reference"
