"""Products with packed weights on TPUs: the kernel, interpreted, against unpacking first, and where it is chosen."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from corners import corners
from jax.experimental.pallas import tpu as pltpu

from dovetail.core.formats import Format
from dovetail.ops.kernels.tpu import packed_product
from dovetail.ops.kernels.tpu.packed_product import lies_across, packed_grouped_matmul, packed_matmul, visits_of
from dovetail.ops.linear import grouped, matmul
from dovetail.ops.quant.pack import pack
from dovetail.ops.quant.weight import Quantized

FORMATS = {
    "int8": Format("int8", 64),
    "fp8": Format("fp8", 128),
    "fp8 in groups of 64": Format("fp8", 64),
    "int4": Format("int4", 128, "float16"),
    "int4 in groups of 32": Format("int4", 32, "float16"),
    "uint4": Format("uint4", 64, "float16"),
    "mxfp4": Format("mxfp4", 32, "uint8"),
}
# Orders of the bytes; rows of 1,152 and 1,088 inputs end inside of a chunk
ALONG, ACROSS = [(96, 1024), (96, 1280)], [(384, 1152), (384, 1088)]

CASES = [
    (name, shape, tokens)
    for name, form in FORMATS.items() for shape in (*ALONG, *ACROSS) for tokens in (1, 21)
    if shape[1] % form.group == 0 and not (form.name in ("int8", "fp8") and shape == ACROSS[0])
]  # fmt: skip
CORNERS = [("int4", ALONG[0], 1), ("uint4", ACROSS[0], 21), ("mxfp4", ALONG[1], 21), ("mxfp4", ACROSS[1], 1)]
CORNERS += [("fp8", ALONG[1], 21), ("fp8 in groups of 64", ACROSS[1], 1)]
# experts' sizes of 40 rows, the last ones in no group
SIZES = {"few": [3, 0, 20, 9], "all in one": [0, 0, 40, 0], "nobody": [0, 0, 0, 0], "at tiles": [16, 16, 0, 8]}


def a_weight(form: Format, *shape: int) -> Quantized:
    rng = np.random.default_rng(0)
    values = rng.normal(size=shape) * np.exp(rng.normal(size=(*shape[:-1], 1)))  # scales that differ
    return Quantized(pack(form, jnp.asarray(values, jnp.float32)), form, jnp.dtype("bfloat16"))


def an_input(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(1).normal(size=shape), jnp.bfloat16)


def check(got: jax.Array, expected: jax.Array) -> None:
    got, expected = (np.asarray(y, np.float32) for y in (got, expected))
    np.testing.assert_allclose(got, expected, rtol=1e-2, atol=2e-3 * np.abs(expected).max(initial=0))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "shape", "tokens"), corners(CASES, CORNERS))
def test_equals_unpacking_first(name, shape, tokens):
    weight, x = a_weight(FORMATS[name], *shape), an_input(tokens, shape[1])
    assert lies_across(shape[0], weight.arrays["codes"].shape[1]) == (shape in ACROSS)
    got = packed_matmul(x, weight, jnp.float32, interpret=pltpu.InterpretParams())
    assert got.shape == (tokens, shape[0]) and got.dtype == jnp.float32
    check(got, matmul(x, weight.dense(), out_dtype=jnp.float32))


@pytest.mark.slow
def test_several_tiles_of_tokens(monkeypatch):
    monkeypatch.setattr(packed_product, "ROWS", (16, 16))
    weight, x = a_weight(FORMATS["int4"], *ALONG[0]), an_input(37, ALONG[0][1])
    got = packed_matmul.__wrapped__(x, weight, interpret=pltpu.InterpretParams())
    check(got, matmul(x, weight.dense()))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "shape"), [("mxfp4", ACROSS[0]), ("int4", ALONG[0])])
@pytest.mark.parametrize("sizes", SIZES)
def test_experts(monkeypatch, name, shape, sizes):
    monkeypatch.setattr(packed_product, "ROWS", (16, 16))  # groups end inside of tiles
    weight, x = a_weight(FORMATS[name], 4, *shape), an_input(40, shape[1])
    given = jnp.asarray(SIZES[sizes], jnp.int32)
    got = packed_grouped_matmul.__wrapped__(x, weight, given, interpret=pltpu.InterpretParams())
    assert got.shape == (40, shape[0]) and got.dtype == jnp.bfloat16
    count = sum(SIZES[sizes])
    check(got[:count], grouped(x, weight.dense(), given)[:count])


@pytest.mark.parametrize("sizes", SIZES)
def test_every_row_is_visited_by_its_expert_once(sizes):
    expert, tile, start, end = (np.asarray(x) for x in visits_of(jnp.asarray(SIZES[sizes]), 48, 16))
    seen = [(e, row) for e, t, s, stop in zip(expert, tile, start, end, strict=True)
            for row in range(max(16 * t, s), min(16 * t + 16, stop))]  # fmt: skip
    assert seen == [(e, row) for row, e in enumerate(np.repeat(np.arange(4), SIZES[sizes]))]
    assert (np.diff(tile) >= 0).all()  # an output's tile is left once


@pytest.mark.parametrize("code", range(16))
def test_e2m1(code):
    from dovetail.ops.quant.unpack import E2M1_VALUES

    assert packed_product._e2m1(jnp.int32(code)) == E2M1_VALUES[code]
