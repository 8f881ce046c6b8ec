"""Paged attention of few tokens per sequence on Hopper: the kernel on a CPU and lowered, and where it is chosen."""

from __future__ import annotations

import decode_warps
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dovetail.core.types import Paged
from dovetail.ops import dispatch
from dovetail.ops.kernels.gpu import decode
from dovetail.ops.paged import paged_attention as reference
from dovetail.ops.paged import round_rows

pytestmark = pytest.mark.slow


def step(counts: list[int], lengths: list[int], page: int) -> tuple[Paged, np.ndarray]:
    """Return the context of a step with a row of padding, and which slots of its pages are in use."""
    rows, width = len(counts) + 1, -(-max(lengths) // page)
    tables = np.random.default_rng(0).permutation(rows * width).reshape(rows, width)
    cu, lens = np.full(rows + 1, sum(counts)), np.zeros(rows)
    cu[: len(counts) + 1], lens[: len(lengths)] = np.cumsum([0, *counts]), lengths
    used = np.zeros((rows * width, page), bool)
    for row, length in enumerate(lengths):
        at = np.arange(length)
        used[tables[row, at // page], at % page] = True
    return Paged(*(jnp.asarray(x, jnp.int32) for x in (tables, lens, cu, [len(counts)]))), used


def both(heads, counts, lengths, page, splits, options, dtype) -> tuple[jax.Array, jax.Array]:
    """Return what the kernel computes over pages with NaN in unused slots, and the reference."""
    N, K, H = heads
    ctx, used = step(counts, lengths, page)
    rng = np.random.default_rng(1)
    q = jnp.asarray(rng.standard_normal((sum(counts), N, H)), jnp.bfloat16)
    pages = jnp.asarray(rng.standard_normal((*used.shape, 2 * K, H)), dtype).astype(jnp.float32)
    options = {key: jnp.asarray(x, jnp.float32) if key == "sinks" else x for key, x in options.items()}
    expected = reference(ctx, q.astype(jnp.float32), pages, scale=H**-0.5, **options)
    pages = jnp.where(used[:, :, None, None], pages, jnp.nan).astype(dtype)  # as a page's last use may have left it
    got = decode.paged_attention(ctx, q, pages, scale=H**-0.5, splits=splits, **options)
    return got.astype(jnp.float32), expected


# heads, new tokens of each sequence, its length after them, tokens of a page, parts, options
CASES = {
    "decode": ((8, 2, 64), [1, 1], [130, 40], 16, 1, {}),
    "parts": ((8, 2, 128), [1, 1], [200, 40], 32, 2, {"window": 70, "softcap": 5.0, "sinks": np.arange(8) / 4}),
    "drafts": ((6, 2, 64), [2, 5], [2, 100], 8, 3, {"sinks": np.ones(6)}),  # two tiles of a sequence
    "two blocks": ((12, 1, 128), [1, 1, 1], [1, 16, 145], 24, 1, {"window": 100}),
    "tokens in two blocks": ((2, 1, 64), [8, 3], [20, 120], 8, 1, {"window": 9}),
    "three blocks": ((16, 2, 128), [3, 3, 1], [3, 40, 70], 16, 1, {"window": 50}),
    "wide": ((4, 2, 256), [1, 1], [65, 300], 64, 4, {}),
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, marks=() if i % 2 == j else pytest.mark.thorough)
        for i, name in enumerate(CASES)
        for j, dtype in enumerate((jnp.float8_e4m3fn, jnp.bfloat16))
    ],
)
def test_the_kernel_equals_the_reference(monkeypatch, name, dtype):
    monkeypatch.setattr(decode, "_call_warps", decode_warps.call_warps)
    monkeypatch.setattr(decode, "_join_parts", decode._join_parts.__wrapped__)
    monkeypatch.setattr(decode, "launch", decode_warps.launch)
    got, expected = both(*CASES[name], dtype)
    np.testing.assert_allclose(got, expected, atol=0.01)


def test_keys_in_parts_fill_the_chip():
    # sequences x key heads, keys, programs at once: parts
    cases = {
        **{(8, 1 << 15, 528): 64, (8, 4608, 528): 24, (128, 7000, 528): 12, (256, 2048, 528): 4, (256, 300, 528): 1},
        **{(512, 1 << 15, 528): 1, (512, 2048, 396): 3, (600, 2048, 528): 4, (4096, 640, 396): 1},
    }
    assert {case: decode._splits(*case) for case in cases} == cases


def test_tiles_of_drafts_fit_into_registers():
    # tokens, sequences, query heads of a key head, dims: tokens of a tile
    cases = {
        **{(64, 64, 4, 128): 4, (192, 64, 4, 128): 4, (320, 64, 4, 128): 5, (512, 64, 4, 128): 6},
        **{(192, 64, 8, 128): 3, (320, 64, 8, 128): 3, (448, 64, 8, 128): 0, (192, 64, 8, 64): 3},
        **{(64, 64, 16, 128): 1, (192, 64, 16, 128): 0, (64, 64, 4, 256): 2, (64, 64, 32, 128): 0},
    }
    assert {case: decode._tokens_of_tile(*case) for case in cases} == cases


@pytest.mark.parametrize(("heads", "dtype"), [((8, 2, 128), "bfloat16"), ((16, 2, 64), "float8_e4m3fn")])
def test_the_kernel_lowers_for_a_gpu(heads, dtype):
    N, K, H = heads
    ctx, used = step([3, 1], [40, 200], 16)
    q, pages = (jax.ShapeDtypeStruct(s, t) for s, t in (((4, N, H), jnp.bfloat16), ((*used.shape, 2 * K, H), dtype)))
    options = dict(scale=0.1, window=300, softcap=30.0, splits=2)
    run = jax.jit(lambda ctx, q, pages: decode.paged_attention(ctx, q, pages, **options))
    text = run.trace(ctx, q, pages).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.custom_call @mosaic_gpu") == 2  # the parts are joined by a kernel too


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({}, "mosaic_decode"),
        ({"pages": jnp.float8_e4m3fn}, "mosaic_decode"),
        ({"pages": jnp.int8}, "reference"),
        ({"triton": True}, "mosaic_decode"),
        ({"triton": True, "pages": jnp.int8}, "triton"),
        ({"triton": True, "heads": 256}, "triton"),  # more query heads of a key head than a tile has columns
        ({"heads": 256}, "reference"),
        ({"hopper": False}, "reference"),
        ({"tokens": 57}, "reference"),  # more than 8 per sequence
        ({"dim": 32}, "reference"),
        ({"page": 12}, "reference"),
        ({"dtype": jnp.float32}, "reference"),
        ({"block_mask": True}, "reference"),
    ],
)
def test_dispatch_takes_the_kernel_for_few_tokens_on_hopper(change, name, monkeypatch):
    usual = {"tokens": 56, "dim": 128, "page": 16, "dtype": jnp.bfloat16, "block_mask": False, "hopper": True}
    case = usual | {"triton": False, "pages": None, "heads": 32} | change
    monkeypatch.setattr(dispatch, "has_triton", lambda: case["triton"])
    monkeypatch.setattr(dispatch, "is_hopper", lambda: case["hopper"])
    monkeypatch.setattr(dispatch, "has_fp8", lambda: True)
    q = jax.ShapeDtypeStruct((case["tokens"], case["heads"], case["dim"]), case["dtype"])
    pages = jax.ShapeDtypeStruct((64, case["page"], 16, case["dim"]), case["dtype"])
    if case["pages"]:
        pages = jax.eval_shape(lambda x: round_rows(x, jnp.dtype(case["pages"])), pages)
    tables = jax.ShapeDtypeStruct((7, 64), jnp.int32)
    got = dispatch.choose_paged("cuda", q, 8, tables=tables, pages=pages, block_mask=case["block_mask"])
    assert got == name and dispatch.paged_kernel(got).__module__.endswith("decode" if "decode" in name else "paged")
