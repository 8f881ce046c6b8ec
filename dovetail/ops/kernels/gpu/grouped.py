"""Grouped matmul for NVIDIA GPUs, in Pallas (Triton): each group of rows by its own weights, forward and backward.

There XLA's `lax.ragged_dot_general` multiplies every row by every group's weights and selects: E times the work. Here
rows are split into tiles that never span two groups, so that a tile needs one group's weights, and the gradient of a
group's weights is a sum over its own rows. Weights are read in place, out x in as in checkpoints.

M rows, sorted by group, E groups, K input dim, N output dim, I tiles.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from dovetail.core.compute import is_traced_exact


@dataclass(frozen=True)
class Blocks:
    """Describe what one program computes.

    Rows x cols of its output, `inner` of the summed dim at a time. Powers of two.

    `swizzle` output blocks along the first dim are computed before the second advances: they share what they read of
    the other operand while it is in the L2 cache.
    """

    rows: int = 128
    cols: int = 256
    inner: int = 64
    swizzle: int = 8
    num_warps: int = 8
    num_stages: int = 3


def default_blocks(rows: int, groups: int, dtype: Any) -> Blocks:
    """Return the blocks for `rows` over `groups`.

    With few rows per group reading weights dominates, with many arithmetic.
    """
    blocks = Blocks()
    share = rows // groups
    if share <= 64:
        blocks = Blocks(rows=_power(share), cols=128, num_warps=4, num_stages=4)
    return replace(blocks, inner=blocks.inner * 2 // jnp.dtype(dtype).itemsize)  # as many bytes of shared memory


def grouped_matmul(
    x: jax.Array,  # [M, K]
    w: jax.Array,  # [E, N, K]
    sizes: jax.Array,  # [E] int32
    *,
    forward: Blocks | None = None,
    to_x: Blocks | None = None,
    to_w: Blocks | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Return [M, N]: the first sizes[0] rows by w[0]^T, the next sizes[1] by w[1]^T and so on.

    The remaining rows give 0.

    The blocks are those of the product, of the gradient to x and of the gradient to w.
    """
    return _matmul(x, w, sizes, forward, to_x, to_w, interpret)


def _matmul_only(x, w, sizes, forward, to_x, to_w, interpret) -> jax.Array:
    return rows_product(x, w, sizes, transposed=True, blocks=forward, interpret=interpret)


def _matmul_forward(x, w, sizes, forward, to_x, to_w, interpret):
    return _matmul_only(x, w, sizes, forward, to_x, to_w, interpret), (x, w, sizes)


def _matmul_backward(forward, to_x, to_w, interpret, saved, dy):
    x, w, sizes = saved
    dx = rows_product(dy, w, sizes, transposed=False, blocks=to_x, interpret=interpret)
    dw = weights_product(dy, x, sizes, dtype=w.dtype, blocks=to_w, interpret=interpret)
    return dx, dw, None


_matmul = jax.custom_vjp(_matmul_only, nondiff_argnums=(3, 4, 5, 6))
_matmul.defvjp(_matmul_forward, _matmul_backward)


# ------------------------------------------------------------------------------------------------ rows by weights


def rows_product(
    x: jax.Array, w: jax.Array, sizes: jax.Array, *, transposed: bool, blocks: Blocks | None = None, interpret=False
) -> jax.Array:
    """Multiply x [M, K] by each group's w [E, N, K] (`transposed`) or [E, K, N] -> [M, N], in x's dtype."""
    M, K = x.shape
    N = w.shape[1 if transposed else 2]
    b = _fit(blocks or default_blocks(M, len(w), x.dtype), N, K)
    group, first, count = tiles_of(sizes, M, b.rows)
    num_tiles, num_cols = len(group), pl.cdiv(N, b.cols)
    return pl.pallas_call(
        functools.partial(_rows_kernel, transposed=transposed, num_tiles=num_tiles, num_cols=num_cols, b=b),
        grid=(num_tiles * num_cols,),
        out_shape=jax.ShapeDtypeStruct((M, N), x.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=b.num_warps, num_stages=b.num_stages),
        interpret=interpret,
        name=f"grouped_matmul_{'forward' if transposed else 'to_x'}",
    )(group, first, count, x, w)


