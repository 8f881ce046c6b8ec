"""Test both attentions against a softmax in numpy, one query at a time."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dovetail.core.mesh import TRAIN, Placement, make_mesh
from dovetail.core.types import Packed, Paged
from dovetail.models.decoder import remember
from dovetail.ops.capabilities import has_tokamax
from dovetail.ops.dispatch import choose_packed
from dovetail.ops.kernels.tpu.packed import packed_attention as splash
from dovetail.ops.packed import on_mesh, packed_attention
from dovetail.ops.paged import BLOCK, paged_attention, read_heads, write_heads

pytestmark = pytest.mark.slow

N, K, H, SCALE = 4, 2, 16, 0.3
OPTIONS = {
    "causal": {},
    "window": dict(window=7),
    "soft cap": dict(softcap=2.0),
    "sinks": dict(sinks=True),
    "all": dict(window=40, softcap=3.0, sinks=True),
}


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def with_sinks(options: dict) -> dict:
    return options | dict(sinks=normal(9, N)) if options.get("sinks") else options


def one_query(q, k, v, *, window=None, softcap=None, sinks=None):
    """q [N, H] at the end of its own keys and values k, v [S, K, H]."""
    out = np.zeros((N, v.shape[-1]))
    if window:
        k, v = k[-window:], v[-window:]
    for n in range(N):
        scores = k[:, n // (N // K)] @ q[n] * SCALE
        scores = np.tanh(scores / softcap) * softcap if softcap else scores
        weights = np.exp(scores)
        total = weights.sum() + (np.exp(sinks[n]) if sinks is not None else 0)
        out[n] = weights @ v[:, n // (N // K)] / total
    return out


def rows_of(lengths: list[int], T: int):
    """Segment ids [1, T] of documents laid end to end, and each token's first key."""
    segments = np.zeros((1, T), np.int32)
    starts = np.zeros(T, int)
    at = 0
    for i, n in enumerate(lengths, 1):
        segments[0, at : at + n], starts[at : at + n] = i, at
        at += n
    return segments, starts, at


@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize("T", [50, pytest.param(1100, marks=pytest.mark.thorough)], ids=["short", "several chunks"])
def test_packed(kind, T):
    options = with_sinks(OPTIONS[kind])
    segments, starts, end = rows_of([T // 2 + 3, 5, T // 3], T)
    q, k, v = normal(0, 1, T, N, H), normal(1, 1, T, K, H), normal(2, 1, T, K, H)
    ours = jax.jit(functools.partial(packed_attention, scale=SCALE, **options))(q, k, v, Packed(jnp.asarray(segments)))
    assert np.isfinite(ours).all()
    for t in range(end):
        see = slice(starts[t], t + 1)
        np.testing.assert_allclose(ours[0, t], one_query(q[0, t], k[0, see], v[0, see], **options), atol=1e-5)


def test_packed_gradient_does_not_depend_on_chunks():
    """Two copies of a document in one long row, cut into chunks in different places: the same gradient each."""
    n = 600
    q, k, v = (np.tile(normal(i, 1, n, h, H), (1, 2, 1, 1)) for i, h in ((0, N), (1, K), (2, K)))
    ctx = Packed(jnp.asarray(rows_of([n, n], 2 * n)[0]))
    loss = lambda *qkv: jnp.sum(jnp.sin(packed_attention(*qkv, ctx, scale=SCALE, window=300)))  # noqa: E731
    for grad in jax.jit(jax.grad(loss, (0, 1, 2)))(q, k, v):
        assert jnp.std(grad) > 1e-3
        np.testing.assert_allclose(grad[:, :n], grad[:, n:], atol=1e-5)


@pytest.mark.parametrize(
    "kind, value_dim",
    [
        ("window", H),
        ("causal", H + 8),
        *(pytest.param(kind, H, marks=pytest.mark.thorough) for kind in ("causal", "soft cap")),
    ],
)
def test_splash_equals_the_reference(kind, value_dim):
    """The TPU kernel, interpreted: its outputs and gradients on two packed rows."""
    T, options = 256, OPTIONS[kind] | dict(scale=SCALE)
    q, k, v = normal(0, 2, T, N, H), normal(1, 2, T, K, H), normal(2, 2, T, K, value_dim)
    ctx = Packed(jnp.concatenate([jnp.asarray(rows_of(lengths, T)[0]) for lengths in ([100, 156], [200, 20])]))
    real = (ctx.segment_ids > 0)[..., None, None]

    def outputs_and_gradients(run):
        def loss(*qkv):
            out = run(*qkv, ctx, **options) * real
            return jnp.sum(jnp.sin(out)), out

        return jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(q, k, v)

    ours = outputs_and_gradients(functools.partial(splash, interpret=True))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4), ours, outputs_and_gradients(packed_attention)
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "axes",
    [dict(fsdp=2, tensor=2, expert=2), pytest.param(dict(tensor=4, data=2), marks=pytest.mark.thorough)],
    ids=str,
)
def test_splash_on_a_mesh(axes):
    """Each device runs the kernel on its rows and heads, also where it has fewer key heads than devices."""
    T, rows = 128, 4 if axes["tensor"] == 2 else 3  # 3 rows: nothing to split there
    q, k, v = normal(0, rows, T, N, H), normal(1, rows, T, K, H), normal(2, rows, T, K, H)
    segments = jnp.tile(rows_of([50, 70], T)[0], (rows, 1))
    ctx = Packed(segments, placement=Placement(make_mesh(axes), TRAIN))
    run = jax.jit(functools.partial(on_mesh, functools.partial(splash, interpret=True), scale=SCALE))
    np.testing.assert_allclose(run(q, k, v, ctx), packed_attention(q, k, v, ctx, scale=SCALE), atol=1e-5)


