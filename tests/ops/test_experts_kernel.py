"""The experts of few tokens on Hopper: their tiles, the kernel interpreted and lowered, and where it is chosen."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from dovetail.ops import dispatch_products, moe
from dovetail.ops.glu import Glu
from dovetail.ops.kernels.gpu import experts as kernel

pytestmark = pytest.mark.slow

D, F = 128, 64


def some_inputs(T: int, E: int, k: int, biases: bool = False, dtype=jnp.bfloat16):
    rng = np.random.default_rng(T)
    shapes = {"gate": (E, F, D), "up": (E, F, D), "down": (E, D, F)}
    shapes |= {"gate_bias": (E, F), "up_bias": (E, F), "down_bias": (E, D)} if biases else {}
    params = {name: jnp.asarray(rng.normal(size=shape) * 0.1, dtype) for name, shape in shapes.items()}
    chosen = rng.random((T, E)).argsort(axis=1)[:, :k]
    return jnp.asarray(rng.normal(size=(T, D)), dtype), jnp.asarray(rng.random((T, k)), jnp.float32), chosen, params


def by_tiles(x: np.ndarray, table: np.ndarray, reads: int, ws: list, N: int, R: int) -> np.ndarray:
    """Multiply as the kernel does; what it does not write is NaN."""
    out = np.full((R, ws[0].shape[1]), np.nan, np.float32)
    rows = np.pad(x, ((0, N), (0, 0)))
    for column in table.T:
        expert, target, count = column[[0, 2, 3]]
        sums = [rows[column[reads] :][:N] @ w[expert].T for w in ws]
        value = sums[0] if len(sums) == 1 else sums[0] / (1 + np.exp(-sums[0])) * sums[1]
        end = -(-count // kernel.CHUNK) * kernel.CHUNK
        assert np.isnan(out[target : target + end]).all()  # no two tiles write the same rows
        out[target : target + end] = value[:end]
    return out


@pytest.mark.parametrize(
    ("T", "E", "k"),
    [(1, 16, 4), (3, 16, 4), (8, 8, 2), (40, 12, 2)],
    ids=["one token", "fewer pairs than experts", "more pairs", "sorted, several tiles"],
)
def test_the_tiles_have_every_pair_once(T, E, k, monkeypatch):
    monkeypatch.setattr(kernel, "MAX_TOKENS", 8)
    x, weights, chosen, params = some_inputs(T, E, k, dtype=jnp.float32)
    chosen[chosen == E - 1] = 0  # an expert is idle
    sizes = {}

    def arrange(x, chosen):
        tiles = (kernel.all_tokens if T <= kernel.CHUNK else kernel.sorted_tokens)(x, chosen, E)
        sizes.update(N=tiles.N, R=tiles.R)
        return tiles.x, tiles.table, tiles.row

    rows, table, row = map(np.asarray, jax.jit(arrange)(x, chosen))
    assert (len(table) == 1) == (T == 1)
    numbers = [[kernel.tile_number(table, i, tile) for tile in range(table.shape[1])] for i in range(4)]
    table = np.asarray(numbers)
    gate, up, down = (np.asarray(params[name]) for name in ("gate", "up", "down"))
    hidden = by_tiles(rows, table, 1, [gate, up], **sizes)
    got = np.einsum("tkd,tk->td", by_tiles(hidden, table, 2, [down], **sizes)[row], weights)
    expected = jax.jit(moe.experts_reference, static_argnums=4)(x, weights, chosen, params, Glu())
    np.testing.assert_allclose(got, expected, atol=1e-5)


@pytest.mark.skipif(not hasattr(plgpu, "InterpretGPUParams"), reason="jax 0.12 interprets transposed references first")
@pytest.mark.parametrize("T", [1, 3, 12], ids=["one token", "all tokens", "sorted"])
def test_the_kernel_equals_the_reference(T):
    x, weights, chosen, params = some_inputs(T, 4, 2, biases=True)
    glu = Glu(limit=7.0)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        got = kernel.few_token_experts(x, weights, chosen, params, glu)
    exact = jax.tree.map(lambda a: a.astype(jnp.float32), (x, params))
    expected = moe.experts_reference(exact[0], weights, chosen, exact[1], glu)
    np.testing.assert_allclose(got.astype(jnp.float32), expected, atol=0.02)


@pytest.mark.parametrize(("T", "glu"), [(1, Glu("gelu_tanh")), (24, Glu(limit=7.0))], ids=["one token", "sorted"])
def test_the_kernel_lowers_for_a_gpu(T, glu):
    inputs = some_inputs(T, 4, 2, biases=glu.limit is not None)
    run = jax.jit(lambda *args: kernel.few_token_experts(*args, glu))
    assert "mosaic_gpu" in run.trace(*inputs).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({}, None),
        (dict(x=jnp.zeros((kernel.FEW + 1, D), jnp.bfloat16)), "tokens"),
        (dict(x=jnp.zeros((1, 8, D), jnp.bfloat16)), "matrix"),
        (dict(x=jnp.zeros((8, D))), "bf16"),
        (dict(gate=jnp.zeros((4, 40, D), jnp.bfloat16)), "multiples"),
        (dict(glu=Glu("gelu")), "GELU"),
    ],
)
def test_the_kernel_is_chosen_where_it_runs(monkeypatch, change, why):
    x, _, _, params = some_inputs(8, 4, 2)
    x, glu = change.get("x", x), change.get("glu", Glu())
    params |= {"gate": change.get("gate", params["gate"])}
    assert dispatch_products.experts_kernel(x, params, glu, None, None) is None  # on a CPU
    monkeypatch.setattr(dispatch_products, "is_one_gpu", lambda *_: True)
    monkeypatch.setattr(dispatch_products, "is_hopper", lambda: True)
    chosen = dispatch_products.experts_kernel(x, params, glu, None, None)
    assert chosen is (None if why else kernel.few_token_experts)
    assert (why or "") in (kernel.why_not_few_tokens(x, params, glu) or "")
