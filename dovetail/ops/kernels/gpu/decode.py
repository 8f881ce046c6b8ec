"""Paged attention of few new tokens per sequence for Hopper: decode, and the verification of drafts.

New tokens are split into tiles of one sequence, and the keys of a tile into parts, so that few sequences with long
pasts fill the chip. A program's warps attend to keys of their own (decode_warp.py).

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
from dovetail.ops.kernels.gpu.decode_keys import BLOCK, CHUNK, LOG2E, WarpPart, WarpShape, chunks_of
from dovetail.ops.kernels.gpu.decode_ops import Warps
from dovetail.ops.kernels.gpu.decode_warp import attend, join, skip
from dovetail.ops.kernels.gpu.mosaic.threads import WARPS, Number, launch
from dovetail.ops.paged import tiles_of

FEW = 8  # tokens of a sequence: more are left to the kernel for prompts
# of a tile: columns, and numbers [C, H] in registers; and where most sequences would have more than one tile
TILES = (16, 16 * 128), (48, 24 * 128)
WARP_BYTES = 12 * 1024  # of shared memory for a warp's keys and values: four programs share a multiprocessor
SHARED_BYTES = 227 * 1024  # of a multiprocessor
MULTIPROCESSORS = 132  # of an H100 or H200 (SXM)
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
    if page % 8:
        return f"pages of {page} tokens"
    if FEW * num_seqs < T or not _tokens_of_tile(T, num_seqs, pl.next_power_of_2(N // K), H):
        return "more rows than tiles have"
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
) -> jax.Array:
    """Attend as ops.paged.paged_attention does; the output of padding is undefined."""
    (T, N, H), K = q.shape, pages.shape[2] // 2
    num_seqs, group = ctx.kv_lens.shape[0], pl.next_power_of_2(N // K)
    R = 1 if num_seqs >= T else min(FEW, _tokens_of_tile(T, num_seqs, group, H))
    tiles, columns = tiles_of(ctx, T, R), pl.cdiv(R * group, 8) * 8
    itemsize, width = pages.dtype.itemsize, ctx.block_tables.shape[1]
    stages = stages or max(2, min(WARP_BYTES // (2 * CHUNK * H * itemsize), 4))
    shape = WarpShape(T, N, K, H, columns, group, pages.shape[1], width, itemsize, 1, scale, window, softcap, stages)
    most_keys, at_once = width * pages.shape[1], MULTIPROCESSORS * _programs_at_once(shape)
    splits = splits or _splits(len(tiles[0]) * K, most_keys, at_once)
    shape = shape._replace(splits=splits)
    sinks = None if sinks is None else sinks.astype(jnp.float32) * LOG2E
    out, lse = _call_warps(jnp.stack(tiles, axis=1), ctx.block_tables, q, pages, sinks, shape=shape)
    return out if splits == 1 else _join_parts(out, lse, shape=shape)


def _tokens_of_tile(tokens: int, num_seqs: int, group: int, dim: int) -> int:
    """Return how many tokens a tile has, or 0 if the tiles would be too many.

    Two tiles of a sequence read its keys twice, the second time from the L2 cache.
    """
    usual, most = (min(columns, sums // dim // BLOCK * BLOCK) // group for columns, sums in TILES)
    few = min(most, max(usual, pl.cdiv(tokens, num_seqs)))
    return few if 2 * few * num_seqs >= tokens else 0


def _programs_at_once(shape: WarpShape) -> int:
    """Return how many programs share a multiprocessor: what its shared memory and its registers hold."""
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
