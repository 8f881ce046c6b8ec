"""Paged attention on a CPU (numba) against the reference, which any kernel is held to."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from corners import corners
from later import later

from dovetail.core.types import Paged
from dovetail.ops.dispatch import choose_paged
from dovetail.ops.paged import paged_attention as reference
from dovetail.ops.paged import write_heads

paged = later("dovetail.ops.kernels.cpu.paged")
store = later("dovetail.ops.kernels.cpu.store")

pytestmark = pytest.mark.slow

PAGE = 4
# (new tokens, tokens in all) of each sequence; then tokens and rows of padding
BATCHES = {
    "decode": ([(1, 3), (1, 150), (1, 65)], 3, 4),
    "prompts": ([(70, 70), (1, 1), (33, 33)], 120, 3),
    "mixed": ([(1, 90), (40, 130), (5, 64), (17, 17)], 80, 6),
    "as many rows as tokens": ([(4, 9), (1, 1), (2, 70)], 7, 7),
    "nothing": ([], 8, 2),
}


def batch(name: str, heads: int, kv_heads: int, dim: int) -> tuple[Paged, jax.Array, jax.Array]:
    """Pages are NaN where no token was written: what must not be read shows."""
    sequences, tokens, rows = BATCHES[name]
    rng, width = np.random.default_rng(0), 40
    count = 1 + sum(-(-total // PAGE) for _, total in sequences)
    free = list(rng.permutation(count))
    tables, kv_lens = np.full((rows, width), count - 1, np.int32), np.zeros(rows, np.int32)
    cu_q_lens, pages = np.zeros(rows + 1, np.int32), np.full((count, PAGE, 2 * kv_heads, dim), np.nan, np.float32)
    for i, (new, total) in enumerate(sequences):
        mine = [free.pop() for _ in range(-(-total // PAGE))]
        tables[i, : len(mine)], kv_lens[i], cu_q_lens[i + 1 :] = mine, total, cu_q_lens[i] + new
        for at in range(total):
            pages[mine[at // PAGE], at % PAGE] = rng.normal(size=pages.shape[2:])
    q = rng.normal(size=(tokens, heads, dim)).astype(np.float32)
    ctx = Paged(*(jnp.asarray(x) for x in (tables, kv_lens, cu_q_lens, np.asarray([len(sequences)], np.int32))))
    return ctx, jnp.asarray(q), jnp.asarray(pages)


@pytest.mark.parametrize(
    "more",
    [{}, {"window": 20}, {"softcap": 2.0}, {"sinks": jnp.linspace(-1, 4, 6)}, {"window": 3, "sinks": jnp.zeros(6)}],
    ids=["plain", "window", "soft cap", "sinks", "window and sinks"],
)
@pytest.mark.parametrize("name", corners(BATCHES, ["mixed", "nothing"]))
def test_equals_the_reference(name, more):
    ctx, q, pages = batch(name, heads=6, kv_heads=2, dim=24)
    got, want = (
        jax.jit(lambda *a, f=f: f(*a, scale=0.3, **more))(ctx, q, pages) for f in (paged.paged_attention, reference)
    )
    real = int(ctx.cu_q_lens[ctx.num_seqs[0]])  # padding may hold any finite values
    np.testing.assert_allclose(got[:real], want[:real], atol=2e-6)
    assert np.isfinite(got).all()


def test_large_scores_do_not_overflow():
    ctx, q, pages = batch("mixed", heads=4, kv_heads=4, dim=16)
    got, want = (jax.jit(lambda *a, f=f: f(*a, scale=30.0))(ctx, q, pages) for f in (paged.paged_attention, reference))
    np.testing.assert_allclose(got[:63], want[:63], atol=2e-3)  # of scores in the hundreds


def test_it_is_chosen_where_a_cpu_computes_in_f32():
    q = jax.ShapeDtypeStruct((8, 6, 24), jnp.float32)
    assert choose_paged("cpu", q, 2) == "numba"
    assert choose_paged("cpu", jax.ShapeDtypeStruct(q.shape, jnp.bfloat16), 2) == "reference"


@pytest.mark.parametrize("tokens, decoding", [(1, True), (9, True), (300, True), (2, False), (4096, False)])
def test_chunks_are_few_and_of_whole_tokens_unless_few_tokens_decode(tokens, decoding):
    size = paged.chunk_of(tokens, 3, decoding)
    assert -(-3 * tokens // size) <= paged.CHUNKS
    assert size % 3 == 0 or (decoding and 3 * tokens <= paged.CHUNKS)


def test_a_layer_is_one_call():
    ctx, q, pages = batch("prompts", heads=4, kv_heads=2, dim=16)
    text = jax.jit(lambda *a: paged.paged_attention(*a, scale=0.3)).lower(ctx, q, pages).as_text()
    assert text.count(f"@{paged.NAME}") == 1


def test_a_nan_sequence_does_not_affect_others():
    ctx, q, pages = batch("mixed", heads=4, kv_heads=2, dim=16)
    first = int(ctx.block_tables[0, 0])
    got = jax.jit(lambda *a: paged.paged_attention(*a, scale=0.3))(ctx, q, pages.at[first].set(jnp.nan))
    assert np.isnan(got[0]).any() and np.isfinite(got[1:63]).all()


@pytest.mark.parametrize("name", corners(BATCHES, ["mixed", "nothing"]))
def test_written_pages_equal_those_of_the_reference(name):
    ctx, _, pages = batch(name, heads=4, kv_heads=2, dim=16)
    tokens = BATCHES[name][1]
    k, v = np.random.default_rng(1).normal(size=(2, tokens, 2, 16)).astype(np.float32)
    got, want = (jax.jit(f)(ctx, pages, k, v) for f in (store.write_heads, write_heads))
    np.testing.assert_array_equal(got, want)


def test_tokens_past_the_table_and_pages_past_the_pool_are_written_as_by_the_reference():
    """Steps of a dispatch that go on after a sequence's last token may have such tokens."""
    pages, new = jnp.zeros((3, 4, 4, 16)), jnp.ones((2, 2, 16))
    tables, kv_lens = jnp.asarray([[1, 2], [1, 7]], jnp.int32), jnp.asarray([10, 6], jnp.int32)  # two columns, 3 pages
    ctx = Paged(tables, kv_lens, jnp.asarray([0, 1, 2], jnp.int32), jnp.asarray([2], jnp.int32), platform="cpu")
    got, want = (jax.jit(f)(ctx, pages, new, new) for f in (store.write_heads, write_heads))
    np.testing.assert_array_equal(got, want)


def test_pages_that_are_donated_are_written_in_place():
    ctx, _, pages = batch("decode", heads=4, kv_heads=2, dim=16)
    new = jnp.ones((3, 2, 16), jnp.float32)
    step = jax.jit(lambda pages: store.write_heads(ctx, pages, new, new), donate_argnums=0).lower(pages).compile()
    found = step.memory_analysis()
    assert found.alias_size_in_bytes == pages.nbytes and found.temp_size_in_bytes < pages.nbytes
