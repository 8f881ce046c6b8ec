"""Products of packed weights with up to 8 tokens on Hopper: the warps on numpy, beside the unpacked weights."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from warps import sums

from dovetail.core.formats import Format
from dovetail.ops.glu import Glu
from dovetail.ops.kernels.gpu import packed_few, packed_integer, packed_weights
from dovetail.ops.kernels.gpu.packed_warp import QUAD, FewPlan
from dovetail.ops.quant.pack import pack
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
# (values of a row, changes of the plan): rows that end in the midst of a step, a loop, two warpgroups, two blocks
CASES = {
    "int8": (2880, dict(groups=2, ahead=2)),
    "fp8": (3072, dict(ahead=2)),
    "fp8 in groups": (1024, dict(blocks=2, ahead=1, ahead_x=1)),
    "int4": (8192, dict(ahead=2)),
    "int4 in groups of 32": (320, dict()),
    "uint4": (640, dict(blocks=2)),
    "mxfp4": (2880, dict(groups=2)),
}


def weight(form: Format, *shape: int, seed: int = 0) -> Quantized:
    values = np.random.default_rng(seed).normal(size=shape) * 0.1
    packed = jax.jit(pack, static_argnums=0)(form, jnp.asarray(values, jnp.float32))
    return Quantized(packed, form, jnp.dtype("bfloat16"))


def arrays_of(weights: list[Quantized]) -> dict[str, list]:
    return {kind: [np.asarray(w.arrays[kind]) for w in weights] for kind in weights[0].arrays}


def product(w: Quantized, expert: int, x: jax.Array) -> np.ndarray:
    """Return the products [tokens, out] in f32."""
    whole = np.asarray(w.astype(jnp.float32).dense())[expert]
    return np.asarray(x, np.float32) @ whole.T


@pytest.mark.parametrize("name", CASES)
def test_warps_multiply_as_the_unpacked_experts(monkeypatch, name):
    size, changes = CASES[name]
    form, rng = FORMATS[name], np.random.default_rng(1)
    gate, up = (weight(form, 3, 64, size, seed=at) for at in range(2))
    x = jnp.asarray(rng.normal(size=(9, size)), jnp.bfloat16)
    biases = [jnp.asarray(rng.normal(size=(3, 64)), jnp.bfloat16) for _ in range(2)]
    p = FewPlan(form, size, 64, 2, 1, 4)._replace(**changes)
    got = sums(monkeypatch, p, x, arrays_of([gate, up]) | {"bias": list(map(np.asarray, biases))}, 2, p.rows, 3, 5)
    for i, w in enumerate((gate, up)):
        expected = product(w, 2, x[3:8]) + np.asarray(biases[i][2], np.float32)
        np.testing.assert_allclose(got[i, :5], expected[:, p.rows : 2 * p.rows], atol=1e-4)


# (format, values of a row, changes of the plan)
IN_INTEGERS = {
    "int4": ("int4", 4096, dict(groups=2)),
    "int4, a loop": ("int4", 8192, dict(ahead=2)),
    "int4 in groups of 64": ("int4 in groups of 64", 640, dict()),
    "mxfp4": ("mxfp4", 2880, dict()),
    "mxfp4, a loop": ("mxfp4", 8192, dict(groups=2, ahead=2)),
}


@pytest.mark.parametrize("case", IN_INTEGERS)
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_warps_multiply_in_integers(monkeypatch, case, scale):
    name, size, changes = IN_INTEGERS[case]
    form, rng = (FORMATS | {"int4 in groups of 64": Format("int4", 64, "float16")})[name], np.random.default_rng(1)
    gate, up = (weight(form, 3, 64, size, seed=at) for at in range(2))
    x = jnp.asarray(scale * rng.normal(size=(9, size)) * 2.0 ** rng.integers(-3, 3, size), jnp.bfloat16)
    biases = [jnp.asarray(scale * rng.normal(size=(3, 64)), jnp.bfloat16) for _ in range(2)]
    p = FewPlan(form, size, 64, 2, 1, 4, ahead_x=1, in_integers=True)._replace(**changes)
    assert packed_integer.suits(p)
    got = sums(monkeypatch, p, x, arrays_of([gate, up]) | {"bias": list(map(np.asarray, biases))}, 2, p.rows, 3, 1)
    for i, w in enumerate((gate, up)):
        expected = product(w, 2, x[3:4]) + np.asarray(biases[i][2], np.float32)
        expected = expected[:, p.rows : 2 * p.rows]
        np.testing.assert_allclose(got[i, :1], expected, atol=3e-4 * np.abs(expected).max())


@pytest.mark.parametrize("name", ["int4", "mxfp4"])
def test_tokens_that_are_not_finite_give_nan_in_integers(monkeypatch, name):
    w, x = weight(FORMATS[name], 1, 16, 256), np.zeros((1, 256), np.float32)
    x[0, 100] = np.inf
    p = FewPlan(w.format, 256, 16, 1, 1, 4, ahead_x=1, in_integers=True)
    got = sums(monkeypatch, p, jnp.asarray(x, jnp.bfloat16), arrays_of([w]), 0, 0, 0, 1)
    assert np.isnan(got[0, 0]).all()


def test_gate_and_up_are_halves_of_a_matrix(monkeypatch):
    w = weight(FORMATS["int4"], 1, 128, 256)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 256)), jnp.bfloat16)
    tiles = packed_weights.tiles_of(x, w.format)
    p = packed_few.plan(w.format, tiles, w.shape, 2, is_joined=True)
    assert (p.out, p.names) == (64, 2)
    got = sums(monkeypatch, p, x, arrays_of([w]), 0, 16, 0, 8)
    gate, up = np.split(product(w, 0, x), 2, axis=1)
    np.testing.assert_allclose(got, [gate[:, 16:32], up[:, 16:32]], atol=1e-4)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("size", [256, 2944, 4096])
def test_every_byte_of_a_row_is_multiplied(name, size):
    form = FORMATS[name]
    p = FewPlan(form, size, 64, 1, 1, 4)
    step = p.warps * QUAD * p.loaded
    assert (p.steps - 1) * step < p.width <= p.steps * step
    if p.scales_sums:  # threads of a row share a group
        assert form.group // p.per_byte % (QUAD * p.loaded) == 0


@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize("name", FORMATS)
def test_one_token_of_4_bits_is_multiplied_in_integers(name, tokens):
    form, x = FORMATS[name], jnp.zeros((tokens, 1280), jnp.bfloat16)
    p = packed_few.plan(form, packed_weights.tiles_of(x, form), (64, x.shape[1]))
    assert p.in_integers == (tokens == 1 and name in ("int4", "mxfp4"))


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.thorough) if n != "int4" else n for n in CASES])
@pytest.mark.parametrize("tokens", [1, 3])
def test_the_kernel_lowers_for_a_gpu(name, tokens):
    form, size = FORMATS[name], CASES[name][0]
    w, x = abstract(form, 128, size), jax.ShapeDtypeStruct((tokens, size), jnp.bfloat16)
    for traced in (packed_weights.packed_matmul.trace(x, w), packed_weights.packed_gated.trace(x, w, Glu())):
        assert "packed_few" in traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("T", [1, 3])
def test_experts_lower_for_a_gpu(T):
    form, (D, F, E, k) = FORMATS["mxfp4"], (2880, 1024, 8, 2)
    shapes = {"gate": (E, F, D), "up": (E, F, D), "down": (E, D, F)}
    params: dict = {name: abstract(form, *shape) for name, shape in shapes.items()}
    params |= {f"{n}_bias": jax.ShapeDtypeStruct(shape[:2], jnp.bfloat16) for n, shape in shapes.items()}
    x, weights = jax.ShapeDtypeStruct((T, D), jnp.bfloat16), jax.ShapeDtypeStruct((T, k), jnp.float32)
    chosen = jax.ShapeDtypeStruct((T, k), jnp.int32)
    traced = packed_weights.few_token_packed_experts.trace(x, weights, chosen, params, Glu(limit=7.0))
    assert "packed_few" in traced.lower(lowering_platforms=("cuda",)).as_text()


def abstract(form: Format, *shape: int) -> Quantized:
    arrays = {k: jax.ShapeDtypeStruct((*shape[:-1], n), dtype) for k, (n, dtype) in form.lengths(shape[-1]).items()}
    return Quantized(arrays, form, jnp.dtype(jnp.bfloat16))  # pyright: ignore[reportArgumentType]
