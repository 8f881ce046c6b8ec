"""tokamax's splash kernel, interpreted, against the reference: outputs and gradients."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dovetail.core.mesh import TRAIN, Placement, make_mesh
from dovetail.core.types import Packed
from dovetail.ops.packed import on_mesh, packed_attention

pytest.importorskip("tokamax", reason="tokamax wants Python 3.12 and jax 0.11.1: pip install 'dovetail[kernels]'")
T, N, K, SCALE = 256, 4, 2, 0.1


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def rows(*lengths: int) -> Packed:
    ids = np.repeat(np.arange(1, len(lengths) + 1), lengths)
    return Packed(jnp.asarray(np.stack([ids, np.ones_like(ids)]), jnp.int32))


@pytest.mark.parametrize(
    "head_dim, value_dim, options",
    [
        (64, 64, {}),
        (64, 64, dict(window=50)),
        (64, 48, dict(softcap=3.0)),
        (64, 64, dict(sinks=True)),
        (128, 128, dict(window=50, sinks=True)),
    ],
    ids=str,
)
def test_equals_the_reference(head_dim, value_dim, options):
    from dovetail.ops.kernels.tpu.packed import tokamax_attention as kernel

    ctx, given = rows(100, 156), normal(9, N)
    q, k, v = normal(0, 2, T, N, head_dim), normal(1, 2, T, K, head_dim), normal(2, 2, T, K, value_dim)

    def outputs_and_gradients(run):
        def loss(q, k, v, sinks):
            out = run(q, k, v, ctx, scale=SCALE, **options | dict(sinks=sinks if options.get("sinks") else None))
            return jnp.sum(jnp.sin(out)), out

        return jax.jit(jax.grad(loss, (0, 1, 2, 3), has_aux=True))(q, k, v, given)

    ours = outputs_and_gradients(functools.partial(kernel, interpret=True))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4), ours, outputs_and_gradients(packed_attention)
    )


def test_queries_that_are_the_last_of_their_keys():
    from dovetail.ops.kernels.tpu.packed import tokamax_attention as kernel

    q, k, v = normal(0, 1, T, N, 64), normal(1, 1, 2 * T, K, 64), normal(2, 1, 2 * T, K, 64)
    keys = jnp.asarray(np.repeat([1, 2], T)[None], jnp.int32)
    options = dict(scale=SCALE, window=70, key_segments=keys)
    got = kernel(q, k, v, Packed(keys[:, T:]), interpret=True, **options)
    np.testing.assert_allclose(got, packed_attention(q, k, v, Packed(keys[:, T:]), **options), atol=1e-5)


def test_each_device_has_the_sinks_of_its_heads():
    from dovetail.ops.kernels.tpu.packed import tokamax_attention as kernel

    placement = Placement(make_mesh(dict(tensor=2, data=2), jax.devices()[:4]), TRAIN)
    ctx, sinks = rows(100, 156), normal(9, N)
    q, k, v = normal(0, 2, T, N, 64), normal(1, 2, T, K, 64), normal(2, 2, T, K, 64)
    run = functools.partial(on_mesh, functools.partial(kernel, interpret=True), scale=SCALE, sinks=sinks)
    got = jax.jit(run)(q, k, v, Packed(ctx.segment_ids, placement=placement))
    np.testing.assert_allclose(got, packed_attention(q, k, v, ctx, scale=SCALE, sinks=sinks), atol=1e-5)
