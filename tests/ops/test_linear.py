"""Test products with weights: arrays, and objects with their own products."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference_models import reference

from dovetail.core.types import Packed
from dovetail.io.load import load
from dovetail.models.decoder import forward, unembed
from dovetail.ops.linear import grouped, joined_name, matmul, matmuls, per_head

pytestmark = pytest.mark.slow


def random(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(sum(shape)).normal(size=shape), jnp.float32)


def test_matmul_contracts_the_last_dims():
    x, w = random(2, 3, 4, 5), random(6, 7, 4, 5)
    np.testing.assert_allclose(matmul(x, w, dims=2), np.einsum("abnh,fgnh->abfg", x, w), atol=1e-5)
    np.testing.assert_allclose(matmul(x, w[0, 0], random(4)), x @ w[0, 0].T + random(4), atol=1e-5)
    assert matmul(x.astype(jnp.bfloat16), w[0, 0].astype(jnp.bfloat16), out_dtype=jnp.float32).dtype == jnp.float32


def test_per_head_equals_its_transpose():
    x, w = random(5, 2, 3), random(2, 4, 3)
    np.testing.assert_allclose(per_head(x, w), np.einsum("tnd,nfd->tnf", x, w), atol=1e-5)
    np.testing.assert_allclose(per_head(per_head(x, w), w, transposed=True).shape, x.shape)


@pytest.mark.parametrize("parts", [1, 2])
def test_joined_weights_give_the_separate_products(parts):
    names, x = {"q": 4, "k": 2}, random(3, 8)
    apart = {"q": random(4, 5, 8), "k": random(2, 5, 8), "q_bias": random(4, 5), "k_bias": random(2, 5)}
    joined = {
        joined_name(names) + suffix: jnp.concatenate(
            [w.reshape(parts, -1, *w.shape[1:]) for w in (apart["q" + suffix], apart["k" + suffix])], axis=1
        )
        for suffix in ("", "_bias")
    }
    for ours, theirs in zip(matmuls(x, joined, names), matmuls(x, apart, names), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


# --- a weight that is no array ----------------------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Doubled:
    """Half a weight, that gives the products of the whole."""

    half: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.half.shape

    def matmul(self, x, dims, out_dtype):
        return 2 * matmul(x, self.half, dims=dims, out_dtype=out_dtype)

    def per_head(self, x, transposed):
        return 2 * per_head(x, self.half, transposed)

    def grouped(self, rows, sizes, platform):
        return 2 * grouped(rows, self.half, sizes, platform)


@functools.partial(jax.jit, static_argnames="cfg")
def logits(params, cfg):
    tokens = jnp.arange(3, 19, dtype=jnp.int32)[None]
    return unembed(params, cfg, forward(params, cfg, tokens, tokens - 3, Packed(jnp.ones_like(tokens)))[0])


@pytest.mark.parametrize("name", ["llama3.1", "gpt-oss", "deepseek-v3"])
def test_the_model_accepts_weights_with_their_own_products(name):
    """All that are multiplied: nothing in the model does it by itself."""
    model = load(reference(name)[1], dtype="f32")

    def wrap(path, x):
        name = str(getattr(path[-1], "key", ""))
        is_weight = x.ndim > 1 and name not in ("embed", "router") and not name.endswith("_bias")
        return Doubled(x / 2) if is_weight else x

    wrapped = jax.tree_util.tree_map_with_path(wrap, model.params)
    np.testing.assert_allclose(logits(wrapped, model.config), logits(model.params, model.config), atol=1e-5, rtol=0)