def tiles_of(sizes: jax.Array, num_rows: int, rows: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return tiles of up to `rows` rows of one group: its group, first row and count, each [I].

    The rows in no group are a last group, E. There are as many tiles as there can be; those past the last have a count
    of 0.
    """
    num_tiles = pl.cdiv(num_rows, rows) + len(sizes)
    sizes = jnp.append(sizes, num_rows - sizes.sum()).astype(jnp.int32)
    tiles = -(-sizes // rows)
    row_ends, tile_ends = jnp.cumsum(sizes), jnp.cumsum(tiles)
    tile = jnp.arange(num_tiles, dtype=jnp.int32)
    # by comparing with all: a search by halves is a loop of small kernels on a GPU
    group = jnp.searchsorted(tile_ends, tile, side="right", method="compare_all").astype(jnp.int32)
    group = jnp.minimum(group, len(sizes) - 1)
    first = (row_ends - sizes)[group] + (tile - (tile_ends - tiles)[group]) * rows
    return group, first, jnp.clip(row_ends[group] - first, 0, rows)


def _rows_kernel(
    group_ref, first_ref, count_ref, x_ref, w_ref, out_ref,
    *, transposed: bool, num_tiles: int, num_cols: int, b: Blocks,
):  # fmt: skip
    (M, K), N = x_ref.shape, out_ref.shape[1]
    tile, col = _swizzled(pl.program_id(0), num_tiles, num_cols, b.swizzle)
    group, first, count = group_ref[tile], first_ref[tile], count_ref[tile]
    row = jnp.arange(b.rows)
    x_row = jnp.minimum(first + row, M - 1)[:, None]  # rows past the tile's end are computed and not stored
    cols = col * b.cols + jnp.arange(b.cols)

    def step(j, total):
        inner = j * b.inner + jnp.arange(b.inner)
        x = _read(x_ref.at[x_row, inner[None, :]], _inside(inner[None, :], K, b.inner))
        if transposed:
            mask = _both(_inside(cols[:, None], N, b.cols), _inside(inner[None, :], K, b.inner))
            w = _read(w_ref.at[group, cols[:, None], inner[None, :]], mask).T
        else:
            mask = _both(_inside(inner[:, None], K, b.inner), _inside(cols[None, :], N, b.cols))
            w = _read(w_ref.at[group, inner[:, None], cols[None, :]], mask)
        return total + plgpu.dot(x, w)

    # nothing is read for an empty tile, nor for rows in no group, which stay 0
    steps = ((group < w_ref.shape[0]) & (count > 0)).astype(jnp.int32) * pl.cdiv(K, b.inner)
    total = lax.fori_loop(0, steps, step, jnp.zeros((b.rows, b.cols), jnp.float32))
    mask = (row < count)[:, None] & (cols < N)[None, :]
    plgpu.store(out_ref.at[(first + row)[:, None], cols[None, :]], total.astype(out_ref.dtype), mask=mask)


# ------------------------------------------------------------------------------------------- the weights' gradient


def weights_product(
    dy: jax.Array, x: jax.Array, sizes: jax.Array, *, dtype: Any, blocks: Blocks | None = None, interpret=False
) -> jax.Array:
    """Map dy [M, N] and x [M, K] to [E, N, K]: each group's dy^T x. Blocks: rows of N, cols of K, inner of M."""
    (M, N), K, E = dy.shape, x.shape[1], len(sizes)
    default = replace(Blocks(), inner=Blocks.inner * 2 // x.dtype.itemsize)
    if is_traced_exact(x.dtype):  # no tensor core: less fits the registers
        default = Blocks(rows=64, cols=128, inner=16, num_warps=4)
    b = _fit(blocks or default, K, M)
    b = replace(b, rows=min(b.rows, _power(N)))
    num_rows, num_cols = pl.cdiv(N, b.rows), pl.cdiv(K, b.cols)
    ends = jnp.cumsum(sizes).astype(jnp.int32)
    return pl.pallas_call(
        functools.partial(_weights_kernel, num_rows=num_rows, num_cols=num_cols, b=b),
        grid=(E * num_rows * num_cols,),
        out_shape=jax.ShapeDtypeStruct((E, N, K), dtype),
        compiler_params=plgpu.CompilerParams(num_warps=b.num_warps, num_stages=b.num_stages),
        interpret=interpret,
        name="grouped_matmul_to_w",
    )(ends - sizes.astype(jnp.int32), ends, dy, x)


def _weights_kernel(start_ref, end_ref, dy_ref, x_ref, out_ref, *, num_rows: int, num_cols: int, b: Blocks):
    _, N, K = out_ref.shape
    program, blocks = pl.program_id(0), num_rows * num_cols
    group = lax.div(program, blocks)
    row, col = _swizzled(lax.rem(program, blocks), num_rows, num_cols, b.swizzle)
    start, end = start_ref[group], end_ref[group]
    rows, cols = row * b.rows + jnp.arange(b.rows), (col * b.cols + jnp.arange(b.cols))[None, :]

    def step(j, total, whole: bool):
        inner = (start + j * b.inner + jnp.arange(b.inner))[:, None]
        of_group = None if whole else inner < end
        dy = _read(dy_ref.at[inner, rows[None, :]], _both(of_group, _inside(rows[None, :], N, b.rows)))
        x = _read(x_ref.at[inner, cols], _both(of_group, _inside(cols, K, b.cols)))
        return total + plgpu.dot(dy.T, x)

    # all but a group's last few rows need no masks
    num_whole = lax.div(end - start, b.inner)
    total = jnp.zeros((b.rows, b.cols), jnp.float32)
    total = lax.fori_loop(0, num_whole, functools.partial(step, whole=True), total)
    total = lax.fori_loop(num_whole, pl.cdiv(end - start, b.inner), functools.partial(step, whole=False), total)
    mask = (rows < N)[:, None] & (cols < K)
    plgpu.store(out_ref.at[group, rows[:, None], cols], total.astype(out_ref.dtype), mask=mask)


# ------------------------------------------------------------------------------------------------ parts of a kernel


def _swizzled(program: jax.Array, num_rows: int, num_cols: int, swizzle: int) -> tuple[jax.Array, jax.Array]:
    """Return (row, col) of a program's block: down `swizzle` rows, then the next column.

    All columns, then further down.
    """
    band = swizzle * num_cols
    first = lax.div(program, band) * swizzle
    height = jnp.minimum(num_rows - first, swizzle)
    within = lax.rem(program, band)
    return first + lax.rem(within, height), lax.div(within, height)


def _inside(index: jax.Array, dim: int, block: int) -> jax.Array | None:
    """Return the mask of a block, or None, which costs nothing, if blocks fill the dim."""
    return None if dim % block == 0 else index < dim


def _both(a: jax.Array | None, b: jax.Array | None) -> jax.Array | None:
    return b if a is None else a if b is None else a & b


def _read(ref: Any, mask: jax.Array | None) -> jax.Array:
    return plgpu.load(ref) if mask is None else plgpu.load(ref, mask=mask, other=0.0)


def _fit(b: Blocks, cols: int, inner: int) -> Blocks:
    """Return blocks no larger than what there is to compute."""
    return replace(b, cols=min(b.cols, _power(cols)), inner=min(b.inner, _power(inner)))


def _power(n: int) -> int:
    """Return the power of two at or above n, at least 16: the smallest side of a tensor core."""
    return max(16, 1 << max(n - 1, 0).bit_length())
