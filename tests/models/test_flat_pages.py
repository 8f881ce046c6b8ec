"""Test that a model over flat pages, as on a TPU, gives the same logits, through the reference."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from corners import corners
from test_lowering import MODELS

from dovetail.core.mesh import SERVE, Placement, make_mesh
from dovetail.core.spec import init
from dovetail.core.types import Paged
from dovetail.models.decoder import forward, init_cache, unembed
from dovetail.models.registry import parse_config
from dovetail.models.spec import spec

pytestmark = pytest.mark.slow
TOKENS, PAGE, PAGES = 24, 16, 4


@pytest.mark.parametrize("parts", [1, pytest.param(2, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("name", corners(["dense", "experts, sinks", "latent"], ["latent"]))
def test_flat_pages_give_the_same_logits(name, parts):
    cfg = parse_config(dict(MODELS[name]))
    params = init(spec(cfg), jax.random.key(0), jnp.float32)
    placement = Placement(make_mesh({"tensor": parts}, jax.devices()[:parts]), SERVE) if parts > 1 else None
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, cfg.vocab, TOKENS), jnp.int32)
    ints = [jnp.asarray(x, jnp.int32) for x in ([[5, 1, 2, 3], [0, 7, 4, 6]], [20, 4], [0, 20, 24], [2])]
    positions = jnp.concatenate([jnp.arange(20), jnp.arange(4)])

    def logits(platform: str | None) -> jax.Array:
        cache = init_cache(cfg, 2 * PAGES, PAGE, jnp.float32, placement, platform)
        assert {entry.ndim for entry in cache} == {3 if platform == "tpu" else 4}
        ctx = Paged(*ints, platform=platform, placement=placement)
        hidden, cache = jax.jit(lambda cache: forward(params, cfg, tokens, positions, ctx, cache))(cache)
        again, _ = jax.jit(lambda cache: forward(params, cfg, tokens, positions, ctx, cache))(cache)
        np.testing.assert_array_equal(hidden, again)  # the same was written again
        return unembed(params, cfg, hidden)

    np.testing.assert_allclose(logits("tpu"), logits(None), atol=1e-5)
