"""Ragged paged attention for NVIDIA GPUs, in Pallas (Triton): prefill, chunks and decode over one pool in one launch.

A program takes a tile of one sequence's new tokens, one key head with all the query heads that share it, and a part of
the keys (`splits`: few sequences with long pasts would otherwise leave most of the chip idle); the parts are joined by
their log-sum-exp. Pages are read in place. int8 ones become the dtype of the queries in registers, and the scales of
their rows multiply scores and weights. fp8 ones become f16, to which a GPU converts e4m3 by one instruction for two
numbers; with bf16 it would take several.

T tokens, I tiles of R tokens, M = R * G' rows of a tile, N query heads, K key heads, G = N / K, G' the power of two at
or above it, H head dim.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from dovetail.core.compute import is_traced_exact
from dovetail.core.types import Paged
from dovetail.ops.packed import MASKED
from dovetail.ops.paged import tiles_of

LOG2E = math.log2(math.e)
ENOUGH = 512  # programs that fill an H200, four per multiprocessor


OPTIONS = (
    "scale", "window", "softcap", "block", "rows", "splits", "num_warps", "num_stages", "interpret",
)  # fmt: skip


@functools.partial(jax.jit, static_argnames=OPTIONS)  # equal calls are traced and lowered once
def paged_attention(
    ctx: Paged,
    q: jax.Array,  # [T, N, H]
    pages: jax.Array,  # [P, page, 2K, H], also rounded ones
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    block: int | None = None,
    rows: int | None = None,
    splits: int | None = None,
    num_warps: int | None = None,
    num_stages: int | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Attend as ops.paged.paged_attention does."""
    T, N, H = q.shape
    K = pages.shape[2] // 2
    group = 1 << (N // K - 1).bit_length()
    num_seqs = ctx.kv_lens.shape[0]
    decode = num_seqs >= T  # at most one new token a sequence
    rows = rows or _rows(decode, group, is_traced_exact(q.dtype))
    tile = 1 if decode else rows // group
    tile_seq, first, count, position = tiles_of(ctx, T, tile)
    splits = splits or _splits(tile_seq.shape[0] * K, ctx.block_tables.shape[1] * pages.shape[1], decode)
    block = block or (64 if decode else 32)
    # Unpacking takes registers that more warps lack: 512 sequences of 640 fp8 keys at 2.3 instead of 2.0 TB/s
    packed = decode and pages.dtype.itemsize == 1
    num_warps, num_stages = num_warps or (2 if packed else 4), num_stages or (3 if packed else 2)
    kernel = functools.partial(
        _kernel, N=N, K=K, page_size=pages.shape[1], rows=rows, group=group, block=block, splits=splits,
        decode=decode, scale=scale, window=window, softcap=softcap, block_mask=ctx.last_seen is not None,
    )  # fmt: skip
    out_shape = [
        jax.ShapeDtypeStruct((splits * T * N, H), jnp.float32 if splits > 1 else q.dtype),
        jax.ShapeDtypeStruct((splits * T * N,), jnp.float32),
    ]
    given = [x for x in (sinks, ctx.last_seen) if x is not None]
    out, lse = pl.pallas_call(
        kernel,
        grid=(K * tile_seq.shape[0], splits),  # heads first: those of a page lie side by side and are read together
        out_shape=out_shape,
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=num_stages),
        interpret=interpret,
        name=f"paged_attention_{'decode' if decode else 'mixed'}",
    )(
        tile_seq,
        first,
        count,
        position,
        ctx.block_tables,
        q.reshape(T * N, H),
        pages.reshape(-1, pages.shape[3]),
        *given,
    )
    parts = out.reshape(splits, T, N, H), lse.reshape(splits, T, N)
    return _join(*parts, q.dtype, interpret)


def _rows(decode: bool, group: int, exact: bool) -> int:
    """Return the rows of a tile: at least 16 for a tensor core.

    Without one, 64 would spill registers and be six times as slow.
    """
    if decode:
        return max(16, group)
    return max(32, group) if exact else 64


