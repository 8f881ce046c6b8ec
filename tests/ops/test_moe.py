"""Routing against a plain transcription in numpy; the sorted experts against those that run everything."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dovetail.ops.glu import Glu
from dovetail.ops.moe import Router, _positions, experts, experts_reference, route
from dovetail.ops.router import _halves, router_logits, top_k, top_k_by_rank

pytestmark = pytest.mark.slow

T, D, E, F, K = 12, 16, 8, 10, 3
ROUTERS = {
    "mixtral": Router(E, 2, normalize=True),
    "qwen3-moe": Router(E, K),
    "deepseek-v2": Router(E, K, scale=1.7, groups=4, top_groups=2, group_score="max"),
    "deepseek-v3": Router(
        E, K, score="sigmoid", normalize=True, scale=2.5, groups=4, top_groups=2, group_score="top2"
    ),
    "gpt-oss": Router(E, K, score="chosen"),
}  # fmt: skip


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


def route_one(r: Router, logits: np.ndarray, bias: np.ndarray) -> dict[int, float]:
    """One token's expert -> weight, as the papers have it."""
    scores = {"softmax": softmax, "sigmoid": lambda x: 1 / (1 + np.exp(-x)), "chosen": lambda x: x}[r.score](logits)
    choice = scores + bias
    size = r.experts // r.groups
    judged = 2 if r.group_score == "top2" else 1
    merit = [np.sort(choice[g * size : (g + 1) * size])[-judged:].sum() for g in range(r.groups)]
    best = np.argsort(merit)[-r.top_groups :] if r.groups > 1 else [0]
    allowed = [e for e in range(r.experts) if r.groups == 1 or e // size in best]
    chosen = sorted(allowed, key=lambda e: -choice[e])[: r.top_k]
    weights = softmax(scores[chosen]) if r.score == "chosen" else scores[chosen]
    if r.normalize:
        weights = weights / weights.sum()
    return dict(zip(chosen, weights * r.scale, strict=True))


@pytest.mark.parametrize("biased", [False, True], ids=["", "choice bias"])
@pytest.mark.parametrize("kind", ROUTERS)
def test_route(kind, biased):
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(64, E)).astype(np.float32)
    bias = (rng.normal(size=E) * biased).astype(np.float32)
    weights, chosen = route(ROUTERS[kind], jnp.asarray(logits), jnp.asarray(bias) if biased else None)
    for row, (w, e) in enumerate(zip(np.asarray(weights), np.asarray(chosen), strict=True)):
        expected = route_one(ROUTERS[kind], logits[row], bias)
        assert set(e.tolist()) == set(expected)
        np.testing.assert_allclose(w, [expected[i] for i in e.tolist()], rtol=1e-5)


@pytest.mark.parametrize("ties", [False, True], ids=["", "ties"])
def test_top_k_by_rank_is_lax_top_k(ties):
    rng = np.random.default_rng(1)
    scores = rng.integers(0, 4, (40, E)).astype(np.float32) if ties else rng.normal(size=(40, E)).astype(np.float32)
    scores[0, 1::2] = -np.inf  # of experts in other groups
    got, want = jax.jit(top_k_by_rank, static_argnums=1)(scores, 3), jax.lax.top_k(scores, 3)
    jax.tree.map(np.testing.assert_array_equal, got, tuple(want))


def test_nan_scores_choose_experts_that_exist():
    scores = jnp.where(jnp.arange(E) % 2 == 0, jnp.nan, jnp.arange(E, dtype=jnp.float32))[None]
    _, places = top_k_by_rank(jnp.concatenate([scores, jnp.full_like(scores, jnp.nan)]), 3)
    assert (places >= 0).all() and (places < E).all()


def test_a_gpu_sorts_only_many_scores():
    for tokens, sorts in ((512, False), (1024, True)):
        scores = jax.ShapeDtypeStruct((tokens, 128), jnp.float32)
        text = jax.jit(lambda x: top_k(x, 8)).trace(scores).lower(lowering_platforms=("cuda",)).as_text()
        assert ("top_k" in text or "sort" in text) == sorts


