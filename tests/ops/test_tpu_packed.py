"""Products with packed weights on TPUs: the kernel, interpreted, against unpacking first, and where it is chosen."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from corners import corners
from jax.experimental.pallas import tpu as pltpu

from dovetail.core.formats import Format
from dovetail.core.mesh import SERVE, Placement, make_mesh
from dovetail.ops import dispatch_products
from dovetail.ops.kernels.tpu import packed_product
from dovetail.ops.kernels.tpu.packed_product import lies_across, packed_grouped_matmul, packed_matmul, visits_of
from dovetail.ops.linear import grouped, matmul
from dovetail.ops.quant.pack import pack
from dovetail.ops.quant.unpack import E2M1_VALUES
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
# Orders of the bytes. Tiles have 512 outputs, chunks 1,024 inputs.
ALONG, ACROSS = [(96, 1024), (600, 1280), (96, 576)], [(384, 1152), (384, 1088)]

CASES = [
    (name, shape, tokens)
    for name, form in FORMATS.items() for shape in (*ALONG, *ACROSS) for tokens in (1, 21)
    if shape[1] % form.group == 0 and not (form.name in ("int8", "fp8") and shape == ACROSS[0])
]  # fmt: skip
CORNERS = [("int4", ALONG[0], 1), ("uint4", ACROSS[0], 21), ("mxfp4", ALONG[1], 21), ("mxfp4", ACROSS[1], 1)]
CORNERS += [("fp8", ALONG[1], 21), ("fp8 in groups of 64", ACROSS[1], 1), ("int8", ALONG[2], 21)]
# experts' sizes of 40 rows, the last ones in no group
SIZES = {"few": [3, 0, 20, 9], "all in one": [0, 0, 40, 0], "no rows": [0, 0, 0, 0], "at tiles": [16, 16, 0, 8]}
SIZES |= {"one": [40], "part of one": [20]}


def a_weight(form: Format, *shape: int) -> Quantized:
    rng = np.random.default_rng(0)
    values = rng.normal(size=shape) * np.exp(rng.normal(size=(*shape[:-1], 1)))  # scales that differ
    return Quantized(pack(form, jnp.asarray(values, jnp.float32)), form, jnp.dtype("bfloat16"))


def an_input(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(1).normal(size=shape), jnp.bfloat16)


def check(got: jax.Array, expected: jax.Array) -> None:
    wanted = np.asarray(expected, np.float32)
    np.testing.assert_allclose(
        np.asarray(got, np.float32), wanted, rtol=1e-2, atol=2e-3 * np.abs(wanted).max(initial=0)
    )


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
    got = packed_matmul(x, weight, interpret=pltpu.InterpretParams())
    check(got, matmul(x, weight.dense()))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "shape"), [("mxfp4", ACROSS[0]), ("int4", ALONG[0])])
@pytest.mark.parametrize("sizes", SIZES)
def test_experts(monkeypatch, name, shape, sizes):
    monkeypatch.setattr(packed_product, "ROWS", (16, 16))  # groups end inside of tiles
    weight, x = a_weight(FORMATS[name], len(SIZES[sizes]), *shape), an_input(40, shape[1])
    given = jnp.asarray(SIZES[sizes], jnp.int32)
    got = packed_grouped_matmul(x, weight, given, interpret=pltpu.InterpretParams())
    assert got.shape == (40, shape[0]) and got.dtype == jnp.bfloat16
    count = sum(SIZES[sizes])
    check(got[:count], grouped(x, weight.dense(), given)[:count])


@pytest.mark.slow
def test_experts_have_a_gradient():
    weight, x, sizes = a_weight(FORMATS["mxfp4"], 2, 32, 128), an_input(8, 128), jnp.asarray([3, 5])
    form = dispatch_products.quantized_grouped_kernel(weight.format, x, "tpu", None)
    assert form is packed_grouped_matmul

    def loss(multiply):
        return lambda x: (multiply(x).astype(jnp.float32) ** 2).sum()

    ours = jax.grad(loss(lambda x: packed_grouped_matmul(x, weight, sizes, interpret=pltpu.InterpretParams())))(x)
    check(ours, jax.grad(loss(lambda x: grouped(x, weight.dense(), sizes)))(x))


@pytest.mark.parametrize("sizes", SIZES)
def test_every_row_is_visited_by_its_expert_once(sizes):
    expert, tile, start, end = (np.asarray(x) for x in visits_of(jnp.asarray(SIZES[sizes]), 48, 16))
    seen = [(e, row) for e, t, s, stop in zip(expert, tile, start, end, strict=True)
            for row in range(max(16 * t, s), min(16 * t + 16, stop))]  # fmt: skip
    assert seen == [(e, row) for row, e in enumerate(np.repeat(np.arange(len(SIZES[sizes])), SIZES[sizes]))]
    assert (np.diff(tile) >= 0).all()  # an output's tile is left once


@pytest.mark.parametrize("name", ["int4", "uint4", "mxfp4"])
def test_every_code_becomes_its_number(name):
    codes = jnp.arange(256, dtype=jnp.uint8).reshape(4, 64)
    got = np.stack(jax.jit(packed_product._values, static_argnums=0)(name, codes), axis=-1).reshape(-1)
    halves = np.stack([codes & 15, codes >> 4], axis=-1).reshape(-1).astype(np.int32)
    numbers = {"int4": halves - 8.0, "uint4": halves, "mxfp4": E2M1_VALUES[halves] * 2.0**-packed_product.E2M1}
    np.testing.assert_array_equal(got, numbers[name])


LEFT = [  # to XLA, or to the reference
    ("int4", "cpu", (4, 256), "bfloat16", 1),
    ("int4", "tpu", (2, 4, 256), "bfloat16", 1),  # training
    ("int4", "tpu", (4, 256), "float32", 1),
    ("int4", "tpu", (4, 256), "bfloat16", 2),
    ("int8 by rows", "tpu", (4, 256), "bfloat16", 1),
    ("nf4", "tpu", (4, 256), "bfloat16", 1),
]


@pytest.mark.parametrize("name", [name for name in FORMATS if "groups" not in name])
def test_it_is_chosen_on_a_tpu(name):
    x = jax.ShapeDtypeStruct((4, 256), jnp.bfloat16)
    assert dispatch_products.quantized_kernel(FORMATS[name], x, "tpu", None, 512) is packed_matmul


@pytest.mark.parametrize(("name", "platform", "shape", "dtype", "devices"), LEFT)
def test_it_is_not_chosen(name, platform, shape, dtype, devices):
    form = {"int8 by rows": Format("int8"), "nf4": Format("nf4", 64)}.get(name) or FORMATS[name]
    placement = Placement(make_mesh({"tensor": devices}, jax.devices()[:devices]), SERVE)
    x = jax.ShapeDtypeStruct(shape, dtype)
    assert dispatch_products.why_not_packed_tpu(form, x, platform, placement)
    assert dispatch_products.quantized_kernel(form, x, platform, placement, 512) is None
