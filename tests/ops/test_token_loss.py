"""Test chunked per-token losses against plain formulas: on a mesh, in memory, and in traffic."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from corners import corners
from refusals import refuses

from dovetail.core.errors import RecipeError
from dovetail.core.mesh import TRAIN, Placement, make_mesh
from dovetail.ops.linear import matmul
from dovetail.ops.token_loss import (
    Allowed,
    divergence,
    token_divergence,
    token_logprobs,
    token_scores,
    token_top_k,
    top_k_divergence,
)

pytestmark = pytest.mark.slow

B, T, D, V, K = 4, 11, 16, 40, 5
HOW: dict[str, Any] = {
    "plain": dict(),
    "one chunk, longer than the batch": dict(chunk=1000),
    "chunks of one token": dict(softcap=3.0, chunk=1),
    "chunks that fill up": dict(scale=0.3, softcap=3.0, temperature=1.7, chunk=9),
}
KINDS: dict[str, Any] = {
    "forward": dict(kind="forward"),
    "reverse": dict(kind="reverse"),
    "jsd": dict(kind="jsd", beta=0.3),
    "jsd at 0": dict(kind="jsd", beta=0.0),
    "jsd at 1": dict(kind="jsd", beta=1.0),
}


def some(*shape: int, seed: int = 0, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def some_targets(rows: int = B) -> jax.Array:
    return jnp.asarray(np.random.default_rng(9).integers(0, V, (rows, T)), jnp.int32)


def plain_logits(hidden, head, scale=1.0, softcap=None, temperature=1.0):
    logits = jnp.einsum("btd,vd->btv", hidden, head, preferred_element_type=jnp.float32) * scale
    logits = softcap * jnp.tanh(logits / softcap) if softcap else logits
    return logits / temperature


def value_and_grads(f, *args):
    """(values, gradients by every argument of a sum in which each token weighs something else)."""
    values = jax.jit(f)(*args)
    weights = [some(*leaf.shape, seed=5 + i) for i, leaf in enumerate(jax.tree.leaves(values))]

    def total(*args):
        leaves = jax.tree.leaves(f(*args))
        return sum(jnp.sum(w * leaf) for w, leaf in zip(weights, leaves, strict=True))

    return values, jax.jit(jax.grad(total, tuple(range(len(args)))))(*args)


def assert_same(got, want, tol=1e-5):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        b = np.asarray(b, np.float32)
        np.testing.assert_allclose(np.asarray(a, np.float32), b, rtol=tol, atol=tol * max(1.0, np.abs(b).max()))


def without_chunk(how):
    return {name: value for name, value in how.items() if name != "chunk"}


# --- log-probabilities ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", HOW)
def test_logprobs_and_entropy_equal_the_plain_formula(case):
    how, targets = HOW[case], some_targets()

    def plain(h, w):
        logp = jax.nn.log_softmax(plain_logits(h, w, **without_chunk(how)))
        chosen = jnp.take_along_axis(logp, targets[..., None], -1)[..., 0]
        best = jax.lax.stop_gradient(jnp.argmax(logp, -1) == targets).astype(jnp.float32)
        return chosen, best, -jnp.sum(jnp.exp(logp) * logp, axis=-1)

    head = some(V, D, seed=1)
    args = some(B, T, D) + 0.5 * head[targets], head
    want = value_and_grads(plain, *args)
    assert want[0][1].sum() > 0
    assert_same(value_and_grads(lambda h, w: token_scores(h, w, targets, entropy=True, **how), *args), want)
    alone = value_and_grads(lambda h, w: token_logprobs(h, w, targets, **how), *args)
    assert_same(alone[0], want[0][0])
    assert_same(alone, value_and_grads(lambda h, w: plain(h, w)[0], *args))


def some_allowed(targets: jax.Array, masks: int = 3) -> tuple[Allowed, np.ndarray]:
    """(about half of the words, by one of each row's masks; [B, T, V] whether each is there): the targets are."""
    rng, (rows, length) = np.random.default_rng(7), targets.shape
    there = rng.random((rows, masks, V)) < 0.5
    number = rng.integers(0, masks, (rows, length)).astype(np.int32)
    for row in range(rows):
        there[row, number[row], np.asarray(targets[row])] = True
    bits = np.packbits(np.pad(there, ((0, 0), (0, 0), (0, -V % 32))), axis=2, bitorder="little").view(np.uint32)
    return Allowed(jnp.asarray(bits), jnp.asarray(number)), there[np.arange(rows)[:, None], number]


@pytest.mark.parametrize("axes", [None, dict(fsdp=2, context=2, tensor=2)])
def test_tokens_allowed_by_a_mask(axes):
    """On a mesh too, as the formula has it with the other words' logits at -inf."""
    h, w, targets = some(B, 12, D), some(V, D, seed=1), jnp.pad(some_targets(), ((0, 0), (0, 1)))
    allowed, there = some_allowed(targets)

    def plain(h, w):
        logits = jnp.where(there, plain_logits(h, w, temperature=1.7), -jnp.inf)
        p = jax.nn.softmax(logits)
        logp = jnp.where(there, jnp.log(jnp.where(there, p, 1.0)), 0.0)
        return jnp.take_along_axis(logp, targets[..., None], -1)[..., 0], -jnp.sum(p * logp, axis=-1)

    def ours(h, w):
        how: dict[str, Any] = dict(temperature=1.7, chunk=5, placement=placement)
        found = token_scores(h, w, targets, entropy=True, allowed=allowed, **how)
        return found.logprobs, found.entropy

    placement, args = on_mesh(axes, h, w) if axes else (None, (h, w))
    assert_same(value_and_grads(ours, *args), value_and_grads(plain, h, w), tol=2e-5)
    with refuses(None, RecipeError, naming="1 x 32"):
        token_scores(h, w, targets, allowed=Allowed(allowed.masks[..., :1], allowed.number))


def test_logits_may_be_held_in_bf16_and_the_heads_gradient_stays_f32():
    targets, h, w = some_targets(), some(B, T, D, dtype=jnp.bfloat16), some(V, D, seed=1)
    got = value_and_grads(lambda h, w: token_logprobs(h, w, targets, chunk=4), h, w)
    assert got[0].dtype == jnp.float32 and got[1][0].dtype == jnp.bfloat16 and got[1][1].dtype == jnp.float32
    rounded = value_and_grads(lambda h, w: token_logprobs(h, w, targets, chunk=4, dtype=jnp.bfloat16), h, w)
    for a, b in zip(jax.tree.leaves(rounded), jax.tree.leaves(got), strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        np.testing.assert_allclose(a, b, atol=3e-2 * np.abs(b).max())


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Halved:
    """A weight that is no array, with something in it that has no gradient."""

    half: jax.Array
    twice: jax.Array  # int8

    @property
    def shape(self) -> tuple[int, ...]:
        return self.half.shape

    def matmul(self, x: jax.Array, dims: int, out_dtype: Any) -> jax.Array:
        return matmul(x, self.half, dims=dims, out_dtype=out_dtype) * self.twice.astype(out_dtype)


def test_a_head_may_be_an_adapted_or_quantised_weight():
    targets, h, w = some_targets(), some(B, T, D), some(V, D, seed=1)

    def held(h, half):
        return token_logprobs(h, Halved(half, jnp.asarray(2, jnp.int8)), targets, chunk=4)

    values, (dh, dhalf) = value_and_grads(held, h, w / 2)
    assert_same((values, (dh, dhalf / 2)), value_and_grads(lambda h, w: token_logprobs(h, w, targets), h, w))


# --- divergences ------------------------------------------------------------------------------------------------------


def plain_divergence(s, t, kind, beta=0.5):
    s, t = jax.nn.softmax(s), jax.nn.softmax(t)

    def kl(p, q):
        return jnp.sum(p * (jnp.log(p) - jnp.log(q)), axis=-1)

    beta = {"forward": 0.0, "reverse": 1.0}.get(kind, beta)
    mixed = (1 - beta) * s + beta * t
    return kl(t, s) if beta == 0 else kl(s, t) if beta == 1 else beta * kl(t, mixed) + (1 - beta) * kl(s, mixed)


@pytest.mark.parametrize("case", HOW)
@pytest.mark.parametrize("name", corners(KINDS, ["jsd"]))
def test_divergence_from_a_teacher_of_another_size(name, case):
    how, kind, E = HOW[case], KINDS[name], 24
    args = some(B, T, D), some(V, D, seed=1)
    teacher = some(B, T, E, seed=2), some(V, E, seed=3)

    def ours(h, w):
        return token_divergence(h, w, *teacher, **kind, teacher_scale=0.7, teacher_softcap=5.0, **how)

    def plain(h, w):
        temperature = how.get("temperature", 1.0)
        theirs = plain_logits(*teacher, scale=0.7, softcap=5.0, temperature=temperature)
        return plain_divergence(plain_logits(h, w, **without_chunk(how)), theirs, **kind)

    assert_same(value_and_grads(ours, *args), value_and_grads(plain, *args), tol=2e-5)
    assert jax.jit(ours)(*args).min() > 0


def test_only_the_student_learns():
    h, w = some(B, T, D), some(V, D, seed=1)
    grads = jax.grad(lambda h, w: token_divergence(some(B, T, D, seed=2), w, h, w).sum(), (0, 1))(h, w)
    alone = jax.grad(lambda w: token_divergence(some(B, T, D, seed=2), w, h, some(V, D, seed=1)).sum())(w)
    assert not np.any(grads[0])
    assert_same(grads[1], alone)


@pytest.mark.parametrize("name", corners(KINDS, ["forward"]))
def test_divergence_over_the_teachers_top_tokens(name):
    kind, how = KINDS[name], dict[str, Any](softcap=4.0, temperature=1.7)
    args = some(B, T, D), some(V, D, seed=1)
    teacher = some(B, T, D, seed=2), some(V, D, seed=3)
    words, kept = jax.jit(lambda: token_top_k(*teacher, K, chunk=4))()
    logits = plain_logits(*teacher)
    np.testing.assert_array_equal(words, np.argsort(-np.asarray(logits), axis=-1)[..., :K])
    assert_same(kept, jnp.take_along_axis(jax.nn.log_softmax(logits), words, -1))

    def plain(h, w):
        ours = jnp.take_along_axis(plain_logits(h, w, **how), words, -1)
        return plain_divergence(ours, kept / 1.7, **kind)

    for shift in (0.0, 3.0):  # log-probabilities or logits
        theirs = kept + shift
        got = value_and_grads(lambda h, w, t=theirs: top_k_divergence(h, w, words, t, chunk=4, **kind, **how), *args)
        assert_same(got, value_and_grads(plain, *args), tol=2e-5)


def test_top_k_of_the_whole_vocabulary_is_the_whole_divergence():
    h, w, teacher = some(B, T, D), some(V, D, seed=1), (some(B, T, D, seed=2), some(V, D, seed=3))
    words, kept = token_top_k(*teacher, V)
    assert_same(top_k_divergence(h, w, words, kept), token_divergence(h, w, *teacher))


def test_the_divergence_of_a_model_from_itself_is_0():
    logits = some(3, V)
    for kind in KINDS.values():
        assert np.abs(divergence(logits, logits + 1.0, **kind)).max() < 1e-6


# --- memory and meshes ------------------------------------------------------------------------------------------------


def test_the_logits_are_never_all_in_memory():
    rows, length, words = 4, 512, 2048
    h = jax.ShapeDtypeStruct((rows, length, D), jnp.float32)
    w = jax.ShapeDtypeStruct((words, D), jnp.float32)
    t = jax.ShapeDtypeStruct((rows, length), jnp.int32)

    def temp(f):
        step = jax.jit(jax.value_and_grad(lambda h, w, t: f(h, w, t).sum(), (0, 1)))
        analysis = step.lower(h, w, t).compile().memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    logits = 4 * rows * length * words
    assert temp(lambda h, w, t: token_scores(h, w, t, entropy=True, chunk=64)[2]) < logits / 4
    assert temp(lambda h, w, t: token_logprobs(h, w, t, chunk=64)) < logits / 4
    assert temp(lambda h, w, t: token_divergence(h, w, h + 1, w, kind="jsd", chunk=64)) < logits / 2


MESHES = {
    "fsdp 4 x tensor 2": dict(fsdp=4, tensor=2),
    "fsdp 2 x context 2 x tensor 2": dict(fsdp=2, context=2, tensor=2),
}


def on_mesh(axes, *args):
    placement = Placement(make_mesh(axes), TRAIN)
    names = {3: ("batch", "length", None), 2: ("vocab", "embed")}
    return placement, [jax.device_put(x, placement.sharding(names[x.ndim], x.shape)) for x in args]


def scored(h, w, targets, **how):
    return token_scores(h, w, targets, entropy=True, chunk=4, **how)


def told_apart(h, w, targets, **how):
    teacher = some(*h.shape, seed=2), some(V, D, seed=3)
    words, kept = token_top_k(*teacher, K)
    both = token_divergence(h, w, *teacher, kind="jsd", chunk=4, **how)
    return both, top_k_divergence(h, w, words, kept, chunk=4, **how)


@pytest.mark.parametrize("measure", [scored, told_apart])
@pytest.mark.parametrize("rows", corners([8, 3], [3]), ids=["", "rows that the mesh does not divide"])
@pytest.mark.parametrize("axes", corners(MESHES, ["fsdp 2 x context 2 x tensor 2"]))
def test_a_mesh_gives_what_one_device_gives(axes, rows, measure):
    one, targets = (some(rows, 12, D), some(V, D, seed=1)), jnp.pad(some_targets(rows), ((0, 0), (0, 1)))
    placement, split = on_mesh(MESHES[axes], *one)
    got = value_and_grads(functools.partial(measure, targets=targets, placement=placement), *split)
    assert_same(got, value_and_grads(functools.partial(measure, targets=targets), *one), tol=2e-5)
    assert got[1][1].sharding.is_equivalent_to(split[1].sharding, 2)  # the head's gradient lies as the head does


def moved_inside(axes):
    """The collectives in the loops of a step on a mesh."""
    placement, split = on_mesh(axes, some(8, 12, D), some(V, D, seed=1))
    targets = jnp.zeros((8, 12), jnp.int32)
    step = jax.jit(jax.grad(lambda h, w: token_logprobs(h, w, targets, chunk=4, placement=placement).sum(), (0, 1)))
    text = step.lower(*split).compile().as_text() or ""
    found = [line for line in text.splitlines() if re.search(r"= .*(all-|reduce-scatter|permute)[\w-]*\(", line)]
    return [line for line in found if "while/body" in line]


def test_the_loop_sends_only_what_a_split_vocabulary_needs():
    assert not moved_inside(dict(data=2, fsdp=4))
    inside = moved_inside(dict(fsdp=4, tensor=2))
    assert inside and not [line for line in inside if f"{V // 2},{D}" in line]  # never the head or its gradient


def test_bad_shapes_and_arguments_are_refused():
    h, w, t = some(B, T, D), some(V, D), some_targets()
    with refuses(naming="(16, 40)"):
        token_logprobs(h, w.T, t)
    with refuses(naming="(4, 10)"):
        token_logprobs(h, w, t[:, 1:])
    with refuses("chunk"):
        token_logprobs(h, w, t, chunk=0)
    with refuses("teacher", RecipeError, naming="39"):
        token_divergence(h, w, h, w[1:])
    with refuses("kind", RecipeError):
        token_divergence(h, w, h, w, kind="backward")
    with refuses("beta", RecipeError):
        token_divergence(h, w, h, w, kind="jsd", beta=1.1)
    with refuses("top_k", RecipeError, naming="40"):
        token_top_k(h, w, 0)
