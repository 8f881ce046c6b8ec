"""The sampler's kernels for Hopper: interpreted on a CPU against the reference, and lowered for a GPU."""

from __future__ import annotations

import functools
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams
from jax.experimental.pallas import mosaic_gpu as plgpu
from ops.test_sample_kernel import KINDS, LISTED, batch, logits_of, map_tree, reference
from row_threads import simulate, simulated_adjust, simulated_launch

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

    for module in (rows, blocks, line, draw):
        monkeypatch.setattr(module, "load_as", load_as, raising=False)
        monkeypatch.setattr(module, "store_as", store_as, raising=False)
    monkeypatch.setattr(truncate, "launch", simulated_launch)
    monkeypatch.setattr(sys.modules[sample.__module__], "adjust", simulated_adjust)
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
    monkeypatch.setattr(truncate, "FEW", 16)
    monkeypatch.setattr(truncate, "ENOUGH", 12)
    for kind in USUAL:
        monkeypatch.setitem(KINDS, kind, KINDS[kind] | dict(repeat=1))
    compare(interpreted, 2304, USUAL)  # 18 blocks: more than are looked at first


def test_a_vocabulary_that_is_no_multiple_of_blocks(interpreted, monkeypatch):
    for kind in ("usual", "everything", "nothing left"):
        monkeypatch.setitem(KINDS, kind, KINDS[kind] | dict(repeat=1))
    compare(interpreted, 1003, ("greedy, one", "usual", "everything", "nothing left"))


def test_a_row_of_nan_gives_a_token_of_the_vocabulary(interpreted, monkeypatch):
    """Check too that the rows beside it get the tokens they would get without it."""
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


@pytest.mark.parametrize(("V", "programs"), [(1000, 660), (9000, 30)])
def test_adjusted_logits_are_the_references_within_rounding(V, programs, monkeypatch):
    monkeypatch.setattr(adjust, "PROGRAMS", programs)
    logits, inputs, history, _ = batch(V, KINDS)
    padded = jnp.pad(logits, ((0, 0), (0, 41)), constant_values=7.0)
    got = np.asarray(jax.jit(simulated_adjust)(padded, inputs, history))
    want = np.asarray(jax.jit(ops.adjust)(logits, inputs, history))
    np.testing.assert_allclose(got[:, :V], want, rtol=1e-6, atol=1e-6)
    assert (got[:, V:] == 7).all()


@pytest.mark.parametrize("change", [{}, dict(SLOTS=4, ROOM=1500, FEW=16, ENOUGH=12), dict(ROOM=10**6)])
def test_truncation_keeps_the_references_tokens(change, monkeypatch):
    """Compare the kept tokens and the weights of their blocks; where tokens do not fit, thresholds need all passes."""
    monkeypatch.setattr(truncate, "launch", simulate)
    for name, value in change.items():
        monkeypatch.setattr(truncate, name, value)
    V, rng = 9088, np.random.default_rng(3)
    kinds = ("flat", "tied", "equal", "", "masked", "far apart", "three left") * 5
    logits = np.stack([logits_of(kind, V, rng) for kind in kinds])
    k = rng.choice([0, 1, 20, 300, 5000, V], len(logits)).astype(np.int32)
    p = rng.choice([1.0, 0.1, 0.8, 0.999], len(logits)).astype(np.float32)
    min_p = rng.choice([0.0, 0.01, 0.3], len(logits)).astype(np.float32)
    heat = rng.choice([0.7, 1.0, 1.5], len(logits)).astype(np.float32)
    scaled = (logits - logits.max(1, keepdims=True)) / heat[:, None]
    # where a sum falls on p to within rounding, both answers are right
    want = [np.isfinite(jax.jit(ops.truncate)(scaled, k, p * q, min_p)) for q in np.float32([1, 1 - 2e-6, 1 + 2e-6])]
    kept = thresholds(logits, SimpleNamespace(temperature=heat, top_k=k, top_p=p, min_p=min_p))
    asks = ((k > 0) & (k < V)) | (p < 1) | (min_p > 0)
    floor, least = -kept.far / heat, np.exp(-kept.cut / heat)
    stays = np.isfinite(scaled) & (scaled >= floor[:, None]) & (np.exp(scaled) >= least[:, None])
    agrees = np.stack([(stays == each).all(axis=1) for each in want])[:, asks]
    assert agrees.any(axis=0).all() and agrees[0].mean() > 0.97
    masses = np.where(stays, np.exp(scaled), 0).reshape(len(logits), -1, ops.BLOCK).sum(axis=2)
    for row in np.flatnonzero(asks):
        count, got = kept.found[row], kept.masses[row]
        if count:
            got = np.zeros(masses.shape[1], np.float32)
            got[kept.blocks[row, :count]] = kept.masses[row, :count]
        np.testing.assert_allclose(got[: masses.shape[1]], masses[row], rtol=1e-4, atol=1e-6)


def thresholds(logits: np.ndarray, inputs) -> truncate.KeptTokens:
    """Truncate with what `block_sums` gives; behind the last block there is nothing."""
    held = logits.reshape(len(logits), -1, ops.BLOCK)
    maxima = held.max(axis=2)
    top = np.where(maxima > -np.inf, maxima, 0)
    masses = np.exp((held - top[..., None]) / inputs.temperature[:, None, None]).sum(axis=2)
    padded = [np.pad(x, ((0, 0), (0, -x.shape[1] % 128)), constant_values=np.nan) for x in (maxima, masses)]
    return truncate.keep(held, *padded, inputs)


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
    assert text.count("mosaic_gpu") >= 4
    assert "stablehlo.case" not in text and "stablehlo.sort" not in text, "a branch waits for the host"


def test_duplicated_constants_agree():
    assert (draw.BLOCK, draw.COLDEST) == (ops.BLOCK, ops.COLDEST)
