"""Ragged paged attention for TPUs: `paged_attention` is upstream's Pallas kernel, `flat_attention` is ours.

Upstream's takes our pages and tables unchanged. It looks up its block sizes by the device it finds, which fails when
another machine lowers for a TPU: they are given here.

Ours reads flat pages [P, page, W], where a token is one row, its heads' keys and values side by side. It is for what
upstream's kernel does not support: head dims other than multiples of 128, any number of key heads, sinks, latents, and
images whose tokens see each other.
Pages are flat because XLA stores [.., 2K, H] row by row only if 2K and H fill its tiles; otherwise it transposes the
page to save memory, and copies the whole pool for a kernel, which needs rows. Here a row is a whole number of tiles
whatever K and H are, and a head is a slice of its lanes.

Written from the published description (arXiv 2604.15464). The grid walks tiles of queries, each of one sequence. A tile
walks its keys block by block while the softmax is accumulated and the next block's pages (at its end, the next tile's
first) arrive by DMA. SMEM holds the tables of two sequences, however many there are.

I tiles of R tokens, N query heads, K key heads, G = N / K, H head dim, W width of a row, M pages a sequence may hold.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

from dovetail.core.types import Paged
from dovetail.ops.kernels.tpu.needs import LANES, MIB, Tiling, flat_vmem, room_of, tiling, tpu_kind
from dovetail.ops.packed import MASKED, cap_and_mask, is_visible
from dovetail.ops.paged import tile_of_token, tiles_of

# --- upstream's kernel ------------------------------------------------------------------------------------------------

KEYS = 256  # a turn of the kernel's loop looks at
QUERIES = 32
VMEM_BYTES = 32 * 2**20  # at most; a core of v4 has half of it, later ones at least twice as much


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
    """Attend as ops.paged.paged_attention does."""
    assert sinks is None, "choose_paged gives sinks to another"
    room = room_of(tpu_kind(None))
    pages_a_block = min(ctx.block_tables.shape[1], max(1, KEYS // pages.shape[1]))
    return ragged_paged_attention(
        q, pages, ctx.kv_lens, ctx.block_tables, ctx.cu_q_lens, ctx.num_seqs, sm_scale=scale, sliding_window=window,
        soft_cap=softcap, num_kv_pages_per_block=pages_a_block, num_queries_per_block=min(QUERIES, q.shape[0]),
        vmem_limit_bytes=min(VMEM_BYTES, room.vmem) if room else VMEM_BYTES,
    )  # fmt: skip


# --- our kernel for flat pages ----------------------------------------------------------------------------------------

USUAL_VMEM = 16 * MIB  # that XLA lets a kernel have, and all that a core of v4 has


class KernelPlan(NamedTuple):
    """Hold all static values of a call."""

    cut: Tiling
    scale: float
    window: int | None
    softcap: float | None
    has_sinks: bool
    block_mask: bool


def flat_attention(
    ctx: Paged,
    q: jax.Array,  # [T, N, H]
    pages: jax.Array,  # [P, page, W]
    *,
    kv_heads: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,  # [N]
    rank: int | None = None,  # of latents: a row is one key of H numbers for all heads, the first `rank` its value
    interpret: Any = False,
) -> jax.Array:
    """Return [T, N, H], or [T, N, rank]: each token attends to its sequence's pages up to itself, or its last seen."""
    (T, N, H), K = q.shape, kv_heads
    cut = tiling(q.shape, ctx.kv_lens.shape[0], K, pages, rank)
    seq, first, count, position = tiles_of(ctx, T, cut.tokens)
    tables = ctx.block_tables[:, None]  # [S, 1, M]: a block of it is a whole row
    tiles = _queries(q, first, cut)
    block_mask = ctx.last_seen is not None
    plan = KernelPlan(cut, scale, window, softcap, sinks is not None, block_mask)
    count, ahead = _ahead(ctx.last_seen, first, count, position, cut) if block_mask else (count, ())
    run = _call(plan, tiles, pages, tables.shape[-1], interpret)
    out = run(seq, position, count, tables, tables, _start(sinks, cut, N), tiles, pages, *ahead)
    out = out[:, :, : N // K * cut.tokens].reshape(-1, K, N // K, cut.tokens, cut.value).transpose(0, 3, 1, 2, 4)
    out = out.reshape(-1, cut.tokens, N, cut.value)[tile_of_token(ctx, T, cut.tokens)]
    return out if rank else out[..., cut.value - H :]


def _queries(q: jax.Array, first: jax.Array, cut: Tiling) -> jax.Array:
    """Map q [T, N, H] to [I, K, rows, lanes of a key]: row g R + r of a tile is head g's query of its token r."""
    (T, N, H), K, R = q.shape, len(cut.heads), cut.tokens
    token = jnp.minimum(first[:, None] + jnp.arange(R), T - 1)
    tiles = q[token].reshape(-1, R, K, N // K, H).transpose(0, 2, 3, 1, 4).reshape(-1, K, N // K * R, H)
    return jnp.pad(tiles, ((0, 0), (0, 0), (0, cut.rows - tiles.shape[2]), (0, cut.key - H)))


def _start(sinks: jax.Array | None, cut: Tiling, N: int) -> jax.Array:
    """Return the softmax's maximum before any key [K, rows, lanes]: the sinks' logits, or a minimum."""
    K = len(cut.heads)
    shape = (K, cut.rows, LANES)
    if sinks is None:
        return jnp.full(shape, MASKED, jnp.float32)
    logits = jnp.repeat(sinks.astype(jnp.float32).reshape(K, N // K), cut.tokens, axis=1)
    logits = jnp.pad(logits, ((0, 0), (0, cut.rows - logits.shape[1])))
    return jnp.broadcast_to(logits[..., None], shape)


def _ahead(last_seen, first, count, position, cut: Tiling) -> tuple[jax.Array, tuple[jax.Array]]:
    """Return the keys that each tile sees from its first token on [I], and each row's last, as far ahead of that token.

    The latter is [I, rows, lanes], the same in every lane.
    """
    offset = jnp.arange(cut.tokens)
    token = jnp.minimum(first[:, None] + offset, last_seen.shape[0] - 1)
    ahead = jnp.where(offset < count[:, None], jnp.maximum(last_seen[token] - position[:, None], offset), 0)
    reach = jnp.where(count > 0, jnp.maximum(count, ahead.max(axis=1) + 1), 0)
    rows = jnp.tile(ahead, (1, -(-cut.rows // cut.tokens)))[:, : cut.rows, None]
    return reach, (jnp.broadcast_to(rows, (*rows.shape[:2], LANES)),)


def _call(plan: KernelPlan, q: jax.Array, pages: jax.Array, table_width: int, interpret: Any) -> Callable:
    (num_tiles, K, rows, key), value = q.shape, plan.cut.value

    def table(ahead: int) -> pl.BlockSpec:
        index = lambda i, seq, *_: (seq[jnp.minimum(i + ahead, num_tiles - 1)], 0, 0)  # noqa: E731
        return pl.BlockSpec((1, 1, table_width), index, memory_space=pltpu.SMEM)

    def tile(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, K, rows, width), lambda i, *_: (i, 0, 0, 0))

    start = pl.BlockSpec((K, rows, LANES), lambda *_: (0, 0, 0))
    ahead = [pl.BlockSpec((1, rows, LANES), lambda i, *_: (i, 0, 0))] if plan.block_mask else []
    return pl.pallas_call(
        functools.partial(_attend, plan),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(num_tiles,),
            in_specs=[table(0), table(1), start, tile(key), pl.BlockSpec(memory_space=pl.ANY), *ahead],
            out_specs=tile(value),
            scratch_shapes=[
                pltpu.VMEM((2, plan.cut.pages, *pages.shape[1:]), pages.dtype),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SMEM((1,), jnp.int32),
                *(pltpu.VMEM((K, rows, width), jnp.float32) for width in (LANES, LANES, value)),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((num_tiles, K, rows, value), q.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",),  # a tile fetches for the next
            vmem_limit_bytes=max(USUAL_VMEM, flat_vmem(plan.cut, pages) * 4 // 3),
        ),
        interpret=interpret,
        name="flat_paged_attention",
    )


def _attend(plan: KernelPlan, seq, position, count, table, next_table, start, q, pages, *refs):
    """Attend one tile.

    `position` [I] is that of every tile's first token, and `count` [I] the keys that it sees from there on; `turn` says
    which buffer is next.
    """
    *ahead, out, buffer, arrived, turn, top, total, acc = refs
    i, page = pl.program_id(0), pages.shape[1]
    block = plan.cut.pages * page
    following = jnp.minimum(i + 1, pl.num_programs(0) - 1)

    def blocks(tile):  # the first that its first token sees, and the one after the last that it sees
        end = position[tile] + count[tile]
        first = lax.div(jnp.maximum(position[tile] - plan.window + 1, 0), block) if plan.window else 0
        return first, jnp.where(count[tile] > 0, lax.div(end + block - 1, block), first)

    def each_page(tile, table, j, slot, act):
        for n in range(plan.cut.pages):
            number = j * plan.cut.pages + n

            @pl.when(number * page < position[tile] + count[tile])
            def _(n=n, number=number):
                act(pltpu.make_async_copy(pages.at[table[0, 0, number]], buffer.at[slot, n], arrived.at[slot]))

    first, last = blocks(i)

    @pl.when(i == 0)
    def _():
        turn[0] = 0
        each_page(i, table, first, 0, lambda copy: copy.start())

    top[...] = start[...]
    total[...] = jnp.full_like(total, 1.0 if plan.has_sinks else 0.0)
    acc[...] = jnp.zeros_like(acc)

    def step(j, slot):
        @pl.when(j + 1 < last)
        def _():
            each_page(i, table, j + 1, 1 - slot, lambda copy: copy.start())

        @pl.when((j + 1 == last) & (following > i) & (count[following] > 0))
        def _():
            each_page(following, next_table, blocks(following)[0], 1 - slot, lambda copy: copy.start())

        each_page(i, table, j, slot, lambda copy: copy.wait())
        _clear(buffer.at[slot], position[i] + count[i] - j * block)
        for k in range(len(plan.cut.heads)):
            _head(plan, k, q, buffer.at[slot], top, total, acc, position[i] - j * block, *ahead)
        return 1 - slot

    turn[0] = lax.fori_loop(first, last, step, turn[0])
    for k in range(len(plan.cut.heads)):
        out[0, k] = (acc[k] / jnp.maximum(total[k][:, :1], 1e-30)).astype(out.dtype)


def _clear(buffer, keys) -> None:
    """Set what follows a sequence's last key, perhaps NaN, to 0: its weight is 0, and 0 * NaN is not."""
    pages, page, _ = buffer.shape
    for n in range(pages):

        @pl.when(keys < (n + 1) * page)
        def _(n=n):
            row = lax.broadcasted_iota(jnp.int32, buffer.shape[1:], 0)
            rows = buffer[n].astype(jnp.float32)  # not every TPU selects in bf16
            buffer[n] = jnp.where(n * page + row < keys, rows, 0).astype(buffer.dtype)


def _head(plan: KernelPlan, k: int, q, buffer, top, total, acc, position, ahead=None) -> None:
    """Attend to key head k's part of a block, for the G query heads of a tile.

    `position` is the first token's in the block, and `ahead` what `_ahead` made of the tile.
    """
    pages, page, _ = buffer.shape
    keys, values = (buffer[:, :, span.first : span.first + span.size] for span in plan.cut.heads[k])
    keys, values = (x.reshape(pages * page, x.shape[-1]) for x in (keys, values))
    scores = lax.dot_general(q[0, k], keys, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32) * plan.scale
    row, key = (lax.broadcasted_iota(jnp.int32, scores.shape, dim) for dim in (0, 1))
    also = None if ahead is None else key <= position + ahead[0][:, :1]
    visible = is_visible(position + (row & (plan.cut.tokens - 1)), key, plan.window, also)
    scores = cap_and_mask(scores, visible, plan.softcap)
    old = top[k]
    new = jnp.maximum(old, scores.max(axis=1, keepdims=True))  # [rows, lanes], the same in every lane
    # a row that sees nothing yet weighs what it does not see: its first visible key shrinks that to 0
    weights, shrink = jnp.exp(scores - new[:, :1]), jnp.exp(old - new)
    top[k] = new
    total[k] = total[k] * shrink + weights.sum(axis=1, keepdims=True)
    given = lax.dot(weights.astype(values.dtype), values, preferred_element_type=jnp.float32)
    acc[k] = acc[k] * shrink[:, :1] + given
