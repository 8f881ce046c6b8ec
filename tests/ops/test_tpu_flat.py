"""Our TPU kernel over flat pages, interpreted, against the reference."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from corners import corners
from jax.experimental.pallas import tpu as pltpu

from dovetail.core.types import Paged
from dovetail.ops.kernels.tpu import needs
from dovetail.ops.kernels.tpu.paged import flat_attention as kernel
from dovetail.ops.latent import _read_latents
from dovetail.ops.paged import flat_attention, paged_attention, write_heads, write_latents

pytestmark = pytest.mark.slow  # the interpreter takes its time
PAGE, PAGES = 16, 6

# (new tokens of each sequence, its length after them, room for tokens, room for sequences)
BATCHES = {
    "decode": ([1, 1, 1], [5, 90, 33], 4, 4),
    "mixed": ([20, 1, 0, 40], [20, 90, 33, 60], 80, 6),
    "chunks of long sequences": ([20, 1, 3], [50, 90, 33], 32, 4),
    "nobody": ([], [], 8, 2),
}
ALL = dict(window=9, softcap=3.0, sinks=True)

# (batch, query heads, key heads, head dim, options, dtype): every head dim, batch and option with several others
CASES = [
    ("decode", 4, 2, 64, {}, "float32"),
    ("mixed", 4, 2, 64, ALL, "float32"),
    ("chunks of long sequences", 8, 1, 64, dict(sinks=True), "bfloat16"),
    ("chunks of long sequences", 6, 3, 80, dict(window=20), "float32"),
    ("decode", 6, 3, 80, ALL, "bfloat16"),
    ("mixed", 3, 3, 96, dict(softcap=3.0), "float32"),
    ("decode", 6, 6, 128, dict(sinks=True), "float32"),
    ("mixed", 20, 10, 128, dict(window=9), "bfloat16"),
    ("decode", 8, 8, 256, {}, "bfloat16"),
    ("chunks of long sequences", 2, 1, 256, ALL, "float32"),
    ("mixed", 6, 2, 32, dict(window=30), "float32"),
    ("nobody", 4, 2, 64, {}, "float32"),
]

LATENTS = ("mixed", "bfloat16")


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch):
    """Of two pages, so that a sequence has several."""
    monkeypatch.setattr(needs, "KEYS", 2 * PAGE)


def context(name: str, rng) -> tuple[Paged, int]:
    counts, lengths, tokens, rows = BATCHES[name]
    tables = rng.permutation(rows * PAGES + 2)[: rows * PAGES].reshape(rows, PAGES)
    cu, lens = np.full(rows + 1, sum(counts)), np.zeros(rows)
    cu[: len(counts) + 1], lens[: len(lengths)] = np.cumsum([0, *counts]), lengths
    return Paged(*(jnp.asarray(x, jnp.int32) for x in (tables, lens, cu, [len(counts)]))), tokens


def written(ctx: Paged, write, width: int, *shape: int, dtype, rng) -> jax.Array:
    """Return flat pages with random numbers for every token of every sequence, and NaN elsewhere."""
    whole = Paged(ctx.block_tables, ctx.kv_lens, jnp.pad(jnp.cumsum(ctx.kv_lens), (1, 0)), ctx.num_seqs)
    pages = jnp.full((ctx.block_tables.size + 2, PAGE, width), jnp.nan, dtype)
    return write(whole, pages, lambda: jnp.asarray(rng.standard_normal((int(ctx.kv_lens.sum()) + 1, *shape)), dtype))


@pytest.mark.parametrize("name, N, K, H, extras, dtype", corners(CASES, [CASES[1], CASES[3]]))
def test_equals_the_reference(name, N, K, H, extras, dtype):
    rng = np.random.default_rng(0)
    ctx, tokens = context(name, rng)
    pages = written(
        ctx, lambda ctx, pages, new: write_heads(ctx, pages, new(), new()), needs.whole(2 * K * H), K, H,
        dtype=dtype, rng=rng,
    )  # fmt: skip
    q = jnp.asarray(rng.standard_normal((tokens, N, H)), dtype)
    options = dict(scale=0.2, **extras)
    if extras.get("sinks"):
        options["sinks"] = jnp.asarray(rng.standard_normal(N), jnp.float32)
    expected = flat_attention(ctx, q, pages, rows=2 * K, **options)
    got = kernel(ctx, q, pages, kv_heads=K, interpret=pltpu.InterpretParams(), **options)
    check(got, expected, ctx, dtype)


@pytest.mark.parametrize("name, dtype", corners([("decode", "float32"), LATENTS], [LATENTS]))
def test_latents(name, dtype):
    rng = np.random.default_rng(0)
    N, rank, rope = 4, 96, 32
    ctx, tokens = context(name, rng)
    pages = written(
        ctx, lambda ctx, pages, new: write_latents(ctx, pages, new()), needs.whole(rank + rope), rank + rope,
        dtype=dtype, rng=rng,
    )  # fmt: skip
    q = jnp.asarray(rng.standard_normal((tokens, N, rank + rope)), dtype)
    read = functools.partial(_read_latents, rank=rank)
    expected = flat_attention(ctx, q, pages, rows=1, read=read, scale=0.2)
    got = kernel(ctx, q, pages, kv_heads=1, rank=rank, scale=0.2, interpret=pltpu.InterpretParams())
    assert got.shape == (tokens, N, rank)
    check(got, expected, ctx, dtype)


def test_flat_pages_have_the_content_of_others():
    rng = np.random.default_rng(0)
    ctx, tokens = context("mixed", rng)
    k, v, q = (jnp.asarray(rng.standard_normal((tokens, heads, 48)), jnp.float32) for heads in (2, 2, 4))
    flat = write_heads(ctx, jnp.zeros((ctx.block_tables.size + 2, PAGE, 256)), k, v)
    heads = write_heads(ctx, jnp.zeros((ctx.block_tables.size + 2, PAGE, 4, 48)), k, v)
    np.testing.assert_array_equal(flat[..., :192].reshape(heads.shape), heads)
    assert not flat[..., 192:].any()
    np.testing.assert_array_equal(
        flat_attention(ctx, q, flat, rows=4, scale=0.2), paged_attention(ctx, q, heads, scale=0.2)
    )


def check(got: jax.Array, expected: jax.Array, ctx: Paged, dtype: str) -> None:
    count = int(ctx.cu_q_lens[ctx.num_seqs[0]])
    limit = 2e-6 if dtype == "float32" else 2e-2
    np.testing.assert_allclose(
        np.asarray(got[:count], np.float32), np.asarray(expected[:count], np.float32), atol=limit, rtol=limit
    )
