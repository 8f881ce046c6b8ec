"""Paged attention of prompts for Hopper: steps with several new tokens of a sequence.

New tokens are split into tiles of one sequence. A work item is a tile with up to 8 query heads that share a key head;
see prompt_kernel.py for how it is computed.

T tokens, I tiles, N query heads, K key heads, H head dim; W query heads of a work item.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from dovetail.core.types import Paged
from dovetail.ops.kernels.gpu.prompt_items import ALIGNED, GROUPS, KEYS, ROWS, PromptShape, sorted_tiles
from dovetail.ops.kernels.gpu.prompt_kernel import LOG2E, attend_items

MULTIPROCESSORS = 132  # of an H100 and an H200


def why_not_prompt(q: Any, pages: Any, block_mask: bool) -> str | None:
    """Return why the kernel cannot run for queries [T, N, H], or None."""
    (T, _, H), page = q.shape, pages.shape[1]
    if q.dtype not in (jnp.bfloat16, jnp.float16) or pages.dtype != q.dtype:
        return f"{q.dtype} with pages of {pages.dtype}, not bf16 or f16"
    if H not in (64, 128):
        return f"heads of {H} dims, not 64 or 128"
    if page % 8 or (KEYS % page and page % KEYS):
        return f"pages of {page} tokens"
    if T < ROWS or T % ALIGNED:
        return f"{T} tokens, not a multiple of {ALIGNED} from {ROWS} on"
    return "a block mask" if block_mask else None


def paged_attention(
    ctx: Paged,
    q: jax.Array,  # [T, N, H]
    pages: jax.Array,  # [P, page, 2K, H]
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Attend as ops.paged.paged_attention does; the output of padding is undefined."""
    T, N, H = q.shape
    K = pages.shape[2] // 2
    W = math.gcd(N // K, 8)
    scale = scale * LOG2E if softcap is None else scale / softcap
    shape = PromptShape(W, N // W, N // K // W, H, pages.shape[1], scale, window, softcap)
    tiles = sorted_tiles(ctx, T, GROUPS * shape.tokens)
    given = [] if sinks is None else [sinks.astype(jnp.float32)]
    rows = q.reshape(T, N * H), pages.reshape(-1, 2 * K * H)
    return _call(*tiles, ctx.block_tables, *rows, *given, shape=shape, programs=_multiprocessors()).reshape(q.shape)


@functools.partial(jax.jit, static_argnames=("shape", "programs"))  # traced once for all layers of a model
def _call(*arrays: jax.Array, shape: PromptShape, programs: int) -> jax.Array:
    """Run the kernel on the arrays of `prompt_kernel.attend_items`."""
    q = arrays[3]
    return plgpu.kernel(
        functools.partial(attend_items, shape=shape, dtype=q.dtype, programs=programs),
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid=(programs,),
        grid_names=("program",),
        num_threads=GROUPS + 1,
        thread_name="group",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(*arrays)


def _multiprocessors() -> int:
    """Return the number of multiprocessors of the GPU, or that of an H200 where there is none."""
    return getattr(jax.devices()[0], "core_count", None) or MULTIPROCESSORS