@pytest.mark.parametrize("remat, keeps", [("dots", True), ("attention", True), ("full", False)])
def test_the_output_of_splash_is_saved_for_the_backward_pass(remat, keeps):
    x, ctx = jax.ShapeDtypeStruct((1, 256, 2, H), jnp.float32), Packed(jnp.ones((1, 256), jnp.int32))
    run = remember(lambda *qkv: splash(*qkv, ctx, scale=SCALE), remat)
    pull = jax.eval_shape(lambda *qkv: jax.vjp(run, *qkv)[1], x, x, x)
    denominators = (1, 2, 1, 256)
    assert (denominators in [leaf.shape for leaf in jax.tree.leaves(pull)]) == keeps


def test_the_choice_of_a_kernel():
    q = jax.ShapeDtypeStruct((1, 1024, 8, 64), jnp.bfloat16)
    odd = jax.ShapeDtypeStruct((1, 1000, 8, 64), jnp.bfloat16)
    assert choose_packed("tpu", q, q) == "splash"
    assert choose_packed("tpu", odd, odd) == "reference"
    assert choose_packed("tpu", q, q, sinks=jnp.zeros(8)) == ("tokamax" if has_tokamax() else "reference")
    assert choose_packed("cpu", q, q) == "reference"


# ---------------------------------------------------------------------------------------------------------- paged

PAGE, POOL, WIDTH = 4, 64, 12


