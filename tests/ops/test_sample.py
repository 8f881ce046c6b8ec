"""Test the sampler against NumPy: exact sets, the distribution of draws, and what a draw depends on."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from corners import corners
from later import later

from dovetail.ops import sample as ops

pytestmark = pytest.mark.slow
stats = later("scipy.stats")

V = 200  # more than a block, and not a whole number of them
W = -(-V // 32)
NO_HISTORY = jnp.zeros((1, V), jnp.int32)


def make_inputs(S: int, **given) -> ops.SampleInputs:
    """Return S rows with these settings, each a number for all rows or an array, and defaults for the rest."""
    dtypes = dict.fromkeys(("temperature", "top_p", "min_p", "presence", "frequency", "repetition"), np.float32)
    dtypes |= dict.fromkeys(("top_k", "position", "slot", "mask_until", "top_logprobs"), np.int32)
    dtypes |= dict.fromkeys(("seed_hi", "seed_lo"), np.uint32)
    off = dict.fromkeys(dtypes, 0) | dict(temperature=1.0, top_p=1.0, repetition=1.0, top_logprobs=-1)
    off["seed_lo"] = np.arange(S)
    arrays = {name: np.broadcast_to((off | given)[name], (S,)).astype(dtype) for name, dtype in dtypes.items()}
    bias = given.get("bias") or {}
    ids, values = np.full((S, 4), -1, np.int32), np.zeros((S, 4), np.float32)
    ids[:, : len(bias)], values[:, : len(bias)] = list(bias), list(bias.values())
    mask = pack(given.get("allowed", np.ones(V, bool)))
    return ops.SampleInputs(
        **arrays,
        bias_ids=ids,
        bias=values,
        mask=np.broadcast_to(mask, (S, W)),  # pyright: ignore
    )


def pack(allowed: np.ndarray) -> np.ndarray:
    """[V] bool -> [W] uint32, written apart from the sampler's own."""
    bits = np.zeros(W, np.uint32)
    for v in np.flatnonzero(allowed):
        bits[v // 32] |= np.uint32(1 << (v % 32))
    return bits


@pytest.fixture(scope="module")
def sample():
    return jax.jit(lambda logits, inputs, history: ops.sample(logits, inputs, history, 0)[0])


@pytest.fixture(scope="module")
def truncate():
    return jax.jit(ops.truncate)


def random_logits(*shape: int, scale: float = 2.0, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=shape) * scale).astype(np.float32)


# --- the reference ----------------------------------------------------------------------------------------------------


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max())
    return e / e.sum()


