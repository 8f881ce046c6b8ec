"""Rows of a matrix in the registers of a warpgroup: 128 threads hold a row, or a part of it, and reduce it at once."""

from __future__ import annotations

import inspect
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

THREADS, WARPS = 128, 4  # of a warpgroup
# What a kernel computes for scalars too: the default in jax 0.10, and not in 0.12
BY_LANE = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)
_STORE: Any = getattr(plgpu, "store", None)  # jax 0.10 has none, and does not insist on whole transactions
_INDEX = inspect.signature(plgpu.load).parameters.get("idx")
_TAKES_INDEX = _INDEX is not None and _INDEX.default is _INDEX.empty  # in jax 0.10; deprecated in 0.11, gone in 0.12


def layout(columns: int) -> Any:
    """Return the layout of a row; a thread's neighbouring numbers, up to 8, are loaded at once."""
    vector = next(n for n in (8, 4, 2, 1) if columns % (THREADS * n) == 0)
    return plgpu.Layout.WG_STRIDED((columns,), vec_size=vector)


def tiled(rows: int, columns: int) -> Any:
    """Return the layout of an array [rows, columns], 4 rows or a multiple of 8, of which each lies within a warp."""
    vector = rows * columns // THREADS
    if rows == WARPS:
        tiling = plgpu.Tiling(((rows, columns), (vector,)))
        return plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)
    tiling = plgpu.Tiling(((rows, columns), (rows // WARPS, columns), (vector,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)


def load(ref: Any, index: tuple, columns: int) -> jax.Array:
    """Return a row in f32."""
    return load_as(ref, index, layout(columns))


def load_as(ref: Any, index: tuple, layout: Any, optimized: bool = True, dtype: Any = jnp.float32) -> jax.Array:
    """Return a part of memory in f32, or in this dtype, in this layout."""
    return load_raw(ref, layout, index, optimized).astype(dtype)


def load_raw(ref: Any, layout: Any, index: tuple = (), optimized: bool = False) -> jax.Array:
    """Return a part of memory in its own dtype, in this layout."""
    read: Any = plgpu.load
    if _TAKES_INDEX:
        return read(ref, index, layout=layout, optimized=optimized)
    return read(ref.at[index] if index else ref, layout=layout, optimized=optimized)


def store_as(ref: Any, index: tuple, x: jax.Array) -> None:
    """Store numbers that are too few for whole transactions of the memory."""
    if _STORE is None:
        ref[index] = x
    else:
        _STORE(ref.at[index], x, optimized=False)


def iota(shape: tuple[int, ...], axis: int, layout: Any) -> jax.Array:
    """Return the index of each number along an axis."""
    return plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, shape, axis), layout)


def filled(columns: int, value: float) -> jax.Array:
    """Return a row of one value, to be changed in a loop."""
    return plgpu.layout_cast(jnp.full(columns, value, jnp.float32), layout(columns))
