"""The sampler's kernels for Hopper: interpreted on a CPU against the reference, and lowered for a GPU."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams
from jax.experimental.pallas import mosaic_gpu as plgpu
from ops.test_sample_kernel import KINDS, LISTED, batch, map_tree, reference

from dovetail.ops import sample as ops
from dovetail.ops.kernels.gpu.mosaic import adjust, blocks, draw, line, rows, truncate
from dovetail.ops.kernels.gpu.mosaic.sample import sample
from dovetail.ops.kernels.gpu.noise import Noise

pytestmark = pytest.mark.slow

# Greedy, a draw of everything, thresholds above and below the edge of the few blocks, and what changes logits
USUAL = (
    "greedy, one", "hot", "top 1000, flat", "nucleus, all equal", "min, flat", "all three, flat", "nothing left",
    "listed, ties", "everything",
)  # fmt: skip


@pytest.fixture
def interpreted(monkeypatch):
    """Interpret kernels without layouts, of which jax's interpreter knows nothing."""

    def load_as(ref, index, layout, optimized=True, dtype=jnp.float32):
        return ref[index].astype(dtype)

    def store_as(ref, index, x):
        ref[index] = x

    for module in (rows, adjust, blocks, line, truncate, draw):
        monkeypatch.setattr(module, "load_as", load_as, raising=False)
        monkeypatch.setattr(module, "store_as", store_as, raising=False)
    monkeypatch.setattr(plgpu, "layout_cast", lambda x, _: x)
    return jax.jit(functools.partial(sample, interpret=InterpretGPUParams()), static_argnames="top")


def compare(kernel, V: int, names) -> None:
    logits, inputs, history, rows = batch(V, names)
    tokens, (value, rank, top, ids) = map_tree(kernel(logits, inputs, history, LISTED))
    want_tokens, (want_value, want_rank, want_top, want_ids) = map_tree(reference(logits, inputs, history, LISTED))
    wrong = [name for name, a, b in zip(rows, tokens, want_tokens, strict=True) if a != b]
    assert not wrong, wrong
    assert (rank == want_rank).all() and (ids == want_ids).all()
    np.testing.assert_allclose(value, want_value, atol=1e-5)
    np.testing.assert_allclose(top, want_top, atol=1e-5)


def test_rows_of_several_kinds(interpreted, monkeypatch):
    monkeypatch.setattr(truncate, "FEW", 8)
    for kind in USUAL:
        monkeypatch.setitem(KINDS, kind, KINDS[kind] | dict(repeat=1))
    compare(interpreted, 1152, USUAL)  # 9 blocks: more than are looked at first


def test_a_row_of_nan_gives_a_token_of_the_vocabulary(interpreted, monkeypatch):
    """Check too that the rows beside it get the tokens they would get without it."""
    monkeypatch.setattr(truncate, "FEW", 8)
    V, names = 1152, ["greedy", "usual"]
    for kind in names:
        monkeypatch.setitem(KINDS, kind, KINDS[kind] | dict(repeat=2))
    logits, inputs, history, _ = batch(V, names)
    bad = np.arange(len(logits)) % 2 == 1
    tokens = np.asarray(interpreted(jnp.where(bad[:, None], jnp.nan, logits), inputs, history, LISTED)[0])
    want = np.asarray(reference(logits, inputs, history, LISTED)[0])
    assert (tokens[~bad] == want[~bad]).all()
    assert ((tokens >= 0) & (tokens < V)).all()


@pytest.mark.thorough
def test_rows_of_every_kind(interpreted):
    compare(interpreted, 12_032, KINDS)


def test_the_noise_equals_the_references_within_rounding():
    """Mosaic has no log1p; near 0, where the winners' uniform numbers are, it must be as precise."""
    hi, lo, position = (jnp.asarray(x, jnp.uint32) for x in (5, 2**32 - 7, 123))
    want = Noise(hi, lo, position).at(jnp.arange(4096))
    got = Noise(hi, lo, position, draw._log1p).at(jnp.arange(4096))
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)
    u = np.float32(2.0) ** -np.arange(1, 34, dtype=np.float32)
    np.testing.assert_allclose(draw._log1p(-u), np.log1p(-u.astype(np.float64)), rtol=3e-7)


def test_the_kernels_lower_for_a_gpu_without_a_deprecation():
    S, V = 4, 4224
    _, inputs, _, _ = batch(V, ["usual"])
    inputs = jax.tree.map(lambda x: jax.ShapeDtypeStruct((S, *x.shape[1:]), x.dtype), inputs)
    given = jax.ShapeDtypeStruct((S, V), jnp.float32), inputs, jax.ShapeDtypeStruct((2, V), jnp.int32)
    text = jax.jit(functools.partial(sample, top=20)).trace(*given).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu") >= 3
    assert "stablehlo.case" not in text and "stablehlo.sort" not in text, "a branch waits for the host"


def test_duplicated_constants_agree():
    assert (draw.BLOCK, draw.COLDEST) == (ops.BLOCK, ops.COLDEST)
