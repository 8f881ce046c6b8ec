"""The pipelined products of packed experts on Hopper: interpreted, lowered, chosen for mxfp4 and fp8."""

from __future__ import annotations

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ops.test_packed_product import FORMATS, a_weight, interpreted, some_experts, untraced

from dovetail.ops.glu import Glu
from dovetail.ops.kernels.gpu import packed_fp8, packed_halves, packed_product, packed_weights
from dovetail.ops.kernels.gpu import packed_pipeline as kernel
from dovetail.ops.kernels.gpu.experts import CHUNK, Tiles
from dovetail.ops.kernels.gpu.packed_codes import ROWS

pytestmark = pytest.mark.slow

GLU = Glu(limit=7.0)
E = 2


def a_table(counts: list[int]) -> tuple[np.ndarray, int]:
    """Return tiles of these tokens, the last one not used: the first two are of the last expert; and their rows."""
    count = np.asarray([*counts, 0], np.int32)
    rows = -(-count // CHUNK) * CHUNK
    first = np.cumsum(rows) - rows
    expert = np.where(np.arange(len(count)) < 2, E - 1, 0)
    return np.stack([expert, first, first, count]).astype(np.int32), int(rows.sum())


@contextlib.contextmanager
def two_programs(monkeypatch):
    """Interpret the kernel with programs that take several items each, and formulas of arrays for those of threads."""

    def greatest_scales(ref, groups):
        return scales_of(ref, groups).max(axis=1)

    def fragment(codes, scales, groups, step, greatest, _table):
        found = codes[...]
        values = e2m1(jnp.stack([found & 15, found >> 4], axis=-1).reshape(len(found), -1).astype(jnp.int32))
        blocks = jnp.minimum(step * 4 + jnp.arange(128) // 32, groups - 1)
        relative = jnp.take(scales_of(scales, groups), blocks, axis=1) - greatest[:, None] + packed_fp8.TOP
        return packed_halves.in_order(values * jnp.exp2(relative.astype(jnp.float32))).astype(packed_halves.E4M3)

    def add_product(acc, weights, tokens):
        weights = weights if isinstance(weights, jax.Array) else weights[...]
        weights = weights.astype(jnp.bfloat16) if weights.dtype == packed_halves.E4M3 else weights
        of_bf16(acc, weights, tokens)

    with interpreted(monkeypatch), monkeypatch.context() as patch:
        patch.setattr(kernel, "PROGRAMS", 2)
        patch.setattr(packed_fp8, "lane_tables", lambda _: [])
        for stand_in in (greatest_scales, fragment):
            patch.setattr(packed_fp8, stand_in.__name__, stand_in)
        of_bf16 = packed_product.add_product
        patch.setattr(packed_product, "add_product", add_product)
        yield


def e2m1(code):
    whole = jnp.exp2(((code & 7) >> 1).astype(jnp.float32) - 1)
    size = jnp.where(code & 7 < 2, (code & 1) * 0.5, whole * (1 + (code & 1) * 0.5))
    return jnp.where(code >> 3 == 1, -size, size)


def scales_of(ref, groups):
    return ref[...].reshape(-1)[: ROWS * groups].reshape(ROWS, groups).astype(jnp.int32)


# name: (rows of a weight, values of a row, tokens of the tiles, warpgroups that compute, weights)
CASES = {"mxfp4": (192, 320, [16, 9], 2, 2), "fp8": (192, 384, [16], 2, 1), "fp8 in groups": (64, 256, [16, 3], 2, 2)}


@pytest.mark.parametrize(("name", "case"), CASES.items())
def test_tiles_equal_those_of_unpacked_experts(monkeypatch, name, case):
    out, size, counts, workers, names = case
    form, rng = FORMATS[name], np.random.default_rng(out)
    table, R = a_table(counts)
    x = jnp.asarray(rng.normal(size=(R, size)), jnp.bfloat16)
    weights = [a_weight(form, E, out, size, seed=i) for i in range(names)]
    biases = [jnp.asarray(rng.normal(size=(E, out)), jnp.bfloat16) for _ in weights]
    tiles = Tiles(x, jnp.asarray(table), jnp.zeros((R, 1), jnp.int32), max(counts), R)
    p = kernel.plan(form, tiles, (E, out, size), names)._replace(workers=workers)
    glu = (lambda gate, up: GLU.in_kernel(gate, up)) if names == 2 else (lambda only: only)
    with two_programs(monkeypatch):
        arrays = [w.arrays for w in weights]
        got = kernel.product(x, arrays, biases, tiles, p, epilogue=lambda sums: [glu(*sums)])
    got = np.asarray(got, np.float32)
    whole = [np.asarray(w.astype(jnp.float32).dense()) for w in weights]
    for expert, first, _, count in table.T:
        own = np.asarray(x[first : first + count], np.float32)
        sums = [own @ w[expert].T + np.asarray(b[expert], np.float32) for w, b in zip(whole, biases, strict=True)]
        np.testing.assert_allclose(got[first : first + count], jax.jit(glu)(*sums), atol=0.02, rtol=0.02)


@pytest.mark.parametrize(
    ("name", "T", "chosen"),
    [
        ("mxfp4", 40, True),
        ("fp8", 40, True),
        pytest.param("fp8 in groups", 40, True, marks=pytest.mark.thorough),
        pytest.param("mxfp4", 8, False, marks=pytest.mark.thorough),
        pytest.param("int4", 40, False, marks=pytest.mark.thorough),
        pytest.param("fp8 with half a step", 40, False, marks=pytest.mark.thorough),
        pytest.param("int8", 40, False, marks=pytest.mark.thorough),
    ],
)
def test_experts_in_mxfp4_and_fp8_take_the_pipeline(name, T, chosen):
    run = untraced(packed_weights.few_token_packed_experts)
    form, D = FORMATS[name.removesuffix(" with half a step")], 192 if "half" in name else 128
    traced = jax.jit(lambda *args: run(*args, GLU)).trace(*some_experts(T, form, D=D, F=128))
    lowered = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert ("packed_pipeline_" in lowered) == chosen


@pytest.mark.parametrize(
    ("name", "N", "shape", "names", "expected"),
    [
        ("mxfp4", 40, (2880, 2880), 2, (3, 2, 4)),
        ("mxfp4", 80, (2880, 2880), 2, (2, 2, 4)),
        ("fp8", 24, (768, 2048), 2, (3, 2, 3)),
        ("fp8 in groups", 16, (64, 512), 1, (3, 2, 4)),
    ],
)
def test_plans(name, N, shape, names, expected):
    tiles = Tiles(jnp.zeros((N, shape[1])), jnp.zeros((4, 1), jnp.int32), jnp.zeros((N, 1), jnp.int32), N, N)
    p = kernel.plan(FORMATS[name], tiles, shape, names)
    assert (p.workers, p.buffers, p.part.stages) == expected


def test_other_formats_and_shapes_are_left_to_the_other_kernel():
    assert kernel.fits(FORMATS["mxfp4"], (2880, 2880), 2)
    assert not kernel.fits(FORMATS["mxfp4"], (24576, 24576), 2)
    assert not kernel.fits(FORMATS["fp8"], (2880, 2880))  # half a step at the end of rows
    assert not any(kernel.fits(FORMATS[name], (768, 2048)) for name in ("int8", "int4", "uint4"))
