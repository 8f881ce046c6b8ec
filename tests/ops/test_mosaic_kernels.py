"""The small kernels for Hopper: interpreted on a CPU against the references, and lowered for a GPU."""

import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams
from jax.experimental.pallas import mosaic_gpu as plgpu

from dovetail.core.types import Paged
from dovetail.ops.kernels.gpu import ask_ptxas_once
from dovetail.ops.kernels.gpu import cross_entropy as triton_loss
from dovetail.ops.kernels.gpu.mosaic import cross_entropy, layer_norm, norm, rows, store
from dovetail.ops.norm import layer_norm as reference_layer_norm
from dovetail.ops.norm import rms_norm
from dovetail.ops.paged import write_heads
from dovetail.ops.rope import Rope, rotate

pytestmark = pytest.mark.slow

INTERPRET = InterpretGPUParams()


@pytest.fixture
def interpret(monkeypatch):
    """Interpret kernels without layouts, of which jax's interpreter knows nothing."""
    for module in (rows, store):
        monkeypatch.setattr(module, "load_as", lambda ref, index, *_, **__: ref[index].astype(jnp.float32))
    monkeypatch.setattr(plgpu, "layout_cast", lambda x, _: x)
    return INTERPRET


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


@pytest.mark.parametrize("added", [False, True])
def test_rms_norm(interpret, added):
    x, delta, weight = normal(0, 2, 256), normal(1, 2, 256), normal(2, 256)
    total, normed = norm.add_rms_norm(x, delta if added else None, weight, 1e-6, 1.0, interpret)
    want = x + delta if added else x
    np.testing.assert_allclose(total, want)
    np.testing.assert_allclose(normed, rms_norm(want, weight, 1e-6, 1.0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("softcap", [None, 20.0])
def test_cross_entropy(interpret, softcap):
    logits, targets, weight = 3 * normal(0, 2, 1408), jnp.array([1300, -1]), jnp.array([0.5, 2.0])
    options = dict(z=1e-3, softcap=softcap, dtype=jnp.float32)
    got = cross_entropy.cross_entropy_rows(logits, targets, weight, **options, width=256, loads=2, interpret=interpret)
    want = triton_loss.cross_entropy_rows(logits, targets, weight, **options, interpret=True)
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("added", [False, True])
def test_layer_norm_and_its_gradient(interpret, monkeypatch, added):
    monkeypatch.setattr(layer_norm, "PROGRAMS", 2)
    x, delta, weight, bias = normal(0, 3, 128), normal(1, 3, 128) if added else None, normal(2, 128), normal(3, 128)

    def loss(run, *given):
        total, normed = run(*given)
        return jnp.sum(jnp.sin(total)) + jnp.sum(jnp.cos(normed))

    def ours(*given):
        return layer_norm.add_layer_norm(*given, 1e-5, interpret)

    def theirs(x, delta, weight, bias):
        x = x if delta is None else x + delta
        return x, reference_layer_norm(x, weight, bias, 1e-5)

    numbers = (0, 1, 2, 3) if added else (0, 2, 3)
    got, want = (
        jax.value_and_grad(lambda *given, run=run: loss(run, *given), argnums=numbers)(x, delta, weight, bias)
        for run in (ours, theirs)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), got, want)


@pytest.mark.parametrize("normed", [True, False], ids=["normed", "plain"])
def test_rotate_store(interpret, normed):
    N, K, H, T = 8, 4, 64, 4
    ctx = Paged(*(jnp.asarray(x, jnp.int32) for x in ([[3, 1], [2, 4], [0, 0]], [20, 5, 0], [0, 2, 3, 3], [2])))
    rope, pages = Rope(1e4, H), normal(1, 5, 16, 2 * K, H)
    qkv, table = normal(0, T, N + 2 * K, H), rope.tables(jnp.arange(T) * 3)
    norms = (normal(2, H), normal(3, H)) if normed else None
    q, k, v = jnp.split(qkv, [N, N + K], axis=1)
    if norms:
        q, k = (rms_norm(x, weight, 1e-6, 1.0) for x, weight in zip((q, k), norms, strict=True))
    run = jax.jit(lambda pages, qkv: store.rotate_store(ctx, pages, qkv, table, norms, 1e-6, 1.0, interpret))
    got_q, got_pages = run(pages, qkv)
    np.testing.assert_allclose(got_q, rotate(q, rope, table), atol=1e-5)
    np.testing.assert_allclose(got_pages, write_heads(ctx, pages, rotate(k, rope, table), v), atol=1e-5)


def lowered(run, *given: tuple[tuple[int, ...], str]) -> str:
    shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in given]
    return jax.jit(run).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()


def test_the_kernels_lower_for_a_gpu_without_a_deprecation():
    row, vector = ((64, 1024), "bfloat16"), ((1024,), "bfloat16")
    runs = [
        (lambda *given: norm.add_rms_norm(*given, 1e-6, 0.0), row, row, vector),
        (jax.grad(lambda *given: layer_norm.add_layer_norm(*given, 1e-6)[1].sum()), row, row, vector, vector),
        (
            lambda *given: cross_entropy.cross_entropy_rows(*given, z=0.0, softcap=30.0, dtype=jnp.bfloat16),
            ((8, 128_256), "bfloat16"), ((8,), "int32"), ((8,), "float32"),
        ),
        (
            lambda pages, qkv, cos, *given: store.rotate_store(Paged(*given), pages, qkv, (cos, cos), None, 1e-6, 0.0),
            ((9, 16, 8, 128), "bfloat16"), ((64, 24, 128), "bfloat16"), ((64, 64), "float32"),
            ((2, 4), "int32"), ((2,), "int32"), ((3,), "int32"), ((1,), "int32"),
        ),
    ]  # fmt: skip
    texts = [lowered(*run) for run in runs]
    assert all("mosaic_gpu" in text for text in texts)
    assert "output_operand_alias" in texts[-1]  # pages are written in place


def test_ptxas_is_asked_for_its_version_once(monkeypatch):
    asked = []
    extension = SimpleNamespace(_get_ptxas_isa_version=lambda: asked.append(1) or 90)
    monkeypatch.setitem(sys.modules, "jax._src.lib.mosaic_gpu", SimpleNamespace(_mosaic_gpu_ext=extension))
    ask_ptxas_once()
    assert [extension._get_ptxas_isa_version() for _ in range(3)] == [90] * 3 and len(asked) == 1


@pytest.mark.parametrize("bindings", [None, SimpleNamespace()], ids=["absent", "another jax"])
def test_a_jax_that_does_not_ask_is_left_alone(bindings, monkeypatch):
    monkeypatch.setitem(sys.modules, "jax._src.lib.mosaic_gpu", bindings)
    ask_ptxas_once()  # raises nothing
    assert bindings is None or vars(bindings) == {}