def kept_by(logits: np.ndarray, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """Which tokens [V] stay, by sorting, in f64; ties stay."""
    probs = softmax(logits.astype(np.float64))
    keep = probs >= min_p * probs.max() * (1 - 1e-6)
    if top_k:
        keep &= logits >= np.sort(logits)[::-1][min(top_k, len(logits)) - 1]
    if top_p < 1:
        left = np.sort(np.where(keep, probs, 0))[::-1]
        last = min(np.searchsorted(np.cumsum(left), top_p * left.sum()), len(left) - 1)
        keep &= probs >= left[last] * (1 - 1e-6)
    return keep


def penalized(logits, counts, prompt, p: dict) -> np.ndarray:
    x = logits.astype(np.float64).copy()
    for v in range(len(x)):
        if counts[v] or prompt[v]:
            r = p.get("repetition", 1.0)
            x[v] = x[v] / r if x[v] > 0 else x[v] * r
        x[v] -= p.get("frequency", 0.0) * counts[v] + p.get("presence", 0.0) * (counts[v] > 0)
    return x


def expected(logits, counts, prompt, allowed, p: dict) -> np.ndarray:
    """The probabilities [V] that a row of these parameters should draw from."""
    x = logits.copy()
    for token, value in p.get("bias", {}).items():
        x[token] += value
    x = penalized(x, counts, prompt, p)
    x[~allowed] = -np.inf
    x /= p.get("temperature", 1.0)
    return softmax(np.where(kept_by(x, p.get("top_k", 0), p.get("top_p", 1.0), p.get("min_p", 0.0)), x, -np.inf))


# --- the distribution -------------------------------------------------------------------------------------------------

CASES = {
    "plain": {},
    "hot": dict(temperature=1.7),
    "cold": dict(temperature=0.4),
    "top-k": dict(top_k=7),
    "top-p": dict(top_p=0.8),
    "min-p": dict(min_p=0.1),
    "temperature, then top-p": dict(temperature=1.5, top_p=0.6),
    "top-k, then top-p of what is left": dict(top_k=12, top_p=0.7, temperature=0.8),
    "all three": dict(top_k=30, top_p=0.9, min_p=0.02, temperature=1.3),
    "penalties": dict(presence=0.8, frequency=0.5, repetition=1.3),
    "penalties that favour": dict(presence=-0.8, frequency=-0.3, repetition=0.8, top_k=40),
    "bias": dict(bias={3: 4.0, 150: -5.0, 199: 5.0}),
    "everything": dict(
        temperature=0.9, top_k=50, top_p=0.92, min_p=0.01, presence=0.5, frequency=0.3, repetition=1.2, bias={7: 3.0},
        masked=True,
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", corners(CASES, ["plain", "min-p", "top-k, then top-p of what is left", "penalties", "everything"])
)
def test_distribution(name: str, sample):
    N, params = 20_000, dict(CASES[name])
    rng = np.random.default_rng(1)
    logits = random_logits(V, seed=2)
    counts, prompt = rng.poisson(0.3, V), rng.random(V) < 0.2
    allowed = rng.random(V) < 0.5 if params.pop("masked", False) else np.ones(V, bool)
    history = jnp.array((2 * counts + prompt)[None].astype(np.int32))
    # another seed for each row, as for N requests
    inputs = make_inputs(N, **params, allowed=allowed, mask_until=ops.FOREVER, seed_hi=5, position=9)
    drawn = np.asarray(sample(np.broadcast_to(logits, (N, V)), inputs, history))
    want = expected(logits, counts, prompt, allowed, params)
    got = np.bincount(drawn, minlength=V)
    assert not got[want == 0].any(), "a token was drawn that had been left out"
    few = want * N < 5  # chi-square wants five in a bin
    f_exp, f_obs = np.append(want[~few], want[few].sum()) * N, np.append(got[~few], got[few].sum())
    some = f_exp > 0
    assert stats.chisquare(f_obs[some], f_exp[some]).pvalue > 1e-3


def test_positions_of_one_seed_are_independent_draws(sample):
    N = 20_000
    logits = random_logits(V, seed=3)
    inputs = make_inputs(N, position=np.arange(N), seed_lo=7, slot=1)
    drawn = np.asarray(sample(np.broadcast_to(logits, (N, V)), inputs, jnp.zeros((1, V), jnp.int32)))
    top = np.argsort(logits)[::-1][:8]
    rank = np.full(V, 8)
    rank[top] = np.arange(8)
    pairs = np.bincount(rank[drawn[:-1]] * 9 + rank[drawn[1:]], minlength=81)
    probs = np.append(softmax(logits.astype(np.float64))[top], 0)
    probs[8] = 1 - probs.sum()
    assert stats.chisquare(pairs, np.outer(probs, probs).ravel() * pairs.sum()).pvalue > 1e-3


def test_a_large_flat_vocabulary_favours_no_ids():
    large, N = 20_000, 1024
    drawn = np.asarray(jax.jit(ops.choose)(np.zeros((N, large), np.float32), make_inputs(N)))
    assert stats.chisquare(np.bincount(drawn * 20 // large, minlength=20)).pvalue > 1e-3


# --- truncation -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["random", "tied", "far apart", "masked"])
def test_truncation_keeps_exactly_the_right_tokens(kind: str, truncate):
    S = 300
    rng = np.random.default_rng(4)
    logits = random_logits(S, V, scale=30.0 if kind == "far apart" else 2.0, seed=5)
    if kind == "tied":
        logits = np.round(logits)  # has -0.0 too
    if kind == "masked":
        logits[rng.random((S, V)) < 0.9] = -np.inf
    k = rng.choice([0, 1, 2, 5, 50, V - 1, V, V + 7], S).astype(np.int32)
    p = rng.choice([1.0, 1e-9, 0.03, 0.41, 0.77, 0.993, 0.9999], S).astype(np.float32)
    m = rng.choice([0.0, 0.013, 0.29, 1.0], S).astype(np.float32)
    out = np.asarray(truncate(logits, k, p, m))
    for row in range(S):
        got = np.isfinite(out[row])
        # where a sum falls on p to within rounding, both answers are right
        nearby = [kept_by(logits[row], k[row], q, m[row]) for q in (p[row] * (1 - 2e-6), p[row], p[row] * (1 + 2e-6))]
        assert any((got == (want & np.isfinite(logits[row]))).all() for want in nearby), (row, k[row], p[row], m[row])
        assert (out[row][got] == logits[row][got]).all()


def test_top_k_is_exact_down_to_the_last_bit(truncate):
    logits = np.full((1, V), 1.0, np.float32)
    logits[0, 60] = np.nextafter(np.float32(1), np.float32(2))
    logits[0, 61] = np.nextafter(np.float32(1), np.float32(0))

    def kept(k: int) -> np.ndarray:
        out = truncate(logits, np.array([k], np.int32), np.ones(1, np.float32), np.zeros(1, np.float32))
        return np.flatnonzero(np.isfinite(np.asarray(out)[0]))

    assert kept(1).tolist() == [60]
    assert kept(2).tolist() == [v for v in range(V) if v != 61]  # all that tie with the second
    assert kept(V).tolist() == list(range(V))


def test_ties_stay_and_signed_zeros_tie(truncate):
    logits = np.array([[0.0, -0.0, -1.0, -1.0, -2.0] + [-9.0] * (V - 5)], np.float32)
    out = truncate(logits, np.array([1], np.int32), np.ones(1, np.float32), np.zeros(1, np.float32))
    assert np.flatnonzero(np.isfinite(np.asarray(out)[0])).tolist() == [0, 1]


# --- what a draw depends on -------------------------------------------------------------------------------------------


def test_a_draw_depends_on_its_seed_and_position_alone(sample):
    logits = random_logits(101, V, seed=6)
    mixed = dict(top_k=np.arange(101) % 9, top_p=np.where(np.arange(101) % 2, 0.8, 1.0), min_p=0.01)
    many = make_inputs(101, temperature=np.where(np.arange(101) % 5, 0.9, 0.0), position=np.arange(101), **mixed)
    history = jnp.zeros((1, V), jnp.int32)
    together = np.asarray(sample(logits, many, history))
    reversed_ = np.asarray(sample(logits[::-1], jax.tree.map(lambda x: x[::-1], many), history))
    assert (reversed_[::-1] == together).all()
    for row in (0, 1, 50, 100):
        alone = jax.tree.map(lambda x, row=row: x[row : row + 1], many)
        assert sample(logits[row : row + 1], alone, history)[0] == together[row]


def test_seeds_and_positions_differ(sample):
    flat, history = np.zeros((64, V), np.float32), jnp.zeros((1, V), jnp.int32)
    base = make_inputs(64, seed_lo=1, slot=1)
    row = np.arange(64)
    for change in (dict(position=row), dict(seed_lo=row), dict(seed_hi=row)):
        change = {name: values.astype(getattr(base, name).dtype) for name, values in change.items()}
        assert len(np.unique(sample(flat, replace(base, **change), history))) > 30, change
    assert len(np.unique(sample(flat, base, history))) == 1


def test_advance_moves_every_position_by_one():
    assert (ops.advance(make_inputs(3, position=np.array([4, 0, 9]))).position == np.array([5, 1, 10])).all()


# --- greedy and log-probabilities -------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [5, 128, 200, 384])
def test_argmax_is_the_first_of_the_greatest(size: int):
    logits = np.round(random_logits(50, size))
    assert (ops.argmax(logits) == logits.argmax(1)).all()


def test_greedy_is_the_argmax_and_the_top_logprob(sample):
    # bf16 ties at the top are common: the token, its rank and the first of the list must still agree
    logits = np.array(jnp.array(random_logits(64, V, seed=7)).astype(jnp.bfloat16).astype(jnp.float32))
    logits[:, 100] = logits.max(1)
    inputs = make_inputs(64, temperature=0.0, slot=1)
    tokens = sample(logits, inputs, jnp.zeros((1, V), jnp.int32))
    assert (tokens == logits.argmax(1)).all()
    value, rank, top, ids = ops.logprobs(logits, tokens, 20)
    assert (ids[:, 0] == tokens).all() and (top[:, 0] == value).all() and (rank == 1).all()


def test_logprobs_against_numpy():
    logits = random_logits(16, V, seed=8)
    tokens = np.random.default_rng(9).integers(0, V, 16)
    value, rank, top, ids = ops.logprobs(logits, tokens, 5)
    want = np.log([softmax(row.astype(np.float64)) for row in logits])
    order = np.argsort(-logits, axis=1)
    np.testing.assert_allclose(value, want[np.arange(16), tokens], atol=1e-5)
    np.testing.assert_allclose(top, np.take_along_axis(want, order[:, :5], 1), atol=1e-5)
    assert (ids == order[:, :5]).all()
    assert (rank == 1 + np.argmax(order == tokens[:, None], axis=1)).all()


def test_scores_equal_adjusted_logits_in_the_rows_that_ask():
    logits = random_logits(4, V, seed=12)
    inputs = make_inputs(4, temperature=[0.0, 1.0, 0.0, 1.0], top_logprobs=[-1, 0, 2, 5], slot=1, bias={3: 9.0})
    tokens, (value, rank, top, ids) = ops.sample(logits, inputs, NO_HISTORY, 5)
    logits[:, 3] += 9.0
    want = ops.logprobs(logits, tokens, 5)
    assert (rank == np.where([0, 1, 1, 1], want[1], 0)).all() and value[0] == 0
    np.testing.assert_allclose(value[1:], want[0][1:], atol=1e-6)
    for row, count in ((2, 2), (3, 5)):
        assert (ids[row, :count] == want[3][row, :count]).all()
        np.testing.assert_allclose(top[row, :count], want[2][row, :count], atol=1e-6)


def test_scores_without_a_request_are_zero():
    logits = random_logits(2, V, seed=13)
    tokens, (value, rank, top, ids) = ops.sample(logits, make_inputs(2, temperature=0.0, slot=1), NO_HISTORY, 3)
    assert (tokens == logits.argmax(1)).all() and top.shape == ids.shape == (2, 3)
    assert not any(x.any() for x in (value, rank, top, ids))


# --- the pieces -------------------------------------------------------------------------------------------------------


def test_penalties_against_numpy():
    rng = np.random.default_rng(11)
    logits, counts, prompt = random_logits(3, V), rng.poisson(0.5, (3, V)), rng.random((3, V)) < 0.3
    asks = [dict(presence=0.5, frequency=0.25, repetition=1.5), dict(repetition=0.5), dict(presence=-1.0)]
    columns = make_inputs(3, **{name: [ask.get(name, name == "repetition") for ask in asks] for name in asks[0]})
    out = ops.penalize(logits, counts, prompt, columns.presence, columns.frequency, columns.repetition)
    want = [penalized(*row) for row in zip(logits, counts, prompt, asks, strict=True)]
    np.testing.assert_allclose(out, want, rtol=1e-6, atol=1e-6)


def test_bias_penalties_and_mask_apply_to_greedy_rows(sample):
    logits = np.zeros((4, V), np.float32)
    logits[:, 10], logits[:, 20] = 2.0, 1.0
    history = jnp.zeros((1, V), jnp.int32).at[0, 10].set(2)
    asks = dict(bias={20: 1.5}), dict(presence=1.5, slot=0), dict(allowed=np.arange(V) == 20, mask_until=9), {}
    for ask, want in zip(asks, (20, 20, 20, 10), strict=True):
        inputs = make_inputs(4, temperature=0.0, position=8, **({"slot": 1} | ask))
        assert (sample(logits, inputs, history) == want).all(), ask
    late = make_inputs(4, temperature=0.0, position=9, slot=1, allowed=np.arange(V) == 20, mask_until=9)
    assert (sample(logits, late, history) == 10).all(), "the mask held too long"


def test_count_tokens_leaves_out_rows_without_a_slot():
    history = jnp.ones((2, V), jnp.int32)
    slots, tokens = np.array([1, 2, 1], np.int32), np.array([4, 5, 4], np.int32)
    out = np.asarray(ops.count_tokens(history, slots, tokens))
    assert out[1, 4] == 5 and out.sum() == 2 * V + 4


def test_nothing_left_and_extreme_temperatures_give_no_nan(sample):
    logits = random_logits(3, V, seed=10)
    logits[0] = -np.inf
    history = jnp.zeros((1, V), jnp.int32)
    for temperature in (1e-30, 1e-6, 100.0):
        inputs = make_inputs(3, temperature=temperature, top_k=3, top_p=0.5, min_p=0.1, slot=1)
        tokens = np.asarray(sample(logits, inputs, history))
        assert ((tokens >= 0) & (tokens < V)).all()
        if temperature < 1e-3:
            assert (tokens[1:] == logits[1:].argmax(1)).all()


def test_padding_rows_of_a_row_of_blocks_are_never_drawn():
    inputs = make_inputs(4096)
    drawn = np.asarray(jax.jit(ops.choose)(jnp.zeros((4096, 3)), inputs))
    assert set(np.unique(drawn)) == {0, 1, 2}
