"""Products with packed weights on Hopper: codes as numbers, the kernel interpreted and lowered, where it is chosen.

Some functions of the kernel have no interpreter: unpacking in registers, loads of a column, and products whose operands
are in registers. `interpreted` replaces them by the same formulas on arrays.
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
from dovetail.ops import dispatch_products, moe
from dovetail.ops.glu import Glu
from dovetail.ops.kernels.gpu import experts, packed_codes, packed_product, packed_weights
from dovetail.ops.quant.pack import pack
from dovetail.ops.quant.unpack import E2M1_VALUES
from dovetail.ops.quant.weight import Quantized

pytestmark = pytest.mark.slow

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
    return Quantized(
        jax.jit(pack, static_argnums=0)(form, jnp.asarray(values, jnp.float32)), form, jnp.dtype("bfloat16")
    )


@functools.cache
def numbers_of_words(name: str) -> np.ndarray:
    """Return the bf16 numbers [65536, planes] of every word; numpy's, as XLA's CPU takes subnormals for zeros."""

    def number(bits: np.ndarray) -> np.ndarray:
        return bits.astype(np.uint16).view(jnp.bfloat16)

    words = np.arange(1 << 16, dtype=np.uint32)
    return np.stack([packed_codes.decoded(words, plane, number) for plane in packed_codes.planes_of(name)], axis=-1)


def numbers_of(codes: jax.Array, name: str) -> jax.Array:
    """Return codes as `packed_codes.numbers` does."""

    table = numbers_of_words(name)  # not in a thread of XLA, where numpy too takes subnormals for zeros
    if name == "mxfp4":  # `interpreted` moves 2^126 from the scales to the numbers, which are subnormal without it
        table = (table.astype(np.float32) * 2.0**126).astype(table.dtype)

    def look_up(codes: jax.Array) -> np.ndarray:
        words = np.asarray(codes).view(np.uint16).reshape(len(codes), -1, packed_codes.WORDS)
        return table[words].swapaxes(-1, -2).reshape(len(codes), -1)

    size = codes.shape[1] * CODES[name][1]
    return jax.pure_callback(look_up, jax.ShapeDtypeStruct((len(codes), size), jnp.bfloat16), codes)


@contextlib.contextmanager
def interpreted(monkeypatch):
    """Interpret the kernel, with stand-ins for what has no interpreter."""

    def add_product(acc, weights, tokens):
        def run(left, right):
            left[...], right[...] = weights, tokens[...].T.astype(weights.dtype)
            plgpu.wgmma(acc, left, right)

        pl.run_scoped(run, plgpu.REGS(weights.shape, weights.dtype), plgpu.REGS(tokens.shape[::-1], weights.dtype))

    def column(rows, at, size, _dtype):
        matrix = rows[...].reshape(-1)[: packed_codes.ROWS * size].reshape(packed_codes.ROWS, size)
        return jax.lax.dynamic_index_in_dim(matrix, at, axis=1, keepdims=False)

    def store_transposed(ref, x):
        ref[...] = x.T

    def tiles_of(x, form, of=packed_weights.tiles_of):
        tiles = of(x, form)  # the interpreter drops copies that end after the last row
        return tiles._replace(R=-(-tiles.R // experts.CHUNK) * experts.CHUNK)

    zeros = InterpretGPUParams(out_of_bounds_reads="uninitialized", uninitialized_memory="zero")
    with monkeypatch.context() as patch, force_gpu_interpret_mode(zeros):
        for stand_in in (add_product, column):
            patch.setattr(packed_product, stand_in.__name__, stand_in)
        patch.setattr(packed_product, "numbers", numbers_of)
        patch.setattr(packed_product, "scale_bits", lambda code: packed_codes.scale_bits(code - 126))
        patch.setattr(experts, "store_transposed", store_transposed)
        patch.setattr(packed_weights, "tiles_of", tiles_of)
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
    if name == "mxfp4":
        got = got * 2.0**126
    if name == "fp8":
        got = np.where(np.abs(got) == 480, 0, got)  # NaN, which no weight is
    np.testing.assert_array_equal(got, expected)


def untraced(function):
    """Return what `jax.jit` was given: its traces do not depend on the stand-ins."""
    return function.__wrapped__


def test_scales_of_mxfp4_and_the_factor_of_sums_are_exact():
    codes = np.arange(27, 162)
    bits = packed_codes.scale_bits(codes).astype(np.uint16)
    scales = bits.view(jnp.bfloat16).astype(np.float64) * 2.0**-126 * packed_codes.SUMS
    assert codes[-1] == packed_codes.GREATEST_SCALE and np.isinf(scales[-1])
    np.testing.assert_array_equal(scales[:-1], 2.0 ** (codes[:-1] - 127.0))


def place(layout, row: int, column: int) -> tuple[tuple, tuple, int]:
    """Return the thread, the register and the place in it of an element."""
    layout = layout.to_mgpu()
    index = list(layout.tiling.tile_indices((row, column)))
    at = [*layout.warp_dims, *layout.lane_dims, layout.vector_dim]
    *thread, part = (index[dim] for dim in at)
    for dim in at:
        index[dim] = 0
    return tuple(thread), tuple(index), part


@pytest.mark.parametrize("name", ["int8", "mxfp4"])
def test_no_value_moves_between_threads(name):
    planes = len(packed_codes.planes_of(name))
    order = np.asarray(packed_codes.in_order(jnp.arange(64 * CODES[name][1])[None], name))[0]
    for row in (0, 9, 63):
        for byte in range(64):
            thread, (tile, column, *rest), part = place(packed_codes.REGISTER, row, byte)
            for at in range(planes):
                value = byte // 2 * planes + at  # the code `at` of the byte's word
                target = int(np.flatnonzero(order == value)[0])
                register = (tile, column * planes + at, *rest)
                assert place(packed_codes.PRODUCT, row, target) == (thread, register, part // 2)


CASES = {
    "int8": (9, 64, 256), "fp8": (16, 64, 128), "fp8 in groups": (12, 64, 384), "int4": (9, 128, 384),
    "int4 in groups of 32": (20, 64, 256), "uint4": (9, 64, 320), "mxfp4": (70, 64, 320),
}  # fmt: skip


@pytest.mark.parametrize("name", [n if n == "uint4" else pytest.param(n, marks=pytest.mark.slow) for n in CASES])
@pytest.mark.parametrize("parts", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_products_equal_those_of_the_unpacked_matrix(monkeypatch, name, parts):
    T, out, size = CASES[name]
    form, rng = FORMATS[name], np.random.default_rng(T)
    x, w = jnp.asarray(rng.normal(size=(T, size)), jnp.bfloat16), a_weight(form, out, size)
    monkeypatch.setattr(packed_product, "LEAST_STEPS", 1)
    monkeypatch.setattr(packed_product, "PROGRAMS", parts * -(-T // 16))
    with interpreted(monkeypatch):
        got = untraced(packed_weights.packed_matmul)(x, w, jnp.float32 if parts == 2 else None)
    assert got.dtype == (jnp.float32 if parts == 2 else jnp.bfloat16)
    expected = np.asarray(x, np.float32) @ np.asarray(w.astype(jnp.float32).dense()).T
    np.testing.assert_allclose(np.asarray(got, np.float32), expected, atol=1e-5 if parts == 2 else 0.02)


def some_experts(T: int, form: Format, E: int = 3, D: int = 64, F: int = 64):
    shapes = {"gate": (E, F, D), "up": (E, F, D), "down": (E, D, F)}
    params: dict = {name: a_weight(form, *shape, seed=at) for at, (name, shape) in enumerate(shapes.items())}
    rng = np.random.default_rng(T)
    params |= {f"{name}_bias": jnp.asarray(rng.normal(size=shape[:2]), jnp.bfloat16) for name, shape in shapes.items()}
    chosen = jnp.asarray(rng.random((T, E)).argsort(axis=1)[:, :2], jnp.int32)
    return (
        jnp.asarray(rng.normal(size=(T, D)), jnp.bfloat16),
        jnp.asarray(rng.random((T, 2)), jnp.float32),
        chosen,
        params,
    )


@pytest.mark.thorough
def test_experts_equal_the_reference(monkeypatch):
    x, weights, chosen, params = some_experts(12, Format("int4", 32, "float16"))
    glu = Glu(limit=7.0)
    with interpreted(monkeypatch):
        got = untraced(packed_weights.few_token_packed_experts)(x, weights, chosen, params, glu)
    whole = {n: w.dense() if isinstance(w, Quantized) else w for n, w in params.items()}
    exact = jax.tree.map(lambda a: a.astype(jnp.float32), (x, whole))
    expected = jax.jit(moe.experts_reference, static_argnums=4)(exact[0], weights, chosen, exact[1], glu)
    np.testing.assert_allclose(got.astype(jnp.float32), expected, atol=0.05)


@pytest.mark.parametrize(
    ("name", "T", "size"),
    [
        pytest.param("int8", 9, 1024, marks=pytest.mark.thorough),
        pytest.param("fp8 in groups", 64, 1024, marks=pytest.mark.thorough),
        pytest.param("int4", 100, 1024, marks=pytest.mark.slow),
        ("uint4", 12, 1024),
        pytest.param("mxfp4", 24, 2880, marks=pytest.mark.slow),
    ],
)
def test_the_kernel_lowers_for_a_gpu(name, T, size):
    form, x = FORMATS[name], jax.ShapeDtypeStruct((T, size), jnp.bfloat16)
    shapes = {kind: jax.ShapeDtypeStruct((128, n), dtype) for kind, (n, dtype) in form.lengths(size).items()}
    w = Quantized(shapes, form, jnp.dtype(jnp.bfloat16))  # pyright: ignore[reportArgumentType]
    lowered = packed_weights.packed_matmul.trace(x, w).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()


def test_packed_experts_lower_for_a_gpu():
    run = jax.jit(lambda *args: packed_weights.few_token_packed_experts(*args, Glu(limit=7.0)))
    lowered = run.trace(*some_experts(24, FORMATS["mxfp4"])).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()


# --- where it is chosen -----------------------------------------------------------------------------------------------


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(dispatch_products, "is_one_gpu", lambda *_: True)
    monkeypatch.setattr(dispatch_products, "is_hopper", lambda: True)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({}, None),
        (dict(x=(257, 256)), "tokens"),
        (dict(x=(1, 8, 256)), "matrix"),
        (dict(dtype=jnp.float32), "bf16"),
        (dict(out=100), "whole"),
        (dict(x=(1, 96)), "whole"),
        (dict(x=(8, 192)), "whole"),  # half a group of scales at the end
        (dict(form=Format("nf4", 64)), "nf4"),
        (dict(form=Format("int4", 16, "float16")), "groups of 16"),
        (dict(form=Format("mxfp4", 32, "uint8"), x=(1, 1 << 16)), "scales"),
    ],
)
def test_the_kernel_is_chosen_where_it_runs(hopper, monkeypatch, change, why):
    form, x = change.get("form", FORMATS["int4"]), jax.ShapeDtypeStruct(change.get("x", (8, 256)), jnp.bfloat16)
    x, out = x.update(dtype=change.get("dtype", x.dtype)), change.get("out", 128)
    reason = dispatch_products.why_not_packed_gpu(form, x, "cuda", None, out)
    assert (reason is None) == (why is None) and (why or "") in (reason or "")
    kernel = dispatch_products.quantized_kernel(form, x, "cuda", None, out)
    assert kernel is (None if why else packed_weights.packed_matmul)
    monkeypatch.setattr(dispatch_products, "is_hopper", lambda: False)
    assert dispatch_products.quantized_kernel(form, x, "cuda", None, out) is None


def test_packed_experts_are_chosen_where_they_run(hopper, monkeypatch):
    x, _, _, params = some_experts(8, FORMATS["mxfp4"])
    choose = lambda p, glu=Glu(): dispatch_products.experts_kernel(x, p, glu, "cuda", None)  # noqa: E731
    assert choose(params) is packed_weights.few_token_packed_experts
    for other, glu in [
        (params | {"down": params["down"].dense()}, Glu()),
        (params | {"gate_bias": params["gate_bias"].astype(jnp.float32)}, Glu()),
        (params, Glu("gelu")),
    ]:
        assert choose(other, glu) is None
    monkeypatch.setattr(dispatch_products, "is_hopper", lambda: False)
    assert choose(params) is None
