"""Test that our pages and contexts match upstream's TPU kernel, by its own reference."""

from __future__ import annotations

import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ref_ragged_paged_attention
from ops.test_paged_kernel import BATCHES, arrays

from dovetail.ops.paged import paged_attention

pytestmark = pytest.mark.slow

USABLE = [name for name, (new, *_) in BATCHES.items() if min(new) > 0]  # upstream takes no sequence without a new token


@pytest.mark.parametrize("extras", [{}, dict(window=9), dict(softcap=3.0)], ids=str)
@pytest.mark.parametrize("name", USABLE)
def test_equals_upstreams_reference(name, extras):
    ctx, q, pages, _, count = arrays(name)
    expected = ref_ragged_paged_attention(
        q[:count], pages, ctx.kv_lens, ctx.block_tables, ctx.cu_q_lens, ctx.num_seqs, sm_scale=0.2,
        sliding_window=extras.get("window"), soft_cap=extras.get("softcap"),
    )  # fmt: skip
    got = paged_attention(ctx, q, pages, scale=0.2, **extras)
    np.testing.assert_allclose(got[:count], expected, atol=2e-5)
