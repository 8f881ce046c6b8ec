"""Paged attention of few new tokens per sequence for Hopper: decode, and the verification of drafts.

New tokens are split into tiles of one sequence, and the keys of a tile into parts, so that few sequences with long
pasts fill the chip; decode_kernel.py computes a part. Parts and sinks are joined by XLA.

T tokens, I tiles of R tokens, N query heads, K key heads, H head dim, G = N / K, G' the power of two at or above it;
C = R * G' columns of a tile, at least 8.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dovetail.core.types import Paged
from dovetail.ops.kernels.gpu.decode_kernel import HIDDEN, KEYS, LOG2E, DecodeShape, attend_part
from dovetail.ops.paged import tile_of_token, tiles_of

FEW = 8  # tokens of a sequence: more are left to the kernel for prompts
MAX_COLUMNS = 64
PROGRAMS = 2 * 132  # that run at once on an H100 or H200
MAX_SPLITS = 64
LEAST_KEYS = 4 * KEYS  # of a part


def why_not_decode(q: Any, pages: Any, num_seqs: int, block_mask: bool) -> str | None:
    """Return why the kernel cannot run for queries [T, N, H], or None."""
    (T, N, H), K, page = q.shape, pages.shape[2] // 2, pages.shape[1]
    if q.dtype != jnp.bfloat16 or pages.dtype not in (jnp.bfloat16, jnp.float8_e4m3fn):
        # a row of int8 has 4 bytes for its scale: the next one begins at no multiple that a copy in tiles can have
        return f"{q.dtype} with pages of {pages.dtype}, not bf16 with bf16 or fp8"
    if H not in (64, 128, 256):
        return f"heads of {H} dims, not 64, 128 or 256"
    if page % 8 or (KEYS % page and page % KEYS):
        return f"pages of {page} tokens"
    if FEW * num_seqs < T or pl.next_power_of_2(N // K) > MAX_COLUMNS:
        return "more rows than a tile has"
    return "a block mask" if block_mask else None


def paged_attention(
    ctx: Paged,
    q: jax.Array,  # [T, N, H]
    pages: jax.Array,  # [P, page, 2K, H], bf16 or fp8
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    splits: int | None = None,
) -> jax.Array:
    """Attend as ops.paged.paged_attention does; the output of padding is undefined."""
    (T, N, H), K = q.shape, pages.shape[2] // 2
    G, num_seqs = N // K, ctx.kv_lens.shape[0]
    group = pl.next_power_of_2(G)
    R = 1 if num_seqs >= T else min(FEW, MAX_COLUMNS // group)
    seq, first, count, position = tiles_of(ctx, T, R)
    columns = max(8, R * group)
    splits = splits or _splits(len(seq) * K, ctx.block_tables.shape[1] * pages.shape[1])
    scale = scale * LOG2E if softcap is None else scale / softcap
    shape = DecodeShape(K, H, columns, group, pages.shape[1], splits, scale, window, softcap)
    dtype = jnp.float16 if pages.dtype == jnp.float8_e4m3fn else q.dtype  # what a Hopper GPU converts e4m3 to
    rows = q[jnp.minimum(first[:, None] + jnp.arange(R), T - 1)].reshape(-1, R, K, G, H).transpose(0, 2, 1, 3, 4)
    rows = jnp.pad(rows, ((0, 0),) * 3 + ((0, group - G), (0, 0))).reshape(-1, K, R * group, H)
    rows = jnp.pad(rows, ((0, 0), (0, 0), (0, columns - R * group), (0, 0))).reshape(-1, H).astype(dtype)
    flat = pages.reshape(-1, pages.shape[2] * pages.shape[3])
    tiles = jnp.stack([seq, count, position], axis=1)
    out, top, total = _call(tiles, ctx.block_tables, rows, flat, shape=shape)

    def per_token(x: jax.Array) -> jax.Array:
        """Return [splits, T, N, ..] of [splits * I * K, .., C]."""
        x = jnp.moveaxis(x.reshape(splits, -1, K, *x.shape[1:]), -1, 3)[:, :, :, : R * group]
        x = x.reshape(splits, -1, K, R, group, *x.shape[4:])[:, :, :, :, :G]
        x = x.swapaxes(2, 3).reshape(splits, -1, R, N, *x.shape[5:])
        return x[:, :, 0] if R == 1 else x[(slice(None), *tile_of_token(ctx, T, R))]

    if splits == 1 and sinks is None:
        return per_token(out)[0]
    return _join(per_token(out), per_token(top), per_token(total), sinks).astype(q.dtype)


def _splits(programs: int, max_keys: int) -> int:
    """Return enough parts to fill the chip twice over, each with some keys: joining them takes time too."""
    return max(1, min(-(-2 * PROGRAMS // programs), max_keys // LEAST_KEYS, MAX_SPLITS))


def _join(out: jax.Array, top: jax.Array, total: jax.Array, sinks: jax.Array | None) -> jax.Array:
    """Join parts [splits, T, N, H] by their maxima (in base 2) and sums [splits, T, N]; sinks add to the sums alone."""
    most = top.max(axis=0)
    sink = jnp.full(most.shape[1:], HIDDEN) if sinks is None else sinks.astype(jnp.float32) * LOG2E
    most = jnp.maximum(most, sink)
    weights = total * jnp.exp2(top - most)
    whole = weights.sum(axis=0) + jnp.exp2(sink - most)
    return jnp.einsum("stn,stnh->tnh", weights / whole, out.astype(jnp.float32))


@functools.partial(jax.jit, static_argnames="shape")  # traced once for all layers of a model
def _call(tiles: jax.Array, tables: jax.Array, q: jax.Array, pages: jax.Array, *, shape: DecodeShape) -> tuple:
    """Run the kernel on tiles [I, 3] of sequence, count and position, and queries [I * K * C, H]."""
    items = len(tiles) * shape.kv_heads
    parts = items * shape.splits
    # the parts' own dtype: rounded once more only if there is nothing to join
    dtype = jnp.bfloat16 if shape.splits == 1 else jnp.float32
    stats = jax.ShapeDtypeStruct((parts, shape.columns), jnp.float32)
    return plgpu.kernel(
        functools.partial(attend_part, shape=shape, dtype=q.dtype),
        out_type=[jax.ShapeDtypeStruct((parts, shape.dim, shape.columns), dtype), stats, stats],
        grid=(items, shape.splits),  # the heads of a page lie side by side and are read together
        grid_names=("item", "split"),
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup, reduction_scratch_bytes=2048
        ),
    )(tiles, tables, q, pages)
