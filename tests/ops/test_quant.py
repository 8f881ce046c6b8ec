"""Test quantised weights: each format's numbers against its definition, and products against those of the array."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType, dequantize

from dovetail.core.formats import BLOCKS, ROUNDED, Format, fitted
from dovetail.core.mesh import SERVE, Placement, make_mesh
from dovetail.core.spec import ParamSpec, Stored
from dovetail.ops import dispatch_products, moe
from dovetail.ops.glu import Glu
from dovetail.ops.linear import grouped, lookup, matmul, matmul_transposed, per_head
from dovetail.ops.loss import cross_entropy
from dovetail.ops.quant import weight
from dovetail.ops.quant.rounded import fp8_matmul
from dovetail.ops.quant.unpack import E2M1_VALUES, NF4_VALUES
from dovetail.ops.quant.weight import Quantized, rounded

pytestmark = pytest.mark.slow

BY_HAND = [name for name in ROUNDED if name not in ("w8a8", "fp8_block")]


def random(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(sum(shape)).normal(size=shape), jnp.float32)


dense = jax.jit(Quantized.dense)


def declared(shape: tuple[int, ...], form: Format | None, stored: tuple[int, ...] = ()) -> ParamSpec:
    return ParamSpec(shape, (None,) * len(shape), Stored(("x",), stored or shape), format=form)


def packed(scheme: str, w: jax.Array, stored: tuple[int, ...] = ()) -> Quantized:
    size = (stored or w.shape)[-1]
    return rounded(declared(w.shape, fitted(scheme, size), stored), w)


def blocks(name: str, *out: int, size: int = 512) -> Quantized:
    """Random bytes, with finite scales: a f16 below 1 has 0 as its highest exponent bit."""
    values, nbytes = BLOCKS[name]
    raw = np.random.default_rng(len(name)).integers(0, 256, (*out, size // values, nbytes), np.uint8)
    for at in {"q6_k": (209,)}.get(name, (1, 3) if name[-1] in "1k" else (1,)):
        raw[..., at] &= 0b10111011
    return Quantized({"blocks": jnp.asarray(raw.reshape(*out, -1))}, Format(name), jnp.dtype(jnp.float32))


# --- numbers ----------------------------------------------------------------------------------------------------------


def group_by_hand(scheme: str, part: np.ndarray) -> np.ndarray:
    """Round the values of one group, in plain NumPy."""
    greatest, f32 = np.abs(part).max(), np.float32
    if scheme == "int8":
        scale = greatest / f32(127)
        return np.round(part / scale).astype(np.int8).astype(f32) * scale
    if scheme == "fp8":
        scale = greatest / f32(448)
        return (part / scale).astype(ml_dtypes.float8_e4m3fn).astype(f32) * scale
    if scheme == "int4":
        scale = np.float16(greatest / f32(7.5)).astype(f32)
        return np.clip(np.round(part / scale), -8, 7) * scale
    if scheme == "int4_asym":
        scale = np.float16((max(part.max(), 0) - min(part.min(), 0)) / f32(15)).astype(f32)
        zero = np.clip(np.round(-min(part.min(), 0) / scale), 0, 15)
        return (np.clip(np.round(part / scale) + zero, 0, 15) - zero) * scale
    values, scale = (
        (NF4_VALUES, greatest) if scheme == "nf4" else (E2M1_VALUES, 2.0 ** (np.floor(np.log2(greatest)) - 2))
    )
    return values[np.abs(part[:, None] / scale - values).argmin(axis=1)] * f32(scale)


@pytest.mark.parametrize("scheme", BY_HAND)
def test_rounded_weights_equal_numpy(scheme):
    w = np.array(random(6, 192))
    w[3] = 0
    form = fitted(scheme, 192)
    assert form is not None
    group = form.group or 192
    by_hand = np.zeros_like(w)
    for i, at in ((i, at) for i in range(6) if i != 3 for at in range(0, 192, group)):
        by_hand[i, at : at + group] = group_by_hand(scheme, w[i, at : at + group])
    np.testing.assert_array_equal(dense(packed(scheme, jnp.asarray(w))), by_hand)


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_equal_the_gguf_package(name):
    ours = blocks(name, 3)
    theirs = dequantize(np.asarray(ours.arrays["blocks"]), GGMLQuantizationType[name.upper()])
    np.testing.assert_allclose(dense(ours), theirs, rtol=1e-6, atol=0)


def test_mxfp4_equals_transformers():
    import torch
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    rng = np.random.default_rng(0)
    codes = rng.integers(0, 256, (2, 6, 3, 16), np.uint8)  # experts, rows, groups, bytes
    scale = rng.integers(110, 140, (2, 6, 3), np.uint8)
    theirs = convert_moe_packed_tensors(torch.tensor(codes), torch.tensor(scale), dtype=torch.float32)
    arrays = {"codes": jnp.asarray(codes.reshape(2, 6, 48)), "scale": jnp.asarray(scale)}
    ours = dense(Quantized(arrays, Format("mxfp4", 32, "uint8"), jnp.dtype(jnp.float32)))
    np.testing.assert_array_equal(ours, theirs.numpy().swapaxes(1, 2))


def test_fp8_blocks_equal_transformers():
    """Each scale of 128 x 128 values is repeated for its rows."""
    import torch
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    rng = np.random.default_rng(0)
    codes = (rng.normal(size=(256, 384)) * 50).astype(ml_dtypes.float8_e4m3fn)
    scale = rng.random((2, 3)).astype(np.float32)
    numbers = torch.tensor(codes.view(np.uint8)).view(torch.float8_e4m3fn)
    theirs = Fp8Dequantize(None)._dequantize_one(numbers, torch.tensor(scale), torch.float32)
    arrays = {"codes": jnp.asarray(codes), "scale": jnp.asarray(np.repeat(scale, 128, axis=0))}
    ours = dense(Quantized(arrays, Format("fp8", 128), jnp.dtype(jnp.float32)))
    np.testing.assert_array_equal(ours, theirs.numpy())


def test_nvfp4():
    """Two codes per byte, the first in the lower half; scales in e4m3 of 16 values each, and one of the row."""
    codes = jnp.asarray([[0x21, *[0] * 7, 0xF7, *[0] * 7]], jnp.uint8)
    arrays = {"codes": codes, "scale": jnp.asarray([[0.5, 2]], jnp.float8_e4m3fn), "global": jnp.asarray([[0.25]])}
    values = np.asarray(dense(Quantized(arrays, Format("nvfp4", 16, "float8_e4m3fn"), jnp.dtype(jnp.float32))))[0]
    assert [values[i] for i in (0, 1, 16, 17)] == [0.0625, 0.125, 3, -3] and values.shape == (32,)


def test_bytes():
    sizes = {name: packed(name, random(8, 256)).nbytes / 8 for name in ROUNDED}
    assert sizes == {
        "int8": 260, "w8a8": 260, "fp8": 260, "fp8_block": 264, "int4": 132, "int4_asym": 134, "nf4": 144, "mxfp4": 136,
    }  # fmt: skip
    forms = {name: sum(math.prod(s) * k.itemsize for s, k in declared((8, 256), form).arrays("float32").values())
             for name, form in ROUNDED.items()}  # fmt: skip
    assert forms == {name: 8 * size for name, size in sizes.items()}


@pytest.mark.parametrize(("scheme", "size", "group"), [("int4", 80, 16), ("int4", 24, None), ("mxfp4", 48, None)])
def test_rows_that_the_group_does_not_divide(scheme, size, group):
    assert (form := fitted(scheme, size)) is None or form.group == group
    assert (form is None) == (group is None)


# --- products ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["fp8_block", "int4_asym", "mxfp4", pytest.param("nf4", marks=pytest.mark.thorough)])
def test_products_equal_those_of_the_array(scheme, monkeypatch):
    w, x = packed(scheme, random(6, 4, 96)), random(5, 96)
    whole = dense(w)
    assert w.shape == whole.shape == (6, 4, 96)
    got, want = (products(x, random(5, 6, 96), random(5, 6, 4), each) for each in (w, whole))
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)
    monkeypatch.setattr(weight, "PART", 96 * 5)  # rows are unpacked four at a time
    np.testing.assert_allclose(jax.jit(matmul)(x, w), want[0], atol=1e-4)


@jax.jit
def products(x, heads, back, w) -> tuple[jax.Array, ...]:
    sizes = jnp.asarray([2, 0, 1, 0, 2, 0])
    gradient = jax.grad(lambda x: jnp.sum(jnp.sin(matmul(x, w))))(x)
    return matmul(x, w), per_head(heads, w), per_head(back, w, transposed=True), grouped(x, w, sizes), gradient


@pytest.mark.parametrize("scheme", ["nf4"])
def test_two_input_dims_are_one_row(scheme):
    w, x = packed(scheme, random(8, 4, 24), stored=(8, 96)), random(5, 4, 24)
    assert w.shape == (8, 4, 24) and w.arrays["codes"].ndim == 2
    np.testing.assert_allclose(matmul(x, w, dims=2), matmul(x, w.dense(), dims=2), atol=1e-4)


def test_results_of_large_matrices_are_not_kept_from_layer_to_layer(monkeypatch):
    monkeypatch.setattr(weight, "PART", 1 << 16)
    form, T, wide, narrow = Format("int4", 128, "float16"), 4096, 1024, 256

    def abstract(out, size):
        arrays = {name: jax.ShapeDtypeStruct((out, n), dtype) for name, (n, dtype) in form.lengths(size).items()}
        return Quantized(arrays, form, jnp.dtype(jnp.float32))  # pyright: ignore[reportArgumentType]

    def temporary(layers):
        def run(x, weights):
            for up, down in weights:
                x = down.unpacked_matmul(jax.nn.relu(up.unpacked_matmul(x, None)), None)
            return x

        weights = [(abstract(wide, narrow), abstract(narrow, wide))] * layers
        compiled = jax.jit(run).lower(jax.ShapeDtypeStruct((T, narrow), jnp.float32), weights).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    result = T * wide * 4
    assert temporary(3) - temporary(1) < result  # 20 MiB a layer with lax.map, which is more than a result


def test_tables():
    table, index = blocks("q4_1", 7), jnp.asarray([[1, 0], [6, 6]])
    whole = dense(table)
    np.testing.assert_array_equal(lookup(table, index), whole[index])
    np.testing.assert_allclose(matmul_transposed(random(2, 7), table), random(2, 7) @ whole, rtol=1e-5, atol=1e-5)


def test_a_quantised_head_has_the_loss_of_the_array():
    head, hidden = packed("int8", random(40, 32)), random(2, 6, 32)
    targets, mask = jnp.arange(12).reshape(2, 6), jnp.ones((2, 6))
    of = jax.jit(jax.value_and_grad(lambda h, head: cross_entropy(h, head, targets, mask, chunk=4)[0]))
    for ours, theirs in zip(of(hidden, head), of(hidden, dense(head)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_dynamic_activations():
    """Rounded to int8, each row by its greatest value; the error stays below half a step of either factor."""
    w, x = packed("w8a8", random(6, 96)), random(5, 96).at[2].set(0)
    whole = np.asarray(dense(w))
    got, exact = np.asarray(jax.jit(matmul)(x, w)), np.asarray(x) @ whole.T
    steps = np.abs(x).max(axis=1) / 127
    rounded_x = np.round(x / np.where(steps == 0, 1, steps)[:, None]) * steps[:, None]
    np.testing.assert_allclose(got, rounded_x @ whole.T, rtol=1e-4, atol=1e-4)
    assert 0 < np.abs(got - exact).max() < 0.1


def test_fp8_activations():
    """Rounded to e4m3, each row by its greatest value; a gradient is that of the product with the array."""
    w, x = packed("fp8", random(6, 96)), random(5, 96).at[2].set(0)
    whole = np.asarray(dense(w))
    got = np.asarray(jax.jit(lambda x, w: fp8_matmul(x, w, None))(x, w))
    steps = np.abs(x).max(axis=1, keepdims=True) / 448
    steps = np.where(steps == 0, 1, steps)
    rounded_x = np.asarray(jnp.asarray(x / steps, jnp.float8_e4m3fn).astype(jnp.float32)) * steps
    np.testing.assert_allclose(got, rounded_x @ whole.T, rtol=1e-4, atol=1e-4)
    assert 0 < np.abs(got - np.asarray(x) @ whole.T).max() < 1.5

    ours = jax.jit(jax.grad(lambda x: (fp8_matmul(x, w, None) ** 2).sum()))(x)
    theirs = jax.grad(lambda x: ((x @ whole.T) ** 2).sum())(x)
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


CARDS = [("cuda", True, fp8_matmul), ("cuda", False, None), ("cpu", True, None)]


@pytest.mark.parametrize("platform, capability, kernel", CARDS)
def test_fp8_products_need_a_card_that_has_them(monkeypatch, platform, capability, kernel):
    monkeypatch.setattr(dispatch_products, "has_fp8", lambda: capability)
    x = jax.ShapeDtypeStruct((1, 128), jnp.float32)
    assert dispatch_products.quantized_kernel(ROUNDED["fp8"], x, platform, None) is kernel
    assert dispatch_products.quantized_kernel(ROUNDED["fp8_block"], x, platform, None) is None


@pytest.mark.parametrize("width", [64, pytest.param(96, marks=pytest.mark.thorough)])
def test_experts_on_a_mesh(width):
    """A width of 64 is two groups of mxfp4, one per device; the three of 96 are whole on both."""
    place = Placement(make_mesh({"expert": 2, "tensor": 2}, jax.devices()[:4]), SERVE)
    shapes = {"gate": (4, width, 32), "up": (4, width, 32), "down": (4, 32, width)}
    made = {name: random(*shape) for name, shape in shapes.items()}
    ours = {name: packed("mxfp4", w) for name, w in made.items()}
    whole = {name: dense(w) for name, w in ours.items()}
    chosen, share = jnp.asarray([[0, 3], [1, 2], [3, 1], [2, 0]]), random(4, 2)
    args = random(4, 32), share, chosen
    got = jax.jit(lambda p: moe.experts(*args, p, Glu("silu"), place))(ours)
    for each in (whole, ours):
        want = jax.jit(lambda p: moe.experts_reference(*args, p, Glu("silu")))(each)
        np.testing.assert_allclose(got, want, atol=2e-3, rtol=1e-4)