class Case:
    """Sequences of `past` tokens that get `new` more each, their pages shuffled in a pool otherwise full of NaN.

    Slots past the sequences hold rubbish: what is there is padding and may not matter."""

    def __init__(self, past: list[int], new: list[int], slots: int = 0, width: int = WIDTH, tokens: int = 0):
        rng = np.random.default_rng(5)
        self.past, self.new = past, new
        n, slots = len(new), slots or len(new)
        order = rng.permutation(POOL)
        tables = np.full((slots, width), 2**30, np.int32)
        lens = [p + c for p, c in zip(past, new, strict=True)]
        self.k, self.v = ([rng.normal(size=(length, K, H)).astype(np.float32) for length in lens] for _ in "kv")
        pages = np.full((POOL, PAGE, 2 * K, H), np.nan, np.float32)
        for i in range(n):
            for j in range(-(-lens[i] // PAGE)):
                tables[i, j], order = order[0], order[1:]
            for t in range(past[i]):
                pages[tables[i, t // PAGE], t % PAGE, 0::2] = self.k[i][t]
                pages[tables[i, t // PAGE], t % PAGE, 1::2] = self.v[i][t]
        self.cu = np.concatenate([[0], np.cumsum(new)])
        total = tokens or sum(new)
        self.q = normal(6, total, N, H)
        fresh = [np.full((total, K, H), np.nan, np.float32) for _ in "kv"]
        for side, out in zip((self.k, self.v), fresh, strict=True):
            for i in range(n):
                out[self.cu[i] : self.cu[i + 1]] = side[i][past[i] :]
        self.fresh, self.pages = fresh, pages
        pad = slots - n
        self.ctx = Paged(
            jnp.asarray(tables),
            jnp.asarray(lens + [7] * pad, jnp.int32),
            jnp.asarray([*self.cu, *[0] * pad], jnp.int32),
            jnp.asarray([n], jnp.int32),
        )

    def run(self, read=read_heads, **options):
        @jax.jit
        def both(ctx, q, pages, k, v):
            return paged_attention(ctx, q, write_heads(ctx, pages, k, v), read=read, scale=SCALE, **options)

        return np.asarray(both(self.ctx, self.q, self.pages, *self.fresh))

    def check(self, **options):
        out = self.run(**options)
        for i, (past, new) in enumerate(zip(self.past, self.new, strict=True)):
            for c in range(new):
                see = slice(0, past + c + 1)
                expected = one_query(self.q[self.cu[i] + c], self.k[i][see], self.v[i][see], **options)
                np.testing.assert_allclose(out[self.cu[i] + c], expected, atol=1e-5)


@pytest.mark.parametrize("kind", OPTIONS)
def test_paged_mixed_batch(kind):
    """Prefill, a later chunk, a decode, and a sequence with nothing new, in one call."""
    Case(past=[0, 9, 21, 5, 0], new=[37, 6, 1, 0, 2]).check(**with_sinks(OPTIONS[kind]))


@pytest.mark.parametrize("kind", ["causal", "all"])
def test_paged_decode(kind):
    Case(past=[3, 40, 0, 17], new=[1, 1, 1, 1]).check(**with_sinks(OPTIONS[kind]))


def test_paged_padding_slots_and_tokens_do_not_matter():
    Case(past=[5, 0, 11], new=[1, 10, 0], slots=8, tokens=20).check()
    Case(past=[5, 2], new=[1, 1], slots=8, tokens=8).check(window=4)


def test_paged_with_no_sequence_at_all():
    assert Case(past=[], new=[], slots=3, tokens=4).run().shape == (4, N, H)


def turns(case: Case, **options) -> int:
    """How many times the loop gathered pages: each turn looks at BLOCK keys of every sequence."""
    seen = []

    def counting(gather, heads):
        jax.debug.callback(lambda: seen.append(1))
        return read_heads(gather, heads)

    case.run(read=counting, **options)
    jax.effects_barrier()
    return len(seen)


def test_paged_gathers_up_to_the_longest_sequence():
    assert turns(Case(past=[BLOCK - 1, 20], new=[1, 1], width=32)) == 1
    assert turns(Case(past=[BLOCK - 1, 20], new=[1, 1], width=4096)) == 1
    assert turns(Case(past=[BLOCK, 20], new=[1, 1], width=4096)) == 2
    assert turns(Case(past=[50, 20], new=[1, 1], slots=8, tokens=8, width=4096)) == 1


def test_paged_gathers_nothing_behind_the_window():
    long = dict(past=[BLOCK + 60], new=[1], width=64)
    assert turns(Case(**long), window=8) == 1
    assert turns(Case(**long, slots=4, tokens=4), window=8) == 1, "padding made it look at the start"
