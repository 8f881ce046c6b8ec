"""The sampler's NVIDIA kernels, interpreted, against the reference: rows of every kind in one batch."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from described import a_device
from jax.experimental import pallas as pl

from dovetail.ops import sample as ops
from dovetail.ops.dispatch import sample_kernel
from dovetail.ops.kernels.gpu import sample as gpu
from dovetail.ops.kernels.gpu.keys import LOWEST, NONE, TOP, key_of
from dovetail.ops.kernels.gpu.noise import Noise

pytestmark = pytest.mark.slow

LISTED = 20
BIAS = 6

# What a row asks; "logits" says how its logits are made, "repeat" how many rows with seeds of their own.
KINDS = {
    "greedy": dict(temperature=0.0),
    "greedy, scored": dict(temperature=0.0, top_logprobs=0),
    "greedy, one": dict(temperature=0.0, top_logprobs=1),
    "greedy with what truncates": dict(temperature=0.0, top_k=3, top_p=0.1, min_p=0.5, top_logprobs=5),
    "temperature": dict(temperature=0.8, repeat=3),
    "hot": dict(temperature=2.0, top_logprobs=1, repeat=2),
    "coldest": dict(temperature=1e-30),
    "top 1": dict(top_k=1),
    "top 50": dict(top_k=50, repeat=3),
    "top 50, ties": dict(top_k=50, logits="tied", repeat=3),
    "top 1000": dict(top_k=1000, repeat=3),
    "top 1000, flat": dict(top_k=1000, logits="flat", temperature=1.5, repeat=3),
    "more than there are": dict(top_k=10**6),
    "nucleus of a few": dict(top_p=0.1, repeat=3),
    "nucleus": dict(top_p=0.95, logits="far apart", repeat=3),
    "nucleus, flat": dict(top_p=0.95, logits="flat", repeat=3),
    "nearly all, flat": dict(top_p=0.9999, logits="flat", repeat=3),
    "nucleus, all equal": dict(top_p=0.5, logits="equal", repeat=3),
    "nucleus, ties": dict(top_p=0.7, logits="tied", repeat=3),
    "min": dict(min_p=0.1, repeat=3),
    "min, flat": dict(min_p=0.001, logits="flat", repeat=3),
    "min of 1": dict(min_p=1.0, logits="tied", repeat=2),
    "usual": dict(temperature=0.8, top_k=50, top_p=0.95, repeat=4, top_logprobs=5),
    "all three, flat": dict(temperature=0.9, top_k=3000, top_p=0.8, min_p=0.002, logits="flat", repeat=3),
    "half masked": dict(logits="masked", top_k=40, top_logprobs=20, repeat=3),
    "three left": dict(logits="three left", top_k=40, top_p=0.9, top_logprobs=20, repeat=3),
    "nothing left": dict(logits="nothing left", top_k=40, top_p=0.9, min_p=0.1),
    "nothing left, greedy": dict(temperature=0.0, logits="nothing left"),
    "listed, ties": dict(temperature=0.0, logits="tied", top_logprobs=20),
    "listed, all equal": dict(temperature=0.0, logits="equal", top_logprobs=20),
    "penalties": dict(slot=0, presence=0.7, frequency=0.3, repetition=1.3, top_logprobs=5, repeat=2),
    "penalties that favour": dict(slot=1, presence=-0.7, frequency=-0.2, repetition=0.7, temperature=0.0),
    "bias": dict(bias=3, temperature=0.0, top_logprobs=3),
    "all of the bias": dict(bias=BIAS, top_k=5, repeat=2),
    "mask": dict(mask_until=ops.FOREVER, top_logprobs=20, temperature=0.0),
    "mask that has ended": dict(mask_until=5, position=5, temperature=0.0),
    "mask that has not": dict(mask_until=6, position=5, top_p=0.9),
    "everything": dict(
        temperature=0.9, top_k=50, top_p=0.92, min_p=0.01, presence=0.5, frequency=0.3, repetition=1.2, slot=1, bias=4,
        mask_until=ops.FOREVER, top_logprobs=20, repeat=4,
    ),
}  # fmt: skip


def logits_of(kind: str, V: int, rng: np.random.Generator) -> np.ndarray:
    x = rng.normal(size=V).astype(np.float32)
    if kind == "flat":
        return x * np.float32(0.3)
    if kind == "equal":
        return np.full(V, 1.5, np.float32)
    if kind == "tied":
        return np.round(x * 2)  # has -0.0 too
    if kind == "far apart":
        return x * 10
    if kind == "masked":
        x[rng.random(V) < 0.5] = -np.inf
    if kind == "three left":
        x[np.arange(V) % (V // 2 - 1) != 3] = -np.inf
    return x * 3 if kind != "nothing left" else np.full(V, -np.inf, np.float32)


def batch(V: int, names, seed: int = 0):
    """(logits [S, V], inputs, history [2, V], the name of each row)."""
    rng = np.random.default_rng(seed)
    rows = [(name, KINDS[name]) for name in names for _ in range(KINDS[name].get("repeat", 1))]
    S, W = len(rows), -(-V // 32)
    off = dict(temperature=1.0, top_p=1.0, min_p=0.0, presence=0.0, frequency=0.0, repetition=1.0, top_k=0, position=7)
    off |= dict(slot=2, mask_until=0, top_logprobs=-1, seed_hi=0, seed_lo=0)
    arrays = {
        name: np.array([row.get(name, value) for _, row in rows], np.float32 if isinstance(value, float) else np.int32)
        for name, value in off.items()
    }
    arrays |= {name: rng.integers(0, 2**32, S, dtype=np.uint32) for name in ("seed_hi", "seed_lo")}
    ids, values = np.full((S, BIAS), -1, np.int32), np.zeros((S, BIAS), np.float32)
    for row, (_, asks) in enumerate(rows):
        count = asks.get("bias", 0)
        ids[row, :count], values[row, :count] = rng.choice(V, count, replace=False), rng.normal(size=count) * 5
    mask = rng.integers(0, 2**32, (S, W), dtype=np.uint32)
    history = jnp.asarray(2 * rng.poisson(0.3, (2, V)) + rng.integers(0, 2, (2, V)), jnp.int32)
    logits = np.stack([logits_of(asks.get("logits", ""), V, rng) for _, asks in rows])
    inputs = ops.SampleInputs(**arrays, bias_ids=ids, bias=values, mask=mask)  # pyright: ignore
    return logits, inputs, history, [name for name, _ in rows]


reference = jax.jit(functools.partial(ops.sample, platform="cpu"), static_argnames="top")
kernel = jax.jit(functools.partial(gpu.sample, interpret=True), static_argnames="top")


def compare(V: int, names=KINDS, seed: int = 0) -> None:
    logits, inputs, history, rows = batch(V, names, seed)
    tokens, (value, rank, top, ids) = map_tree(kernel(logits, inputs, history, LISTED))
    want_tokens, (want_value, want_rank, want_top, want_ids) = map_tree(reference(logits, inputs, history, LISTED))
    wrong = [name for name, a, b in zip(rows, tokens, want_tokens, strict=True) if a != b]
    assert not wrong, wrong
    assert (rank == want_rank).all() and (ids == want_ids).all()
    np.testing.assert_allclose(value, want_value, atol=1e-5)
    np.testing.assert_allclose(top, want_top, atol=1e-5)


def map_tree(tree):
    return jax.tree.map(np.asarray, tree)


def test_rows_of_every_kind():
    compare(12_003)  # 94 blocks: more than are looked at first


@pytest.mark.thorough
def test_a_small_vocabulary():
    compare(1000, seed=1)


@pytest.mark.thorough
def test_a_usual_vocabulary():
    compare(49_152, ("greedy, one", "temperature", "usual", "nucleus, flat", "top 1000, flat", "everything"))


def test_no_list_of_tokens():
    logits, inputs, history, _ = batch(300, ["usual"])
    for run in (kernel, reference):
        tokens, scores = jax.eval_shape(functools.partial(run, top=0), logits, inputs, history)
        assert tokens.shape == (4,) and [x.shape for x in scores] == [(4,), (4,), (4, 0), (4, 0)]


def test_adjusted_logits_agree_within_rounding():
    """Compare two compilations of the same sums: the last bit differs where one has a fused multiply-add."""
    logits, inputs, history, _ = batch(5003, KINDS)
    want = jax.jit(ops.adjust)(logits, inputs, history)
    got = jax.jit(functools.partial(gpu.adjust, interpret=True))(logits, inputs, history)
    np.testing.assert_array_equal(np.isfinite(got), np.isfinite(want))
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "change",
    [pytest.param(dict(FEW=4, ROOM=512), marks=pytest.mark.thorough), dict(FEW=4, ROOM=512, GATHER=False)],
    ids=["little room", "passes alone"],
)
def test_truncation_keeps_the_references_tokens(change, monkeypatch):
    """The thresholds themselves, over rows that need the search of the whole row."""
    for name, value in change.items():
        monkeypatch.setattr(gpu, name, value)
    V, each = 3001, 30
    rng = np.random.default_rng(3)
    logits = np.stack([logits_of(kind, V, rng) for kind in ("flat", "tied", "equal", "", "masked") * each])
    logits -= logits.max(1, keepdims=True)  # as `choose` gives them
    k = rng.choice([0, 1, 20, 300, 2000, V], len(logits)).astype(np.int32)
    p = rng.choice([1.0, 0.1, 0.8, 0.999], len(logits)).astype(np.float32)
    min_p = rng.choice([0.0, 0.01, 0.3], len(logits)).astype(np.float32)
    # where a sum falls on p to within rounding, both answers are right
    want = [np.isfinite(jax.jit(ops.truncate)(logits, k, p * q, min_p)) for q in np.float32([1, 1 - 2e-6, 1 + 2e-6])]
    got = np.isfinite(thresholds(logits, k, p, min_p))
    agrees = np.stack([(got == kept).all(axis=1) for kept in want])
    assert agrees.any(axis=0).all() and agrees[0].mean() > 0.97


def thresholds(logits, k, p, min_p) -> np.ndarray:
    """Return the logits that `_truncate` keeps, through a separate kernel."""
    S = len(logits)
    maxima = gpu.block_maxima(jnp.asarray(logits))
    count = maxima.shape[1]

    def program(k_ref, p_ref, min_p_ref, maxima_ref, logits_ref, floor_ref, least_ref, few_ref, room_ref):
        row, blocks = pl.program_id(0), jnp.arange(1 << (count - 1).bit_length())
        maxima = gpu.plgpu.load(maxima_ref.at[row, blocks], mask=blocks < count, other=-jnp.inf)
        line = gpu._Line(logits_ref, few_ref, room_ref, row, jnp.float32(0), jnp.float32(1), 256, True)
        keys = jnp.where(blocks < count, key_of(maxima), NONE)
        floor_ref[row], least_ref[row], *_ = gpu._truncate(line, keys, k_ref[row], p_ref[row], min_p_ref[row])

    shapes = [((S,), jnp.int32), ((S,), jnp.float32), ((S, gpu.FEW), jnp.int32), ((S, gpu.ROOM), jnp.float32)]
    out_shape = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
    floor, least, *_ = jax.jit(pl.pallas_call(program, grid=(S,), out_shape=out_shape, interpret=True))(
        k, p, min_p, maxima, logits
    )
    keep = (key_of(jnp.asarray(logits)) >= floor[:, None]) & (jnp.exp(logits) >= least[:, None])
    return np.where(keep, logits, -np.inf)


def test_the_noise_equals_jaxs():
    hi, lo, position = (jnp.asarray(x, jnp.uint32) for x in (5, 2**32 - 7, 123))
    key = jax.random.fold_in(jax.random.wrap_key_data(jnp.stack([hi, lo]), impl="threefry2x32"), position)
    want = ops._gumbel(jax.random.bits(key, (300,), jnp.uint32))
    np.testing.assert_array_equal(Noise(hi, lo, position.astype(jnp.int32)).at(jnp.arange(300)), want)


def test_duplicated_constants_agree():
    assert (gpu.BLOCK, gpu.COLDEST) == (ops.BLOCK, ops.COLDEST)
    assert int(key_of(jnp.float32(-jnp.inf))) == LOWEST and int(key_of(jnp.float32(-0.0))) == TOP


@pytest.mark.parametrize(("S", "V"), [(1, 49_152), (512, 151_936)])
def test_it_lowers_for_cuda(S, V):
    _, inputs, _, _ = batch(64, ["usual"])
    shape = lambda x: jax.ShapeDtypeStruct((S, *x.shape[1:]), x.dtype)  # noqa: E731
    inputs = jax.tree.map(shape, inputs)
    inputs = ops.replace(inputs, mask=jax.ShapeDtypeStruct((S, -(-V // 32)), jnp.uint32))
    given = jax.ShapeDtypeStruct((S, V), jnp.float32), inputs, jax.ShapeDtypeStruct((2, V), jnp.int32)
    run = jax.jit(functools.partial(ops.sample, top=LISTED, platform="cuda"))
    with a_device("cuda"):
        text = run.trace(*given).lower(lowering_platforms=("cuda",)).as_text()
    assert "adjust_logits" in text and "draw_tokens" in text
    assert "stablehlo.case" not in text and "stablehlo.sort" not in text, "a branch waits for the host"


def test_the_kernel_is_for_one_nvidia_gpu():
    assert sample_kernel("cuda", None) is gpu.sample
    assert sample_kernel("cpu", None) is None and sample_kernel("tpu", None) is None
