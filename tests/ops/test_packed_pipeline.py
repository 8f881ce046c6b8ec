"""The pipelined products with packed weights on Hopper: interpreted, lowered for a GPU, chosen where it is asked for."""

from __future__ import annotations

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ops.test_packed_product import FORMATS, a_weight, interpreted, some_experts, untraced

from dovetail.core.formats import Format
from dovetail.ops.glu import Glu
from dovetail.ops.kernels.gpu import packed_pipeline as kernel
from dovetail.ops.kernels.gpu import packed_product, packed_weights
from dovetail.ops.kernels.gpu.experts import CHUNK, Tiles

pytestmark = pytest.mark.slow

GLU = Glu(limit=7.0)
E = 2


def a_table(N: int, counts: list[int]) -> tuple[np.ndarray, int]:
    """Return tiles of these tokens, the last one not used: the first two are of the last expert; and their rows."""
    count = np.asarray([*counts, 0], np.int32)
    rows = -(-count // CHUNK) * CHUNK
    first = np.cumsum(rows) - rows
    expert = np.where(np.arange(len(count)) < 2, E - 1, 0)
    return np.stack([expert, first, first, count]).astype(np.int32), int(rows.sum())


@contextlib.contextmanager
def two_programs(monkeypatch):
    """Interpret the kernel with programs that take several items each."""
    with interpreted(monkeypatch), monkeypatch.context() as patch:
        patch.setattr(kernel, "PROGRAMS", 2)
        yield


# name: (rows of a weight, values of a row, tokens of the tiles)
CASES = {
    "mxfp4": (256, 320, [24, 9, 17]),
    "fp8": (128, 192, [16, 16]),
    "fp8 in groups": (64, 256, [16, 3]),
    "int4": (192, 384, [24, 11]),
    "int4 in groups of 32": (64, 256, [16, 5]),
    "uint4": (64, 320, [16, 1]),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "mxfp4" else pytest.mark.slow) for n in CASES])
def test_tiles_equal_those_of_unpacked_experts(monkeypatch, name):
    out, size, counts = CASES[name]
    form, rng = FORMATS[name], np.random.default_rng(out)
    N = max(counts)
    table, R = a_table(N, counts)
    x = jnp.asarray(rng.normal(size=(R, size)), jnp.bfloat16)
    weights = [a_weight(form, E, out, size, seed=i) for i in range(2)]
    biases = [jnp.asarray(rng.normal(size=(E, out)), jnp.bfloat16) for _ in weights]
    tiles = Tiles(x, jnp.asarray(table), None, N, R)
    p = kernel.plan(form, tiles, (E, out, size), 2)
    with two_programs(monkeypatch):
        got = kernel.product(
            x, [w.arrays for w in weights], biases, tiles, p, epilogue=lambda sums: [GLU.in_kernel(*sums)]
        )
    got = np.asarray(got, np.float32)
    for expert, first, _, count in table.T:
        own = np.asarray(x[first : first + count], np.float32)
        gate, up = (
            own @ np.asarray(w.astype(jnp.float32).dense())[expert].T + np.asarray(b[expert], np.float32)
            for w, b in zip(weights, biases, strict=True)
        )
        expected = jax.jit(GLU)(gate, up)
        np.testing.assert_allclose(got[first : first + count], expected, atol=0.02, rtol=0.02)
