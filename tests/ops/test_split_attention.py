"""Attention of towers with heads of 72 dims: the columns of our kernel for Hopper. (The kernel itself needs one.)"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dovetail.ops import bidirectional, dispatch
from dovetail.ops.kernels.gpu import bidirectional as kernel

pytestmark = pytest.mark.slow

N, P, K, H, D = 2, 128, 2, 72, 24
NAMES = {"q": K, "k": K, "v": K}


@pytest.fixture
def weights() -> dict[str, jax.Array]:
    shapes = {name: (K, H, D) for name in NAMES} | {"o": (D, K, H)}
    shapes |= {f"{name}_bias": (K, H) for name in NAMES} | {"o_bias": (D,)}
    rng = np.random.default_rng(0)
    return {name: jnp.asarray(rng.normal(size=shape) * 0.2, jnp.float32) for name, shape in shapes.items()}


def in_columns(qkv: jax.Array, *, heads: int, scale: float) -> jax.Array:
    """Compute `split_attention` by the reference."""

    def whole(x: jax.Array) -> jax.Array:
        wide, tail = jnp.split(x, [heads * kernel.WIDE], axis=-1)
        return jnp.concatenate([part.reshape(*x.shape[:2], heads, -1) for part in (wide, tail)], axis=-1)

    q, k, v = (whole(x) for x in jnp.split(qkv, 3, axis=-1))
    return kernel.split_columns(bidirectional.reference(q, k, v, scale=scale, lengths=None), 2)


def test_the_columns_of_the_kernel_give_the_same_output_and_gradient(weights, monkeypatch):
    monkeypatch.setattr(kernel, "split_attention", in_columns)
    monkeypatch.setattr(bidirectional, "choose_self_attention", lambda *_: "split")
    x = jnp.asarray(np.random.default_rng(1).normal(size=(N, P, D)), jnp.float32)

    def plain(p, x):
        return bidirectional._self_attention(p, x, NAMES, None, None)

    def split(p, x):
        return bidirectional.self_attention(p, x, NAMES)

    def output_and_gradient(run):
        def loss(p):
            out = run(p, x)
            return jnp.sum(out**2), out

        (_, out), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(weights)
        return out, grads

    (ours, *grads), (theirs, *others) = output_and_gradient(split), output_and_gradient(plain)
    np.testing.assert_allclose(ours, theirs, atol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), grads, others)


def test_the_kernel_lowers_for_a_gpu():
    qkv = jax.ShapeDtypeStruct((1, 256, 3 * 4 * kernel.COLUMNS), jnp.bfloat16)
    run = jax.jit(lambda x: kernel.split_attention(x, heads=4, scale=0.1))
    assert "mosaic_gpu" in run.trace(qkv).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    ("shape", "lengths", "how"),
    [
        ((4096, 16, 72), None, "split"),
        ((4096, 16, 64), None, "apart"),
        ((4096, 6, 72), None, "apart"),
        ((196, 16, 72), None, "apart"),
        ((4096, 16, 72), 1, "apart"),
    ],
)
def test_the_kernel_is_chosen_where_it_runs(monkeypatch, shape, lengths, how):
    heads = jax.ShapeDtypeStruct((1, *shape), jnp.bfloat16)
    assert dispatch.choose_self_attention(None, heads, lengths) == "apart"  # on a CPU
    monkeypatch.setattr(dispatch, "is_one_gpu", lambda *_: True)
    monkeypatch.setattr(dispatch, "is_hopper", lambda: True)
    assert dispatch.choose_self_attention(None, heads, lengths) == how
