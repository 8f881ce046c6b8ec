"""The kernel of ops/kernels/gpu/decode.py: a part of the keys of a tile, for Hopper (Pallas, Mosaic GPU).

Keys are the left operand of a warpgroup's products, which has at least 64 rows, and the queries of a key head the right
one, which has at least 8 columns: S^T = K Q^T [64, C], then O^T = V^T P^T [H, C]. So few queries waste little. A
program is one warpgroup, which loads blocks of keys ahead by TMA; two programs share a multiprocessor.

fp8 keys are converted in registers, which the first product reads; values too, and are stored in shared memory for the
second, which reads its left operand transposed.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dovetail.ops.kernels.gpu.mosaic.rows import load_raw, store_as

KEYS = 64  # of a block
SHARED = (108 * 1024, 220 * 1024)  # bytes of shared memory of a program, for two programs or one
MIN_STAGES, MAX_STAGES = 3, 6
HIDDEN = -1e30  # a score without weight: not -inf, whose difference to itself is NaN
LOG2E = math.log2(math.e)
ACC = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]


class DecodeShape(NamedTuple):
    """Hold what is static in a kernel."""

    kv_heads: int
    dim: int
    columns: int  # C
    group: int  # G'
    page: int
    splits: int
    scale: float
    window: int | None
    softcap: float | None


class KeyPart(NamedTuple):
    """Hold what a program computes: some blocks of keys of a tile, for a key head."""

    head: Any
    seq: Any
    position: Any  # of the tile's first token
    known: Any  # keys of the sequence that the tile sees
    begin: Any  # first block
    end: Any  # and the one after the last


def attend_part(*refs: Any, shape: DecodeShape, dtype: Any) -> None:
    """Allocate the buffers of a program and run it, if its tile has tokens."""
    pages_ref = refs[3]
    stored, H, C = pages_ref.dtype, shape.dim, shape.columns
    copies = KEYS // min(KEYS, shape.page)
    fixed = 2 * C * (H + KEYS) + (0 if stored == dtype else 2 * KEYS * H) + 4096
    stages = _stages(KEYS * 2 * H * stored.itemsize, fixed)
    run = functools.partial(
        pl.run_scoped,
        functools.partial(_run, *refs, shape=shape),
        _shared((stages, KEYS, 2 * H), stored, H),
        _shared((C, H), dtype, H),
        _shared((C, KEYS), dtype, KEYS),
        None if stored == dtype else _shared((KEYS, H), dtype, H),
        plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
        plgpu.Barrier(),
    )
    pl.when(refs[0][lax.div(lax.axis_index("item"), shape.kv_heads), 1] > 0)(run)


def _stages(block: int, fixed: int) -> int:
    """Return how many blocks are in shared memory at once, of which one is in use and the others are loaded."""
    fitting = [(size - fixed) // block for size in SHARED]
    return min(fitting[0] if fitting[0] >= MIN_STAGES else fitting[1], MAX_STAGES)


def _shared(shape: tuple[int, ...], dtype: Any, columns: int) -> Any:
    """Return shared memory in tiles, swizzled, as products read it; slices begin at multiples of `columns`."""
    size = jnp.dtype(dtype).itemsize
    width = min(128, columns * size)
    return plgpu.SMEM(
        shape, dtype, transforms=(plgpu.TilingTransform((8, width // size)), plgpu.SwizzleTransform(width))
    )


def _part_of(tiles_ref: Any, shape: DecodeShape) -> KeyPart:
    item, split = lax.axis_index("item"), lax.axis_index("split")
    tile = lax.div(item, shape.kv_heads)
    seq, count, position = (tiles_ref[tile, i] for i in range(3))
    known = position + count
    first = lax.div(jnp.maximum(position - shape.window + 1, 0), KEYS) if shape.window else jnp.int32(0)
    last = lax.div(known + KEYS - 1, KEYS)
    share = lax.div(last - first + shape.splits - 1, shape.splits)
    begin = first + split * share
    return KeyPart(lax.rem(item, shape.kv_heads), seq, position, known, begin, jnp.minimum(begin + share, last))


def _run(
    tiles_ref: Any, tables_ref: Any, q_ref: Any, pages_ref: Any, out_ref: Any, top_ref: Any, total_ref: Any,
    blocks: Any, queries: Any, weights: Any, values: Any, loaded: Any, queries_loaded: Any, *, shape: DecodeShape,
) -> None:  # fmt: skip
    """Attend to the keys of a part."""
    part, stages = _part_of(tiles_ref, shape), blocks.shape[0]
    item, split = lax.axis_index("item"), lax.axis_index("split")
    rows = pl.ds(pl.multiple_of(item * shape.columns, 8), shape.columns)
    plgpu.copy_gmem_to_smem(q_ref.at[rows], queries, queries_loaded)
    fetch = functools.partial(_fetch, tables_ref, pages_ref, blocks, loaded, part, shape)
    for ahead in range(stages - 1):
        pl.when(part.begin + ahead < part.end)(functools.partial(fetch, part.begin + ahead, jnp.int32(ahead)))
    plgpu.barrier_wait(queries_loaded)

    def step(block: Any, carry: tuple) -> tuple:
        top, total, outs = carry
        slot = lax.rem(block - part.begin, jnp.int32(stages))
        plgpu.barrier_wait(loaded.at[slot])
        keys, stored = (blocks.at[slot, :, pl.ds(i * shape.dim, shape.dim)] for i in (0, 1))
        scores, scale = _scores(keys, queries, shape), shape.scale
        if shape.softcap is not None:
            scores, scale = jnp.tanh(scores * scale), shape.softcap * LOG2E
        scores = jnp.where(_visible(shape, part.position - block * KEYS), scores * scale, HIDDEN)
        new = jnp.maximum(top, scores.max(axis=0))
        # all warps are past the products of the block before: its slot is free
        ahead = block + stages - 1
        pl.when(ahead < part.end)(lambda: fetch(ahead, lax.rem(ahead - part.begin, jnp.int32(stages))))
        shrink = jnp.exp2(top - new)
        share = jnp.exp2(scores - _spread(new, 1, scores))
        own = _values(stored, values, part.known - block * KEYS)
        _store_turned(weights, share)
        added = _weighted(own, weights, shape)
        outs = [x * _spread(shrink, 1, x) + y for x, y in zip(outs, added, strict=True)]
        return new, total * shrink + share.sum(axis=0), outs

    fill = lambda value, *dims: _in_registers(jnp.full(dims, value, jnp.float32))  # noqa: E731
    outs = [fill(0.0, 64, shape.columns) for _ in range(shape.dim // 64)]
    column = lambda value: _column(value, shape.columns)  # noqa: E731
    top, total, outs = lax.fori_loop(part.begin, part.end, step, (column(HIDDEN), column(0.0), outs))
    place = split * (tiles_ref.shape[0] * shape.kv_heads) + item
    least = jnp.maximum(total, 1e-30)
    for i, out in enumerate(outs):
        store_as(out_ref, (place, pl.ds(i * 64, 64)), (out / _spread(least, 1, out)).astype(out_ref.dtype))
    for ref, x in ((top_ref, top), (total_ref, total)):
        store_as(ref, (place,), x)


def _fetch(
    tables_ref: Any, pages_ref: Any, blocks: Any, loaded: Any, part: KeyPart, shape: DecodeShape, block: Any, slot: Any
) -> None:
    """Load a block of keys and values; past the last key, pages of the last one again."""
    rows, H = min(KEYS, shape.page), shape.dim
    for start in range(0, KEYS, rows):
        key = lax.div(jnp.minimum(block * KEYS + start, part.known - 1), rows) * rows
        place = tables_ref[part.seq, lax.div(key, shape.page)] * shape.page + lax.rem(key, shape.page)
        source, target = pl.ds(pl.multiple_of(place, rows), rows), pl.ds(start, rows)
        columns = pl.ds(pl.multiple_of(part.head * (2 * H), 2 * H), 2 * H)
        plgpu.copy_gmem_to_smem(pages_ref.at[source, columns], blocks.at[slot, target], loaded.at[slot])


# --- a block of keys --------------------------------------------------------------------------------------------------


def _in_registers(x: jax.Array) -> jax.Array:
    """Return a matrix in the registers in which a product leaves it."""
    return plgpu.layout_cast(x, plgpu.Layout.WGMMA)


def _column(value: float, columns: int) -> jax.Array:
    """Return a number for each column of a product."""
    return plgpu.layout_cast(jnp.full((columns,), value, jnp.float32), plgpu.Layout.WGMMA.reduce(0))


def _spread(x: jax.Array, axis: int, like: jax.Array) -> jax.Array:
    """Return a vector along an axis of a matrix in the shape of the matrix."""
    return lax.broadcast_in_dim(x, like.shape, [axis])


def _converted(rounded: Any, dtype: Any) -> jax.Array:
    """Return rounded keys or values in registers."""
    return load_raw(rounded, plgpu.Layout.WGMMA).astype(dtype)


def _scores(keys: Any, queries: Any, shape: DecodeShape) -> jax.Array:
    """Return K Q^T [KEYS, C]."""
    left = keys if keys.dtype == queries.dtype else _converted(keys, queries.dtype)

    def product(acc: Any) -> jax.Array:
        plgpu.wgmma(acc, left, queries.transpose((1, 0)))
        return acc[...]

    return pl.run_scoped(product, ACC((KEYS, shape.columns), jnp.float32))


def _values(stored: Any, values: Any, known: Any) -> Any:
    """Return the values of a block in shared memory in the dtype of the products.

    Those past the end are 0: a page may hold NaN from its last use, and 0 * NaN is not 0.
    """

    def write(target: Any, found: jax.Array) -> None:
        row = lax.broadcasted_iota(jnp.int32, found.shape, 0)
        target[...] = jnp.where(row < known, found, jnp.zeros_like(found))

    if values is not None:
        write(values, _converted(stored, values.dtype))
        return values
    pl.when(known < KEYS)(lambda: write(stored, load_raw(stored, plgpu.Layout.WGMMA)))
    return stored


def _visible(shape: DecodeShape, ahead: Any) -> jax.Array:
    """Return which keys [KEYS, C] the queries see; `ahead` is the first token's distance to the block's first key."""
    key, column = (lax.broadcasted_iota(jnp.int32, (KEYS, shape.columns), i) for i in (0, 1))
    distance = lax.shift_right_logical(column, shape.group.bit_length() - 1) + ahead - key
    return (distance >= 0) & (distance < shape.window) if shape.window else distance >= 0


def _store_turned(weights: Any, share: jax.Array) -> None:
    """Store the shares [KEYS, C] of a block's keys as [C, KEYS], and show products what was stored."""
    weights.transpose((1, 0))[...] = plgpu.layout_cast(share.astype(weights.dtype), plgpu.Layout.WGMMA_TRANSPOSED)
    plgpu.commit_smem()


def _weighted(values: Any, weights: Any, shape: DecodeShape) -> list[jax.Array]:
    """Return V^T P^T [64, C] of each 64 dims."""

    def products(accs: list) -> list[jax.Array]:
        for i, acc in enumerate(accs):
            plgpu.wgmma(acc, values.at[:, pl.ds(i * 64, 64)].transpose((1, 0)), weights.transpose((1, 0)))
        return [acc[...] for acc in accs]

    return pl.run_scoped(products, [ACC((64, shape.columns), jnp.float32) for _ in range(shape.dim // 64)])