@pytest.mark.parametrize("kind", ROUTERS)
def test_the_gradient_of_the_weights(kind):
    """It is that of finite differences, with the choice fixed."""
    logits = jnp.asarray(np.random.default_rng(2).normal(size=(4, E)), jnp.float32)
    loss = jax.jit(lambda logits: jnp.sum(jnp.sin(3 * route(ROUTERS[kind], logits)[0])))
    direction = jnp.asarray(np.random.default_rng(3).normal(size=logits.shape), jnp.float32)
    slope = (loss(logits + 1e-3 * direction) - loss(logits - 1e-3 * direction)) / 2e-3
    np.testing.assert_allclose(jnp.vdot(jax.grad(loss)(logits), direction), slope, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("kind", ROUTERS)
def test_the_gradient_of_the_weights_scatters_nothing(kind):
    loss = lambda logits, bias: jnp.sum(route(ROUTERS[kind], logits, bias)[0] ** 2)  # noqa: E731
    for bias in (None, jnp.zeros(E)):
        assert "scatter-add" not in str(jax.make_jaxpr(jax.grad(loss))(jnp.zeros((4, E)), bias))


def test_the_routers_product_has_gradients_of_f32():
    """Factors are bf16; the logits' gradient has 16 bits of fraction, and no f32 copy of the activations is saved."""
    x, router = (jax.random.normal(jax.random.key(i), shape).astype(jnp.bfloat16) for i, shape in enumerate(
        [(2, 40, 64), (E, 64)]))  # fmt: skip
    g = jax.random.normal(jax.random.key(2), (2, 40, E))
    logits, back = jax.vjp(router_logits, x, router)
    wanted = jnp.einsum("btd,ed->bte", x.astype(jnp.float32), router.astype(jnp.float32))
    np.testing.assert_allclose(logits, wanted, atol=1e-5)
    dx, drouter = (np.asarray(a, np.float64) for a in back(g))
    x, router, g = (np.asarray(a, np.float64) for a in (x, router, g))
    np.testing.assert_allclose(dx, g @ router, rtol=2**-8, atol=1e-3)
    np.testing.assert_allclose(drouter, np.einsum("bte,btd->ed", g, x), rtol=2**-8, atol=1e-3)
    assert all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(back))


def test_the_two_halves_of_a_gradient_are_its_value():
    g = jax.random.normal(jax.random.key(0), (1000, E)) * jnp.exp(10 * jax.random.normal(jax.random.key(1), (1000, E)))
    sums = jax.jit(lambda g: _halves(g).astype(jnp.float32).sum(axis=-2))(g)
    np.testing.assert_allclose(sums, g, rtol=2**-16)


def some_experts(biases: bool):
    rng = np.random.default_rng(1)
    shapes = {"gate": (E, F, D), "up": (E, F, D), "down": (E, D, F)}
    shapes |= {"gate_bias": (E, F), "up_bias": (E, F), "down_bias": (E, D)} if biases else {}
    return {name: jnp.asarray(rng.normal(size=shape) * 0.3, jnp.float32) for name, shape in shapes.items()}


def choices(kind: str) -> jax.Array:
    if kind == "all to one":
        return jnp.full((T, 1), 5)
    rng = np.random.default_rng(2)
    pool = np.delete(np.arange(E), [0, 4, E - 1]) if kind == "some idle" else np.arange(E)
    return jnp.asarray([rng.permutation(pool)[:K] for _ in range(T)])


@pytest.mark.parametrize("kind", ["spread", "some idle", "all to one"])
@pytest.mark.parametrize("biases", [False, True], ids=["", "biases"])
def test_sorted_experts_equal_the_reference(biases, kind):
    chosen, params = choices(kind), some_experts(biases)
    rng = np.random.default_rng(3)
    x = jnp.asarray(rng.normal(size=(T, D)), jnp.float32)
    weights = jnp.asarray(rng.uniform(size=chosen.shape), jnp.float32)
    glu = Glu(limit=1.0) if biases else Glu()

    def outputs_and_gradients(run):
        def loss(x, weights, params):
            out = run(x, weights, chosen, params, glu)
            return jnp.sum(jnp.sin(out)), out

        return jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(x, weights, params)

    ours, theirs = outputs_and_gradients(experts), outputs_and_gradients(experts_reference)
    assert jnp.std(theirs[1]) > 0.1, "a test of nothing"
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), ours, theirs)


@pytest.mark.parametrize("count", [7, 256, 1000])
def test_positions_are_those_of_a_stable_sort(count):
    group = np.random.default_rng(0).integers(0, E + 1, count)
    place, sizes = _positions(jnp.asarray(group), E)
    np.testing.assert_array_equal(np.argsort(np.asarray(place)), np.argsort(group, kind="stable"))
    np.testing.assert_array_equal(sizes, np.bincount(group, minlength=E + 1)[:E])


def test_a_token_counts_an_expert_as_often_as_it_was_chosen():
    """Not what a router does, but what dropless means: each (token, expert) pair is computed."""
    params = some_experts(biases=False)
    x = jnp.asarray(np.random.default_rng(4).normal(size=(2, D)), jnp.float32)
    twice = experts(x, jnp.array([[0.25, 0.5]] * 2), jnp.array([[3, 3]] * 2), params, Glu())
    once = experts(x, jnp.array([[0.75]] * 2), jnp.array([[3]] * 2), params, Glu())
    np.testing.assert_allclose(twice, once, atol=1e-6)
