"""Paged attention of prompts on Hopper: its tiles, its lowering, and when it is chosen.

The kernel itself is held to the reference by benchmarks/attention.py, on a GPU: the interpreter of jax 0.10 supports
neither the layouts nor the accumulators of its products.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dovetail.core.types import Paged
from dovetail.ops import dispatch
from dovetail.ops.kernels.gpu import prompt, prompt_items, prompt_kernel

pytestmark = pytest.mark.slow

COUNTS, LENGTHS = [300, 1, 0, 17, 5], [300, 700, 50, 40, 133]


def context() -> Paged:
    """Return a step with two rows of padding, whose contents are arbitrary."""
    arrays = np.zeros((7, 64)), [*LENGTHS, 9, 9], [*np.cumsum([0, *COUNTS]), 0, 7], [len(COUNTS)]
    tables, kv_lens, cu, num_seqs = (jnp.asarray(x, jnp.int32) for x in arrays)
    return Paged(tables, kv_lens, cu, num_seqs)


@pytest.mark.parametrize("tokens", [16, 32, 128])
def test_tiles_have_every_token_once_and_the_longest_come_first(tokens):
    tiles, count = prompt_items.sorted_tiles(context(), 328, tokens)
    rows = np.asarray(tiles)[: int(count[0])]
    starts = np.cumsum([0, *COUNTS])
    seen = []
    for seq, first, low, high, position, length in rows:
        assert first % prompt_items.ALIGNED == 0 and 0 <= low < high <= tokens and length == LENGTHS[seq]
        past = LENGTHS[seq] - COUNTS[seq]
        assert position - first == past - starts[seq]
        seen += [(seq, token) for token in range(first + low, first + high)]
    assert sorted(seen) == [(seq, starts[seq] + i) for seq, n in enumerate(COUNTS) for i in range(n)]
    keys = rows[:, 4] + rows[:, 3]
    assert (np.diff(keys) <= 0).all()


@pytest.mark.parametrize("window", [None, 300])
def test_blocks_without_a_mask_are_seen_by_all_rows_and_others_are_not_missed(window):
    tiles, count = prompt_items.sorted_tiles(context(), 328, 16)
    key = np.arange(8 * prompt_items.KEYS)
    for tile in np.asarray(tiles)[: int(count[0])]:
        item = prompt_items.PromptItem(0, *tile)
        (begin, end), (first, last) = item.blocks(window), item.unmasked(window)
        assert begin <= first <= last <= end
        rows = item.position + np.arange(item.low, item.high)[:, None]
        seen = (key <= rows) & (key > rows - (window or 1 << 30))
        seen = seen.reshape(len(rows), 8, -1)
        assert not seen[:, :begin].any() and not seen[:, end:].any()
        assert seen[:, first:last].all()


def test_there_is_room_for_the_tiles_of_sequences_that_begin_between_multiples():
    counts = [9] * 7
    arrays = np.zeros((7, 4)), counts, np.cumsum([0, *counts]), [7]
    tables, kv_lens, cu, num_seqs = (jnp.asarray(x, jnp.int32) for x in arrays)
    tiles, count = prompt_items.sorted_tiles(Paged(tables, kv_lens, cu, num_seqs), 64, 16)
    assert int(count[0]) <= tiles.shape[0]


@pytest.mark.parametrize(
    ("heads", "options"), [((8, 2, 128), {}), ((8, 1, 64), {"window": 300, "softcap": 30.0, "sinks": True})]
)
def test_the_kernel_lowers_for_a_gpu(heads, options):
    N, K, H = heads
    options = options | {"sinks": jnp.ones(N)} if "sinks" in options else options
    q, pages = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((328, N, H), (64, 16, 2 * K, H)))
    run = jax.jit(lambda ctx, q, pages: prompt.paged_attention(ctx, q, pages, scale=0.1, **options))
    assert "mosaic_gpu" in run.trace(context(), q, pages).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("scale", [64**-0.5, 128**-0.5, 30.0, 1.0])
def test_the_score_of_a_hidden_key_is_exact(scale):
    scale = np.float32(scale * prompt_kernel.LOG2E)
    hidden = np.float32(prompt_kernel.HIDDEN)
    rounded = np.float32(hidden * scale)
    # a multiply-add keeps what the product's rounding drops: exp2 of a difference of 1e22 is inf
    assert np.float64(hidden) * np.float64(scale) == np.float64(rounded)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({}, "mosaic"),
        ({"triton": True}, "mosaic"),
        ({"triton": True, "tokens": 56}, "mosaic_decode"),
        ({"triton": True, "dim": 256}, "triton"),
        ({"tokens": 56}, "mosaic_decode"),  # 8 per sequence, as in the verification of drafts
        ({"tokens": 332}, "reference"),
        ({"dim": 256}, "reference"),
        ({"page": 12}, "reference"),
        ({"dtype": jnp.float32}, "reference"),
        ({"block_mask": True}, "reference"),
        ({"hopper": False}, "reference"),
    ],
)
def test_dispatch_takes_the_kernel_for_prompts_on_hopper(change, name, monkeypatch):
    usual = {"tokens": 328, "dim": 128, "page": 16, "dtype": jnp.bfloat16, "block_mask": False, "hopper": True}
    case = usual | {"triton": False} | change
    monkeypatch.setattr(dispatch, "has_triton", lambda: case["triton"])
    monkeypatch.setattr(dispatch, "is_hopper", lambda: case["hopper"])
    q = jax.ShapeDtypeStruct((case["tokens"], 32, case["dim"]), case["dtype"])
    pages = jax.ShapeDtypeStruct((64, case["page"], 16, case["dim"]), case["dtype"])
    tables = jax.ShapeDtypeStruct((7, 64), jnp.int32)
    got = dispatch.choose_paged("cuda", q, 8, tables=tables, pages=pages, block_mask=case["block_mask"])
    assert got == name