def _splits(programs: int, max_keys: int, decode: bool) -> int:
    """Return enough splits to fill the chip, each with some keys: joining them takes one more kernel.

    A batch may have half as many sequences as rows, and few of them long.
    """
    if not decode or programs >= ENOUGH:
        return 1
    wanted, room = 2 * ENOUGH // programs, max(1, max_keys // 192)
    return min(1 << (wanted.bit_length() - 1), 1 << (room.bit_length() - 1), 32)


def _kernel(
    seq_ref, first_ref, count_ref, position_ref, tables_ref, q_ref, pages_ref, *refs,
    N: int, K: int, page_size: int, rows: int, group: int, block: int, splits: int, decode: bool, scale: float,
    window: int | None, softcap: float | None, block_mask: bool,
):  # fmt: skip
    """Attend one tile: q [T * N, H], pages [P * page * 2K, ..], out [splits * T * N, H], all indexed by row.

    A sink takes a share of the softmax and has no value: the first part begins with it. With `block_mask`, the last of
    the given arrays is `Paged.last_seen`.
    """
    *sinks, out_ref, lse_ref = refs
    last_seen_ref = sinks.pop() if block_mask else None
    head, tile, split = pl.program_id(0) % K, pl.program_id(0) // K, pl.program_id(1)
    H, G, has_scales = q_ref.shape[1], N // K, pages_ref.shape[1] > q_ref.shape[1]
    seq, first, count, position = seq_ref[tile], first_ref[tile], count_ref[tile], position_ref[tile]
    row = jnp.arange(rows)
    offset, query_head = row // group, row % group
    real = (offset < count) & (query_head < G)
    place = (first + offset) * N + head * G + query_head
    q_pos = position + offset
    lanes = jnp.arange(H)[None, :]
    nothing = 0 if pages_ref.dtype == jnp.int8 else 0.0
    # the approximate one, of 11 bits, would be all that is left of f32
    tanh = jnp.tanh if q_ref.dtype == jnp.float32 else plgpu.approx_tanh
    q = plgpu.load(q_ref.at[place[:, None], lanes], mask=real[:, None], other=0.0)
    q = q.astype(jnp.float16) if pages_ref.dtype == jnp.float8_e4m3fn and q.dtype == jnp.bfloat16 else q
    last, reach = q_pos, count  # the last key that each row sees; the keys that the tile sees, from its first token on
    if last_seen_ref is not None:
        last = jnp.maximum(q_pos, plgpu.load(last_seen_ref.at[first + offset], mask=real, other=0))
        reach = jnp.maximum(count, jnp.where(real, last, 0).max() + 1 - position)

    begin = jnp.maximum(position - window + 1, 0) // block if window else 0
    end = pl.cdiv(position + reach, block)
    share = pl.cdiv(end - begin, splits)
    begin = begin + split * share
    end = jnp.minimum(begin + share, end)

    def step(j, carry, all_visible=False):
        top, total, out = carry
        k_pos = j * block + jnp.arange(block)
        in_use = k_pos < position + reach
        known = k_pos if all_visible else jnp.where(in_use, k_pos, 0)
        page = plgpu.load(tables_ref.at[jnp.full_like(k_pos, seq), known // page_size])
        k_row = ((page * page_size + k_pos % page_size) * (2 * K) + 2 * head)[:, None]
        masks: dict[str, Any] = {} if all_visible else dict(mask=in_use[:, None], other=nothing)
        k, v = (plgpu.load(pages_ref.at[k_row + i, lanes], **masks).astype(q.dtype) for i in (0, 1))
        scores = plgpu.dot(q, k.T) * (scale * LOG2E if softcap is None else scale / softcap)
        if has_scales:
            scores = scores * _scales(pages_ref, k_row, H, masks)[None, :]
        if softcap is not None:
            scores = tanh(scores) * (softcap * LOG2E)
        distance = q_pos[:, None] - k_pos[None, :]
        visible = distance >= 0 if last_seen_ref is None else k_pos[None, :] <= last[:, None]
        visible = visible & (distance < window) if window else visible
        scores = scores if all_visible else jnp.where(visible, scores, MASKED)
        new_top = jnp.maximum(top, scores.max(axis=1))
        weights = jnp.exp2(scores - new_top[:, None])
        weights = weights if all_visible else jnp.where(visible, weights, 0.0)
        shrink = jnp.exp2(top - new_top)
        total = total * shrink + weights.sum(axis=1)
        if has_scales:
            weights = weights * _scales(pages_ref, k_row + 1, H, masks)[None, :]
        out = out * shrink[:, None] + plgpu.dot(weights.astype(v.dtype), v)
        return new_top, total, out

    top, total = jnp.full((rows,), MASKED, jnp.float32), jnp.zeros((rows,), jnp.float32)
    if sinks:
        has_sink = real & (split == 0)
        sink = plgpu.load(sinks[0].at[head * G + query_head], mask=has_sink, other=0.0).astype(jnp.float32)
        top, total = jnp.where(has_sink, sink * LOG2E, top), jnp.where(has_sink, 1.0, total)
    carry = top, total, jnp.zeros((rows, H), jnp.float32)
    if not decode and window is None:  # a prompt's earlier keys, most of them, need no masks
        seen_by_all = jnp.minimum((position + 1) // block, end)
        carry = lax.fori_loop(begin, seen_by_all, functools.partial(step, all_visible=True), carry)
        begin = jnp.maximum(begin, seen_by_all)
    top, total, out = lax.fori_loop(begin, end, step, carry)
    seen = total > 0
    out = out / jnp.where(seen, total, 1.0)[:, None]
    lse = jnp.where(seen, top / LOG2E + jnp.log(jnp.where(seen, total, 1.0)), MASKED)
    place = jnp.where(real, split * q_ref.shape[0] + place, out_ref.shape[0])  # nowhere: no two rows share a place
    plgpu.store(out_ref.at[place[:, None], lanes], out.astype(out_ref.dtype), mask=real[:, None])
    plgpu.store(lse_ref.at[place], lse, mask=real)


def _scales(pages_ref, rows: jax.Array, H: int, masks: dict[str, Any]) -> jax.Array:
    """Return the scales of rows [block, 1] of int8: the four bytes that follow their values."""
    byte = jnp.arange(4)[None, :]
    found = plgpu.load(pages_ref.at[rows, H + byte], **masks).astype(jnp.int32) & 255
    return lax.bitcast_convert_type((found << (8 * byte)).sum(axis=1), jnp.float32)


def _join(out: jax.Array, lse: jax.Array, dtype: Any, interpret: bool) -> jax.Array:
    """Join parts [splits, T, N, H], weighted by their share of the softmax."""
    splits, T, N, H = out.shape
    if splits == 1:
        return out[0]
    return pl.pallas_call(
        functools.partial(_join_kernel, splits=splits),
        grid=(T * N,),
        out_shape=jax.ShapeDtypeStruct((T * N, H), dtype),
        compiler_params=plgpu.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="join_parts",
    )(out.reshape(-1, H), lse.reshape(-1)).reshape(T, N, H)


def _join_kernel(out_ref, lse_ref, joined_ref, *, splits: int):
    """Join one head of one token. Only parts with keys are read: tables are wide, and most pasts are short."""
    row, lanes = pl.program_id(0), jnp.arange(out_ref.shape[1])
    place = jnp.arange(splits) * (out_ref.shape[0] // splits) + row
    lse = plgpu.load(lse_ref.at[place])
    weights = jnp.exp(lse - lse.max())
    seen = (lse > MASKED)[:, None]
    parts = plgpu.load(out_ref.at[place[:, None], lanes[None, :]], mask=seen, other=0.0)
    joined = (parts * (weights / weights.sum())[:, None]).sum(axis=0)
    plgpu.store(joined_ref.at[row, lanes], joined.astype(joined_ref.dtype))
