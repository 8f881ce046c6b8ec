"""Which shapes the small kernels in Mosaic GPU take on Hopper; others are left to those in Triton.

The limits are measured: `benchmarks/small_kernels.py` on an H200, the table in docs/performance.md. Each function
returns the shapes that are left to Triton in words, or None.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

LANES = 128  # of a warpgroup: its threads hold a row, each as many of its numbers
NORM_DIM, NORM_TOKENS = 1024, 1024  # a longer row takes one warpgroup longer than Triton's warps, unless many run
STORE_TOKENS, STORE_HEADS, STORE_DIMS = 64, 4, (128, 256)


def why_not_norm(x: Any) -> str | None:
    """Return why the add and RMS norm of x [T, D] is left to Triton, or None."""
    (tokens, dim), few = x.shape, f"fewer than {NORM_TOKENS:,} tokens of more than {NORM_DIM:,} dims"
    return why_not_row(x) or (few if dim > NORM_DIM and tokens < NORM_TOKENS else None)


def why_not_store(qkv: Any, kv_heads: int) -> str | None:
    """Return why rotation and store of qkv [T, N + 2K, H] are left to Triton, or None."""
    tokens, heads, dim = qkv.shape
    if tokens < STORE_TOKENS:
        return f"fewer than {STORE_TOKENS} tokens"
    if qkv.dtype != jnp.bfloat16:
        return f"{qkv.dtype}"
    if kv_heads % STORE_HEADS or (heads - 2 * kv_heads) % STORE_HEADS:
        return f"numbers of heads that are not multiples of {STORE_HEADS}"
    return None if dim in STORE_DIMS else f"heads of {dim} dims"


def why_not_row(x: Any) -> str | None:
    """Return why rows [.., columns] do not fit into the registers of a warpgroup, or None."""
    if x.dtype not in (jnp.bfloat16, jnp.float32):
        return f"{x.dtype}"
    return f"rows of {x.shape[-1]:,}, not a multiple of {LANES}" if x.shape[-1] % LANES else None
