"""Products with packed weights on Hopper: codes as numbers, the kernel interpreted and lowered, where it is chosen.

Three functions of the kernel have no interpreter: unpacking in registers, loads of a column, and products whose left
operand is in registers. `interpreted` replaces them by the same formulas on arrays.
"""

from __future__ import annotations

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams, force_gpu_interpret_mode
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dovetail.core.formats import CODES, Format
from dovetail.ops import dispatch, moe
from dovetail.ops.glu import Glu
from dovetail.ops.kernels.gpu import experts, packed_codes, packed_product, packed_weights
from dovetail.ops.quant.pack import pack
from dovetail.ops.quant.unpack import E2M1_VALUES
from dovetail.ops.quant.weight import Quantized

FORMATS = {
    "int8": Format("int8"),
    "fp8": Format("fp8"),
    "fp8 in groups": Format("fp8", 128),
    "int4": Format("int4", 128, "float16"),
    "int4 in groups of 32": Format("int4", 32, "float16"),
    "uint4": Format("uint4", 64, "float16"),
    "mxfp4": Format("mxfp4", 32, "uint8"),
}


def a_weight(form: Format, *shape: int, seed: int = 0) -> Quantized:
    values = np.random.default_rng(seed).normal(size=shape) * 0.1
    return Quantized(jax.jit(pack, static_argnums=0)(form, jnp.asarray(values, jnp.float32)), form, jnp.dtype("bfloat16"))


@functools.cache
def numbers_of_words(name: str) -> np.ndarray:
    """Return the bf16 numbers [65536, planes] of every word; numpy's, as XLA's CPU takes subnormals for zeros."""

    def number(bits: np.ndarray) -> np.ndarray:
        return bits.astype(np.uint16).view(jnp.bfloat16)

    words = np.arange(1 << 16, dtype=np.uint32)
    return np.stack([packed_codes.decoded(words, plane, number) for plane in packed_codes.planes_of(name)], axis=-1)


def numbers_of(codes: jax.Array, name: str) -> jax.Array:
    """Return codes as `packed_codes.numbers` does."""

    def look_up(codes: jax.Array) -> np.ndarray:
        words = np.asarray(codes).view(np.uint16).reshape(len(codes), -1, packed_codes.WORDS)
        return numbers_of_words(name)[words].swapaxes(-1, -2).reshape(len(codes), -1)

    size = codes.shape[1] * CODES[name][1]
    return jax.pure_callback(look_up, jax.ShapeDtypeStruct((len(codes), size), jnp.bfloat16), codes)


@contextlib.contextmanager
def interpreted(monkeypatch):
    """Interpret the kernel, with stand-ins for what has no interpreter."""

    def add_product(acc, weights, tokens):
        def run(left, right):
            left[...], right[...] = weights, tokens[...].T
            plgpu.wgmma(acc, left, right)

        pl.run_scoped(run, plgpu.SMEM(weights.shape, weights.dtype), plgpu.SMEM(tokens.shape[::-1], weights.dtype))

    def column(rows, at, size, _dtype):
        matrix = rows[...].reshape(packed_codes.ROWS, size)
        return jax.lax.dynamic_index_in_dim(matrix, at, axis=1, keepdims=False)

    def store_transposed(ref, x):
        ref[...] = x.T

    zeros = InterpretGPUParams(out_of_bounds_reads="uninitialized", uninitialized_memory="zero")
    with monkeypatch.context() as patch, force_gpu_interpret_mode(zeros):
        for name, stand_in in {"numbers": numbers_of, "column": column, "add_product": add_product}.items():
            patch.setattr(packed_product, name, stand_in)
        patch.setattr(experts, "store_transposed", store_transposed)
        patch.setattr(plgpu, "layout_cast", lambda x, _: x)
        yield


@pytest.mark.parametrize("name", packed_product.FORMATS)
def test_every_code_becomes_its_number(name):
    codes = np.arange(1 << 16, dtype=np.uint16).view(np.uint8)
    got = numbers_of_words(name).reshape(-1).astype(np.float32)
    halves = np.stack([codes & 15, codes >> 4], axis=-1).reshape(-1).astype(np.int32)
    expected = {
        "int8": lambda: codes.view(np.int8),
        "fp8": lambda: np.where(codes & 127 == 127, 0, codes).astype(np.uint8).view(jnp.float8_e4m3fn),
        "int4": lambda: halves - 8,
        "uint4": lambda: halves,
        "mxfp4": lambda: E2M1_VALUES[halves],
    }[name]().astype(np.float32)
    if name == "fp8":
        got = np.where(np.abs(got) == 480, 0, got)  # NaN, which no weight is
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("name", ["int8", "fp8 in groups", "int4", "int4 in groups of 32", "uint4", "mxfp4"])
def test_p(name, monkeypatch):
    form = FORMATS[name]
    w = a_weight(form, 128, 320 if name == "mxfp4" else 384)
    x = jnp.asarray(np.random.default_rng(1).normal(size=(3, w.shape[1])), jnp.bfloat16)
    with interpreted(monkeypatch):
        got = packed_weights.packed_matmul(x, w)
    print(got)
    expected = np.asarray(x, np.float32) @ np.asarray(w.astype(jnp.float32).dense()).T
    np.testing.assert_allclose(np.asarray(got, np.float32), expected, atol=0.02)
