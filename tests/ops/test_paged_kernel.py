"""The NVIDIA paged kernel, interpreted, against the reference."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from described import a_device

from dovetail.core.types import Paged
from dovetail.ops.kernels.gpu.paged import paged_attention as kernel
from dovetail.ops.paged import paged_attention as reference
from dovetail.ops.paged import round_rows

N, K, H, PAGE, PAGES = 6, 2, 32, 8, 12

# (new tokens of each sequence, its length after them, room for tokens, room for sequences)
BATCHES = {
    "decode": ([1, 1, 1], [5, 90, 33], 4, 4),
    "mixed": ([20, 1, 0, 40], [20, 90, 33, 60], 80, 6),
    "chunks of long sequences": ([20, 1, 3], [50, 90, 33], 32, 4),
}


def arrays(name: str):
    rng = np.random.default_rng(0)
    counts, lengths, tokens, rows = BATCHES[name]
    tables = rng.permutation(rows * PAGES + 2)[: rows * PAGES].reshape(rows, PAGES)
    cu, lens = np.full(rows + 1, sum(counts)), np.zeros(rows)
    cu[: len(counts) + 1], lens[: len(lengths)] = np.cumsum([0, *counts]), lengths
    ctx = Paged(*(jnp.asarray(x, jnp.int32) for x in (tables, lens, cu, [len(counts)])))
    q = jnp.asarray(rng.standard_normal((tokens, N, H)), jnp.float32)
    pages = jnp.asarray(rng.standard_normal((rows * PAGES + 2, PAGE, 2 * K, H)), jnp.float32)
    return ctx, q, pages, jnp.asarray(rng.standard_normal(N), jnp.float32), sum(counts)


@pytest.mark.slow  # the interpreter takes its time
@pytest.mark.parametrize(
    "extras, splits",
    [pytest.param(False, 1, marks=pytest.mark.thorough), (True, 4)],
    ids=["plain", "all options, in parts"],
)
@pytest.mark.parametrize("name", BATCHES)
def test_equals_the_reference(name, extras, splits):
    ctx, q, pages, sinks, count = arrays(name)
    options = dict(scale=0.2, window=9, sinks=sinks, softcap=3.0) if extras else dict(scale=0.2)
    expected = jax.jit(functools.partial(reference, **options))(ctx, q, pages)
    got = kernel(ctx, q, pages, splits=splits, block=16, interpret=True, **options)
    np.testing.assert_allclose(got[:count], expected[:count], atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("decode", "float8_e4m3fn"), ("decode", "int8"), ("chunks of long sequences", "int8")],
)
def test_rounded_pages(name, dtype):
    ctx, q, pages, sinks, count = arrays(name)
    pages = jax.jit(round_rows, static_argnums=1)(pages, jnp.dtype(dtype))
    options: dict[str, Any] = dict(scale=0.2, sinks=sinks, softcap=3.0 if name == "decode" else None)
    expected = jax.jit(functools.partial(reference, **options))(ctx, q, pages)
    got = kernel(ctx, q, pages, splits=2, block=16, interpret=True, **options)
    np.testing.assert_allclose(got[:count], expected[:count], atol=2e-6)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int8"])
def test_rounded_pages_lower_for_a_gpu(dtype):
    ctx, *_ = arrays("decode")
    q, pages = jax.ShapeDtypeStruct((4, 8, 64), jnp.bfloat16), jax.ShapeDtypeStruct((50, PAGE, 4, 64), jnp.bfloat16)
    pages = jax.eval_shape(lambda x: round_rows(x, jnp.dtype(dtype)), pages)
    run = jax.jit(lambda ctx, q, pages: kernel(ctx, q, pages, scale=0.1))
    with a_device("cuda"):
        assert "paged_attention_decode" in run.trace(ctx, q, pages).lower(lowering_platforms=("cuda",)).as_text()
