"""Test that adapted weights give the products of the arrays that they represent."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dovetail.ops.adapter import Adapted, Widened, choose, merged, of_rows
from dovetail.ops.linear import grouped, matmul, per_head

pytestmark = pytest.mark.slow


def random(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(sum(shape)).normal(size=shape), jnp.float32)


def test_an_adapter_adds_its_product():
    base, down, up, x = random(4, 8, 16), random(3, 16), random(4, 8, 3), random(5, 16)
    whole = merged(base, down, up, 1)
    np.testing.assert_allclose(matmul(x, Adapted(base, down, up)), matmul(x, whole), atol=1e-4)
    heads = random(5, 4, 16)
    np.testing.assert_allclose(per_head(heads, Adapted(base, down, up)), per_head(heads, whole), atol=1e-4)


def test_several_input_dims():
    base, down, up, x = random(16, 4, 8), random(3, 4, 8), random(16, 3), random(5, 4, 8)
    got = matmul(x, Adapted(base, down, up), dims=2)
    np.testing.assert_allclose(got, matmul(x, merged(base, down, up, 2), dims=2), atol=1e-4)


def test_experts():
    base, down, up = random(3, 8, 16), random(3, 2, 16), random(3, 8, 2)
    rows, sizes = random(9, 16), jnp.asarray([4, 0, 5])
    np.testing.assert_allclose(
        grouped(rows, Adapted(base, down, up), sizes), grouped(rows, merged(base, down, up, 0), sizes), atol=1e-4
    )


def test_each_token_takes_its_own_ranks():
    base, down, up, x = random(8, 16), random(4, 16), random(8, 4), random(3, 16)
    chosen = jnp.asarray([[1, 1, 0, 0], [0, 0, 1, 1], [0, 0, 0, 0]], jnp.float32)
    got = matmul(x, Adapted(base, down, up, chosen))
    alone = [Adapted(base, down[:2], up[:, :2]), Adapted(base, down[2:], up[:, 2:]), base]
    for i, weight in enumerate(alone):
        np.testing.assert_allclose(got[i], matmul(x[i], weight), atol=1e-4)


@pytest.mark.parametrize("parts", [1, 2])
def test_widened_rows_give_the_same_in_one_product(parts):
    base, down, up, x = random(4, 8, 16), random(6, 16), random(4, 8, 6), random(3, 16)
    own = base.reshape(parts, 32 // parts, 16)
    rows = jnp.concatenate([own, jnp.broadcast_to(down, (parts, 6, 16))], axis=1)
    numbers = jnp.asarray([2, 0, 1])
    wide, apart = choose((Widened(rows, up, slots=2), Adapted(base, down, up, slots=2)), numbers)
    assert wide.shape == apart.shape == (4, 8, 16)
    np.testing.assert_allclose(matmul(x, wide), matmul(x, apart), atol=1e-4)
    np.testing.assert_allclose(matmul(x, wide)[1], matmul(x, base)[1], atol=1e-5)
    some = jnp.asarray([2, 1])
    np.testing.assert_allclose(matmul(x[some], of_rows(wide, some)), matmul(x, wide)[some], atol=1e-5)
    heads = random(3, 4, 16)
    whole = jnp.stack(
        [
            per_head(heads[i], merged(base, down[at], up[..., at], 1))
            for i, at in enumerate((slice(3, 6), slice(0, 0), slice(0, 3)))
        ]
    )
    np.testing.assert_allclose(per_head(heads, apart), whole, atol=1e-4)


def test_a_magnitude_sets_the_norm_of_each_row():
    base, down, up, x = random(8, 16), random(2, 16), random(8, 2), random(3, 16)
    wanted = jnp.arange(1.0, 9.0)
    whole = merged(base, down, up, 1)
    whole = whole / jnp.linalg.norm(whole, axis=1, keepdims=True) * wanted[:, None]
    np.testing.assert_allclose(matmul(x, Adapted(base, down, up, magnitude=wanted)), x @ whole.T, atol=1e-4)


def test_dropout_keeps_the_mean_and_leaves_the_base_alone():
    base, down, up, x = random(8, 64), random(2, 64), jnp.zeros((8, 2)), random(3, 64)
    dropped = Adapted(base, down, up, key=jax.random.key(0), dropout=0.5)
    np.testing.assert_array_equal(matmul(x, dropped), matmul(x, base))
    ones = Adapted(
        jnp.zeros((1, 4096)), jnp.ones((1, 4096)) / 4096, jnp.ones((1, 1)), None, None, jax.random.key(1), 0.5
    )
    assert abs(float(matmul(jnp.ones((1, 4096)), ones)[0, 0]) - 1) < 0.1
