"""Paged attention of few new tokens per sequence for Hopper: decode, and the verification of drafts.

New tokens are split into tiles of one sequence, and the keys of a tile into parts, so that few sequences with long
pasts fill the chip. Tiles of few columns are left to warps (decode_warp.py), others to warpgroups (decode_kernel.py).

T tokens, I tiles of R tokens, N query heads, K key heads, H head dim, G = N / K, G' the power of two at or above it;
C = R * G' columns of a tile, at least 8.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dovetail.core.types import Paged
from dovetail.ops.kernels.gpu.decode_kernel import HIDDEN, KEYS, LOG2E, DecodeShape, attend_part
from dovetail.ops.kernels.gpu.decode_keys import BLOCK, CHUNK, WarpPart, WarpShape, chunks_of
from dovetail.ops.kernels.gpu.decode_ops import Warps
from dovetail.ops.kernels.gpu.decode_warp import attend, join, skip
from dovetail.ops.kernels.gpu.mosaic.threads import WARPS, Number, launch
from dovetail.ops.paged import tile_of_token, tiles_of

FEW = 8  # tokens of a sequence: more are left to the kernel for prompts
MAX_COLUMNS = 64
# of a tile for warps: columns, and numbers [C, H] in registers; and where most sequences would have more than one tile
WARP_TILES = (16, 16 * 128), (48, 24 * 128)
WARP_BYTES = 12 * 1024  # of shared memory for a warp's keys and values: four programs share a multiprocessor
SHARED_BYTES = 227 * 1024  # of a multiprocessor
ENOUGH, MULTIPROCESSORS = 512, 132  # programs that fill an H200, and what they run on
FILL, MANY_WAVES = 0.9, 4  # of the places for programs at once; times that these are taken
MAX_SPLITS = 64
LEAST_KEYS = 192  # of a part


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
    stages: int | None = None,
    by_warps: bool = True,
) -> jax.Array:
    """Attend as ops.paged.paged_attention does; the output of padding is undefined."""
    (T, N, H), K = q.shape, pages.shape[2] // 2
    num_seqs, group = ctx.kv_lens.shape[0], pl.next_power_of_2(N // K)
    few = _tokens_of_warps(T, num_seqs, group, H)
    by_warps = by_warps and few > 0
    R = 1 if num_seqs >= T else min(FEW, few if by_warps else MAX_COLUMNS // group)
    tiles, columns = tiles_of(ctx, T, R), pl.cdiv(R * group, 8) * 8
    max_keys, parts = ctx.block_tables.shape[1] * pages.shape[1], functools.partial(_splits, len(tiles[0]) * K)
    if not by_warps:
        splits = splits or parts(max_keys, ENOUGH)
        shape = DecodeShape(K, H, columns, group, pages.shape[1], splits, scale, window, softcap)
        return _by_warpgroups(ctx, tiles, q, pages, sinks, R, shape)
    itemsize, width = pages.dtype.itemsize, ctx.block_tables.shape[1]
    stages = stages or max(2, min(WARP_BYTES // (2 * CHUNK * H * itemsize), 4))
    shape = WarpShape(T, N, K, H, columns, group, pages.shape[1], width, itemsize, 1, scale, window, softcap, stages)
    splits = splits or parts(max_keys, MULTIPROCESSORS * _programs_at_once(shape))
    shape = shape._replace(splits=splits)
    sinks = None if sinks is None else sinks.astype(jnp.float32) * LOG2E
    out, lse = _call_warps(jnp.stack(tiles, axis=1), ctx.block_tables, q, pages, sinks, shape=shape)
    return out if splits == 1 else _join_parts(out, lse, shape=shape)


def _tokens_of_warps(tokens: int, num_seqs: int, group: int, dim: int) -> int:
    """Return how many tokens a tile for warps has, or 0 if the tiles would be too many.

    Two tiles of a sequence read its keys twice, the second time from the L2 cache.
    """
    usual, most = (min(columns, sums // dim // BLOCK * BLOCK) // group for columns, sums in WARP_TILES)
    few = min(most, max(usual, pl.cdiv(tokens, num_seqs)))
    return few if 2 * few * num_seqs >= tokens else 0


def _programs_at_once(shape: WarpShape) -> int:
    """Return how many programs of warps share a multiprocessor: what its shared memory and its registers hold."""
    nbytes = 4 * WARPS * (shape.warp_words + 2 * shape.columns) + 1024
    return min(SHARED_BYTES // nbytes, 4 if shape.columns * shape.dim <= 1024 else 2)


def _splits(programs: int, max_keys: int, at_once: int) -> int:
    """Return enough parts to fill the chip, each with some keys: joining them takes one more kernel.

    A batch may have half as many sequences as rows, and few of them long. Where all programs take equally long, the
    last of those that do not run at once should not run alone.
    """
    most = max(1, min(max_keys // LEAST_KEYS, MAX_SPLITS))
    least = FILL * (3 if 4 * programs <= at_once else 2)
    for splits in range(1, most):
        waves = programs * splits / at_once
        fill = waves / math.ceil(waves)
        if waves >= MANY_WAVES or (fill >= FILL and (waves >= least or splits == 1)):
            return splits
    return most


# --- by warps ---------------------------------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames="shape")  # traced once for all layers of a model
def _call_warps(
    tiles: jax.Array, tables: jax.Array, q: jax.Array, pages: jax.Array, sinks: jax.Array | None, *, shape: WarpShape
) -> tuple[jax.Array, jax.Array]:
    """Run the warps on tiles [I, 4] of sequence, first token, count and position.

    Returns the output [T, N, H], or that of the parts [splits, T, N, H] f32, and their log-sum-exp [splits, T, N].
    """
    K, has_sinks = shape.kv_heads, sinks is not None

    def entry(tiles_ref: Any, *refs: Any) -> None:
        head, tile = lax.rem(lax.axis_index("item"), K), lax.div(lax.axis_index("item"), K)
        split, own = lax.axis_index("split"), [tiles_ref[tile, i] for i in range(4)]
        begin, end = chunks_of(own[3], own[2], split, shape)
        numbers = [head, *own, split, begin, end]

        def write(program: Any, *memory: Any) -> None:
            @plgpu.inline_mgpu(
                arg_types=([plgpu.Layout.WG_SPLAT(())] * len(numbers), [plgpu.RefType()] * (len(refs) + len(memory)))
            )
            def run(_: Any, numbers: list, refs: list) -> None:
                refs = refs if has_sinks else [*refs[:3], None, *refs[3:]]
                program(Warps(), WarpPart(*(Number(x.registers.flat[0]) for x in numbers)), refs)

            run(numbers, [*refs, *memory])  # pyright: ignore[reportCallIssue]

        sizes = WARPS * shape.warp_words, 2 * WARPS * shape.columns
        full = functools.partial(write, lambda on, part, refs: attend(on, part, refs, shape))
        run = functools.partial(pl.run_scoped, full, *[plgpu.SMEM((size,), jnp.float32) for size in sizes])
        pl.when(begin < end)(run)
        if shape.splits > 1:
            empty = functools.partial(write, lambda on, part, refs: skip(on, part, refs[5], shape))
            pl.when((begin >= end) & (own[2] > 0))(empty)

    whole = jax.ShapeDtypeStruct(q.shape, q.dtype)
    parts = jax.ShapeDtypeStruct((shape.splits, *q.shape), jnp.float32)
    lse = jax.ShapeDtypeStruct((shape.splits, *q.shape[:2]), jnp.float32)
    return plgpu.kernel(
        entry,
        out_type=[whole if shape.splits == 1 else parts, lse],
        grid=(shape.splits, len(tiles) * K),  # the heads of a page lie side by side and are read together
        grid_names=("split", "item"),  # of which the last one is the innermost
        kernel_name="decode_attention",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )(tiles, tables, q, pages, *([sinks] if has_sinks else []))


@functools.partial(jax.jit, static_argnames="shape")
def _join_parts(out: jax.Array, lse: jax.Array, *, shape: WarpShape) -> jax.Array:
    """Join parts [splits, T, N, H]."""
    rows, like = shape.tokens * shape.heads, jax.ShapeDtypeStruct(out.shape[1:], jnp.bfloat16)
    program = functools.partial(join, rows=rows, dim=shape.dim, splits=shape.splits)
    return launch("join_parts", program, [out, lse], [like], pl.cdiv(rows, WARPS), on=Warps())[0]


# --- by warpgroups ----------------------------------------------------------------------------------------------------


def _by_warpgroups(
    ctx: Paged, tiles: tuple, q: jax.Array, pages: jax.Array, sinks: jax.Array | None, R: int, shape: DecodeShape
) -> jax.Array:
    """Attend by the kernel of decode_kernel.py; XLA joins parts and sinks."""
    (T, N, H), K, group, splits = q.shape, shape.kv_heads, shape.group, shape.splits
    G = N // K
    seq, first, count, position = tiles
    shape = shape._replace(scale=shape.scale * LOG2E if shape.softcap is None else shape.scale / shape.softcap)
    dtype = jnp.float16 if pages.dtype == jnp.float8_e4m3fn else q.dtype  # what a Hopper GPU converts e4m3 to
    rows = q[jnp.minimum(first[:, None] + jnp.arange(R), T - 1)].reshape(-1, R, K, G, H).transpose(0, 2, 1, 3, 4)
    rows = jnp.pad(rows, ((0, 0),) * 3 + ((0, group - G), (0, 0))).reshape(-1, K, R * group, H)
    rows = jnp.pad(rows, ((0, 0), (0, 0), (0, shape.columns - R * group), (0, 0))).reshape(-1, H).astype(dtype)
    flat = pages.reshape(-1, pages.shape[2] * pages.shape[3])
    out, top, total = _call(jnp.stack([seq, count, position], axis=1), ctx.block_tables, rows, flat, shape=shape)

    def per_token(x: jax.Array) -> jax.Array:
        """Return [splits, T, N, ..] of [splits * I * K, .., C]."""
        x = jnp.moveaxis(x.reshape(splits, -1, K, *x.shape[1:]), -1, 3)[:, :, :, : R * group]
        x = x.reshape(splits, -1, K, R, group, *x.shape[4:])[:, :, :, :, :G]
        x = x.swapaxes(2, 3).reshape(splits, -1, R, N, *x.shape[5:])
        return x[:, :, 0] if R == 1 else x[(slice(None), *tile_of_token(ctx, T, R))]

    if splits == 1 and sinks is None:
        return per_token(out)[0]
    return _join(per_token(out), per_token(top), per_token(total), sinks).astype(q.dtype)


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
