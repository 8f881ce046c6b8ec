"""Ragged paged attention: the readable reference that kernels are tested against.

Queries are split into tiles that never span two sequences; a loop walks the tiles' keys a few pages at a time while the
softmax is accumulated, and ends with the longest tile. So pages are gathered only as far as some sequence reaches.

T tokens, S sequences, I tiles of R rows, N query heads, K key heads, G = N / K, H head dim, C channels of a latent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dovetail.core.formats import KV_SCALES
from dovetail.core.types import Paged
from dovetail.ops.packed import MASKED, cap_and_mask, is_visible

BLOCK = 128  # keys a turn of the loop looks at
TILE = 16  # queries of one sequence that share a gathered page
SMALL_TILE = 8  # where most sequences have a single one, which a tile is padded for


def token_rows(ctx: Paged, num_tokens: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return for each of T tokens its sequence, its position in it, and whether it is real."""
    t = jnp.arange(num_tokens, dtype=jnp.int32)
    total = ctx.cu_q_lens[ctx.num_seqs[0]]
    real = t < total
    # past num_seqs anything may stand, also numbers that would break the search's order
    ends = jnp.where(jnp.arange(ctx.kv_lens.shape[0]) < ctx.num_seqs[0], ctx.cu_q_lens[1:], total)
    seq = _rank(ends, t)
    seq = jnp.minimum(seq, ctx.kv_lens.shape[0] - 1)
    # a sequence's last new token sits at kv_len - 1
    position = ctx.kv_lens[seq] - ctx.cu_q_lens[seq + 1] + t
    return seq, jnp.where(real, position, 0), real


def _rank(ends: jax.Array, values: jax.Array) -> jax.Array:
    """Return how many of the ascending `ends` are at or below each value.

    It compares with all: a binary search is a loop of small kernels on a GPU, a hundred microseconds per step.
    """
    return jnp.searchsorted(ends, values, side="right", method="compare_all").astype(jnp.int32)


