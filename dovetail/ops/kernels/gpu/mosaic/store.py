"""Normalise, rotate and write new keys and values into their pages, in place, for Hopper (Pallas, Mosaic GPU).

A warpgroup takes a few heads of one token: queries, keys or values. The halves of a head that are rotated into each
other are two arrays [heads, H / 2] with the same layout, whose rows lie within a warp.

T tokens, N query heads, K key heads, H head dim.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dovetail.core.types import Paged
from dovetail.ops.kernels.gpu.mosaic.rows import WARPS, load_as, tiled
from dovetail.ops.paged import token_places


@functools.partial(jax.jit, static_argnames=("eps", "offset", "interpret"))  # equal calls are traced and lowered once
def rotate_store(
    ctx: Paged,
    pages: jax.Array,  # [P, page, 2K, H]
    qkv: jax.Array,  # [T, N + 2K, H]
    tables: tuple,  # cos and sin [T, H / 2] f32
    norms: tuple[jax.Array, jax.Array] | None,  # weights [H] of the queries' and the keys' norm
    eps: float,
    offset: float,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """Return the queries [T, N, H] and the pages."""
    (T, heads, H), K = qkv.shape, pages.shape[2] // 2
    N, half = heads - 2 * K, H // 2
    rows = next(n for n in (8, WARPS) if N % n == 0 and K % n == 0)
    layout = tiled(rows, half)

    def body(places_ref: Any, cos_ref: Any, sin_ref: Any, *refs: Any) -> None:
        *norm_refs, qkv_ref, pages_ref, q_ref = refs
        query_norm, key_norm = norm_refs or (None, None)
        token, first = lax.axis_index("token"), lax.axis_index("group") * rows
        halves = tuple(pl.ds(i * half, half) for i in (0, 1))

        def spread(x: jax.Array, axis: int) -> jax.Array:
            return plgpu.layout_cast(lax.broadcast_in_dim(x, (rows, half), (axis,)), layout)

        def row_of(ref: Any, index: tuple) -> jax.Array:
            return spread(load_as(ref, index, layout.reduce(0), optimized=False), 1)

        def read() -> list[jax.Array]:
            heads = token, pl.ds(first, rows)
            return [load_as(qkv_ref, (*heads, columns), layout, optimized=False) for columns in halves]

        def turned(norm_ref: Any) -> tuple[jax.Array, jax.Array]:
            a, b = read()
            if norm_ref is not None:
                squares = jnp.sum(a * a, axis=1) + jnp.sum(b * b, axis=1)
                scale = spread(lax.rsqrt(squares / H + eps), 0)
                normed = [x * scale * (offset + row_of(norm_ref, (at,))) for x, at in zip((a, b), halves, strict=True)]
                # rounded as between two operations of the reference
                a, b = (x.astype(qkv_ref.dtype).astype(jnp.float32) for x in normed)
            cos, sin = (row_of(ref, (token, slice(None))) for ref in (cos_ref, sin_ref))
            return a * cos - b * sin, b * cos + a * sin

        def put(ref: Any, index: tuple, parts: Any) -> None:
            for columns, x in zip(halves, parts, strict=True):
                ref[(*index, columns)] = x.astype(ref.dtype)

        place = places_ref[token]
        is_stored = place < pages_ref.shape[0]  # padding has a place past the end

        @pl.when(first < N)
        def _queries() -> None:
            put(q_ref, (token, pl.ds(first, rows)), turned(query_norm))

        @pl.when((first >= N) & (first < N + K) & is_stored)
        def _keys() -> None:
            put(pages_ref, (place, pl.ds(first - N, rows), 0), turned(key_norm))

        @pl.when((first >= N + K) & is_stored)
        def _values() -> None:
            put(pages_ref, (place, pl.ds(first - N - K, rows), 1), read())

    held = jax.new_ref(pages.reshape(-1, K, 2, H), memory_space=plgpu.GMEM)  # written in place
    run: Any = pl.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((T, N, H), qkv.dtype),
        mesh=plgpu.Mesh(grid=(T, heads // rows), grid_names=("token", "group")),
        compiler_params=plgpu.CompilerParams(),
        interpret=interpret,
        name="rotate_store",
    )
    q = run(token_places(ctx, pages, T), *tables, *(norms or ()), qkv, held)
    return q, jax.freeze(held).reshape(pages.shape)