def token_places(ctx: Paged, pages: jax.Array, num_tokens: int) -> jax.Array:
    """Return the index in pages [P, page size, ...] of each of T tokens, page * page size + offset.

    Past the end for padding.
    """
    seq, position, real = token_rows(ctx, num_tokens)
    place = ctx.block_tables[seq, position // pages.shape[1]] * pages.shape[1] + position % pages.shape[1]
    return jnp.where(real, place, pages.shape[0] * pages.shape[1])


def _write(ctx: Paged, pages: jax.Array, values: jax.Array) -> jax.Array:
    """Write values [T, ...] of the new tokens into pages [P, page size, ...]; padding is dropped."""
    place = token_places(ctx, pages, values.shape[0])
    page, offset = place // pages.shape[1], place % pages.shape[1]
    return pages.at[page, offset].set(values.astype(pages.dtype), mode="drop")


def write_heads(ctx: Paged, pages: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Write into pages [P, page, 2K, H], K and V of a head side by side (upstream's TPU layout), or flat."""
    T, K, H = k.shape
    rows = jnp.stack([k, v], axis=2).reshape(T, 2 * K, H)
    return _write(ctx, pages, round_rows(rows, pages.dtype) if is_rounded(pages) else _as_pages(pages, rows))


def is_rounded(pages: Any) -> bool:
    """Return whether pages are stored in a dtype of core.formats.KV_DTYPES."""
    return pages.dtype.name in KV_SCALES


def round_rows(rows: jax.Array, dtype: Any) -> jax.Array:
    """Return keys or values [..., H] as pages store them.

    e4m3 has no scale: what exceeds its range becomes its greatest number. int8 rows have a scale each, whose four bytes
    follow the values.
    """
    rows = rows.astype(jnp.float32)
    if dtype == jnp.float8_e4m3fn:
        most = float(jnp.finfo(dtype).max)
        return jnp.clip(rows, -most, most).astype(dtype)
    scale = jnp.max(jnp.abs(rows), axis=-1, keepdims=True) / 127
    codes = jnp.round(rows / jnp.where(scale == 0, 1, scale)).astype(jnp.int8)
    return jnp.concatenate([codes, jax.lax.bitcast_convert_type(scale[..., 0], jnp.int8)], axis=-1)


def stored_values(rows: jax.Array, dtype: Any) -> jax.Array:
    """Return rows of pages as keys or values [..., H], those of rounded pages in `dtype`."""
    if not is_rounded(rows):
        return rows
    if rows.dtype == jnp.float8_e4m3fn:
        return rows.astype(dtype)
    scale = jax.lax.bitcast_convert_type(rows[..., -4:], jnp.float32)
    return (rows[..., :-4].astype(jnp.float32) * scale[..., None]).astype(dtype)


def write_latents(ctx: Paged, pages: jax.Array, latents: jax.Array) -> jax.Array:
    """Write latents [T, C] into pages [P, page, 1, C], or flat."""
    return _write(ctx, pages, _as_pages(pages, latents[:, None]))


def _as_pages(pages: jax.Array, rows: jax.Array) -> jax.Array:
    """Return rows [T, n, H] as pages hold a token.

    Unchanged, or flat (see dispatch.page_row) as one row [T, W] with zeros.
    """
    if pages.ndim == 4:
        return rows
    flat = rows.reshape(rows.shape[0], -1)
    return jnp.pad(flat, ((0, 0), (0, pages.shape[2] - flat.shape[1])))


Gather = Callable[[jax.Array], jax.Array]  # heads of the pages [n] -> [I, n, block, H] of each tile's block of keys


def read_heads(gather: Gather, num_heads: int) -> tuple[jax.Array, jax.Array]:
    """Return keys and values [I, K, block, H] of pages [P, page, 2K, H].

    Two gathers give each in the layout of the products: one for both, split and transposed afterwards, takes almost
    twice as long on a CPU.
    """
    heads = 2 * jnp.arange(num_heads // 2)
    return gather(heads), gather(heads + 1)


def paged_attention(
    ctx: Paged,
    q: jax.Array,  # [T, N, H]
    pages: jax.Array,  # [P, page, ...]
    *,
    read: Callable[[Gather, int], tuple[jax.Array, jax.Array]] = read_heads,  # keys [I, K, block, H], values [.., Hv]
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Return [T, N, Hv]: each token attends to its sequence's pages up to itself, or to the last that it may see."""
    rows = _tile(q.shape[0], ctx.kv_lens.shape[0])
    tile_seq, first_token, count, position = tiles_of(ctx, q.shape[0], rows)
    num_tiles, row = tile_seq.shape[0], jnp.arange(rows)
    token = jnp.minimum(first_token[:, None] + row, q.shape[0] - 1)
    q_pos = jnp.where(row < count[:, None], position[:, None] + row, -1)  # [I, R]
    last_seen = q_pos if ctx.last_seen is None else jnp.where(q_pos < 0, -1, ctx.last_seen[token])
    pages_a_block = max(1, BLOCK // pages.shape[1])
    block = pages_a_block * pages.shape[1]
    width = ctx.block_tables.shape[1]
    tables = jnp.pad(ctx.block_tables, ((0, 0), (0, -width % pages_a_block)))[tile_seq]  # [I, M']

    def keys_values(j):
        # past what a tile sees is what a page held before, NaN perhaps, and 0 * NaN is not 0: its first key again
        k_pos = j * block + jnp.arange(block)
        k_pos = jnp.where(k_pos <= last_seen.max(axis=1, keepdims=True), k_pos, 0)  # [I, block]
        page = jnp.take_along_axis(tables, k_pos // pages.shape[1], axis=1)
        place = page[:, None], (k_pos % pages.shape[1])[:, None]
        return read(lambda heads: stored_values(pages[*place, heads[:, None]], q.dtype), pages.shape[2])

    _, K, _, Hv = jax.eval_shape(keys_values, 0)[1].shape
    N, H = q.shape[1:]
    q_tiles = q[token].reshape(num_tiles, rows, K, N // K, H).transpose(0, 2, 3, 1, 4)  # [I, K, G, R, H]

    def step(j, carry):
        top, total, out = carry
        k, v = keys_values(j)
        k_pos = j * block + jnp.arange(block)
        also = None if ctx.last_seen is None else k_pos <= last_seen[:, :, None]
        visible = is_visible(q_pos[:, :, None], k_pos, window, also)[:, None, None]  # [I, 1, 1, R, block]
        scores = jnp.einsum("ikgrh,iksh->ikgrs", q_tiles, k, preferred_element_type=jnp.float32) * scale
        scores = cap_and_mask(scores, visible, softcap)
        new_top = jnp.maximum(top, scores.max(axis=-1))
        weights = jnp.where(visible, jnp.exp(scores - new_top[..., None]), 0)
        shrink = jnp.exp(top - new_top)
        total = total * shrink + weights.sum(axis=-1)
        new = jnp.einsum("ikgrs,iksh->ikgrh", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
        return new_top, total, out * shrink[..., None] + new

    carry = _start(sinks, (num_tiles, K, N // K, rows), Hv)
    earliest = jnp.where(q_pos < 0, jnp.iinfo(q_pos.dtype).max, q_pos).min()  # of the rows that are not padding
    first = jnp.maximum(0, earliest - window + 1) // block if window else 0
    last = last_seen.max() // block + 1
    _, total, out = jax.lax.fori_loop(first, last, step, carry)
    out = jnp.where((q_pos < 0)[:, None, None, :, None], 0, out / jnp.maximum(total, 1e-30)[..., None]).astype(q.dtype)
    out = out.transpose(0, 3, 1, 2, 4).reshape(num_tiles, rows, N, Hv)
    return out[tile_of_token(ctx, q.shape[0], rows)]


def flat_attention(ctx: Paged, q: jax.Array, pages: jax.Array, *, rows: int, **options: Any) -> jax.Array:
    """Attend to flat pages [P, page, W], in which each token is `rows` rows of q's head dim."""
    whole = pages[..., : rows * q.shape[-1]]
    return paged_attention(ctx, q, whole.reshape(*pages.shape[:2], rows, -1), **options)


def _tile(num_tokens: int, num_seqs: int) -> int:
    if num_tokens <= num_seqs:
        return 1  # at most one new token per sequence: nothing to share
    return SMALL_TILE if num_tokens <= 8 * num_seqs else TILE


def _start(sinks: jax.Array | None, shape: tuple[int, ...], dim: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the softmax before any key: empty, or with the sinks' logits, which have weight and no value."""
    out = jnp.zeros((*shape, dim), jnp.float32)
    if sinks is None:
        return jnp.full(shape, MASKED, jnp.float32), jnp.zeros(shape, jnp.float32), out
    logits = sinks.astype(jnp.float32).reshape(1, *shape[1:3], 1)
    return jnp.broadcast_to(logits, shape), jnp.ones(shape, jnp.float32), out


def tiles_of(ctx: Paged, num_tokens: int, rows: int) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Return tiles of up to `rows` new tokens of one sequence: sequence, first token, count, and the first's position.

    Their number is the maximum; those past the last have a count of 0.
    """
    num_seqs = ctx.kv_lens.shape[0]
    num_tiles = num_tokens if rows == 1 else num_tokens // rows + num_seqs
    exists = jnp.arange(num_seqs) < ctx.num_seqs[0]
    q_lens = jnp.where(exists, jnp.diff(ctx.cu_q_lens), 0)
    ends = jnp.cumsum(-(-q_lens // rows))  # tiles up to and with each sequence
    tile = jnp.arange(num_tiles, dtype=jnp.int32)
    seq = jnp.minimum(_rank(ends, tile), num_seqs - 1)
    start = jnp.where(seq > 0, ends[seq - 1], 0)
    offset = (tile - start) * rows
    count = jnp.where(tile < ends[-1], jnp.clip(q_lens[seq] - offset, 0, rows), 0)
    position = jnp.where(count > 0, ctx.kv_lens[seq] - q_lens[seq] + offset, 0)
    return seq, jnp.where(count > 0, ctx.cu_q_lens[seq] + offset, 0), count.astype(jnp.int32), position


def tile_of_token(ctx: Paged, num_tokens: int, rows: int) -> tuple[jax.Array, jax.Array]:
    """Return the (tile, row) of each token."""
    num_seqs = ctx.kv_lens.shape[0]
    exists = jnp.arange(num_seqs) < ctx.num_seqs[0]
    ends = jnp.cumsum(-(-jnp.where(exists, jnp.diff(ctx.cu_q_lens), 0) // rows))
    seq, _, _ = token_rows(ctx, num_tokens)
    offset = jnp.arange(num_tokens) - ctx.cu_q_lens[seq]
    return jnp.where(seq > 0, ends[seq - 1], 0) + offset // rows, offset % rows
