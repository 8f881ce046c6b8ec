"""Grouped matmul for Hopper (Pallas, Mosaic GPU): each group of rows by its own weights, forward and backward.

The grid is one program per multiprocessor, which computes tiles of the output one after another. In a program, one
warpgroup copies blocks of both operands to shared memory (TMA), ahead of two that multiply them (wgmma), each for half
of the tile's rows. A tile has rows of one group. It begins at a multiple of `ALIGNED` rows, as copies must, so that it
may begin and end with rows of other groups: they are computed and not stored, or set to zero where they are summed.

M rows, sorted by group, E groups, K input dim, N output dim, I tiles of rows.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dovetail.ops.kernels.gpu.grouped import _swizzled
from dovetail.ops.kernels.gpu.grouped_parts import (
    ALIGNED,
    CHUNK,
    GROUPS,
    HALF,
    INNER,
    ROWS,
    OutputTiles,
    by_size,
    default_tiles,
    find_tiles,
    load_blocks,
    make_kernel,
    run_tiles,
    shared_tiles,
    store_chunks,
    store_rows,
    sum_blocks,
)


def why_not_hopper(rows: int, out: int, inner: int, dtype: Any) -> str | None:
    """Return why the kernels cannot multiply [rows, inner] by [E, out, inner], or None."""
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
        return f"{jnp.dtype(dtype).name}, not bf16 or f16"
    if out % INNER or inner % INNER:
        return f"weights of {out} x {inner}, not multiples of {INNER}"
    if rows % ALIGNED:
        return f"{rows} rows, not a multiple of {ALIGNED}"
    return None


def grouped_matmul(
    x: jax.Array,  # [M, K]
    w: jax.Array,  # [E, N, K]
    sizes: jax.Array,  # [E] int32
    *,
    forward: OutputTiles | None = None,
    to_x: OutputTiles | None = None,
    to_w: OutputTiles | None = None,
) -> jax.Array:
    """Return [M, N]: the first sizes[0] rows by w[0]^T, the next sizes[1] by w[1]^T and so on.

    The remaining rows give 0.

    The tiles are those of the product, of the gradient to x and of the gradient to w.
    """
    return _matmul(x, w, sizes, forward, to_x, to_w)


def _matmul_only(x, w, sizes, forward, to_x, to_w) -> jax.Array:
    return rows_product(x, w, sizes, transposed=True, tiles=forward)


def _matmul_forward(x, w, sizes, forward, to_x, to_w):
    return _matmul_only(x, w, sizes, forward, to_x, to_w), (x, w, sizes)


def _matmul_backward(forward, to_x, to_w, saved, dy):
    x, w, sizes = saved
    dx = rows_product(dy, w, sizes, transposed=False, tiles=to_x)
    return dx, weights_product(dy, x, sizes, dtype=w.dtype, tiles=to_w), None


_matmul = jax.custom_vjp(_matmul_only, nondiff_argnums=(3, 4, 5))
_matmul.defvjp(_matmul_forward, _matmul_backward)


@jax.custom_vjp
def grouped_matmuls(x: jax.Array, ws: tuple[jax.Array, ...], sizes: jax.Array) -> tuple[jax.Array, ...]:
    """Return `grouped_matmul` of x with each of the weights [E, N, K].

    Their gradients to x are summed in one kernel.
    """
    return tuple(rows_product(x, w, sizes, transposed=True) for w in ws)


def _matmuls_forward(x, ws, sizes):
    return grouped_matmuls(x, ws, sizes), (x, ws, sizes)


def _matmuls_backward(saved, dys):
    x, ws, sizes = saved
    dx = rows_products(dys, ws, sizes, transposed=False)
    return dx, tuple(weights_product(dy, x, sizes, dtype=w.dtype) for dy, w in zip(dys, ws, strict=True)), None


grouped_matmuls.defvjp(_matmuls_forward, _matmuls_backward)


# ------------------------------------------------------------------------------------------------ rows by weights


def rows_product(
    x: jax.Array, w: jax.Array, sizes: jax.Array, *, transposed: bool, tiles: OutputTiles | None = None
) -> jax.Array:
    """Multiply x [M, K] by each group's w [E, N, K] (`transposed`) or [E, K, N] -> [M, N], in x's dtype."""
    return rows_products((x,), (w,), sizes, transposed=transposed, tiles=tiles)


@functools.partial(jax.jit, static_argnames=("transposed", "tiles"))  # equal calls are traced and lowered once
def rows_products(
    all_x: tuple[jax.Array, ...],
    all_w: tuple[jax.Array, ...],
    sizes: jax.Array,
    *,
    transposed: bool,
    tiles: OutputTiles | None = None,
) -> jax.Array:
    """Return the sum of the `rows_product` of each x with its w, all of one shape: a product of a longer inner dim."""
    x, w = all_x[0], all_w[0]
    M, N = len(x), w.shape[1 if transposed else 2]
    t = tiles or default_tiles(N)
    block = (t.cols, INNER) if transposed else (INNER, t.cols)
    shared = [shared_tiles((t.stages, ROWS, INNER), x.dtype), shared_tiles((t.stages, *block), w.dtype)]
    # a part of the rows of a tile may be stored: tiles of one row
    shared.append(shared_tiles((GROUPS, 2, HALF, CHUNK), x.dtype, rows=1))
    return make_kernel(
        functools.partial(_rows_body, transposed=transposed, num_cols=pl.cdiv(N, t.cols), t=t),
        f"grouped_matmul_{'forward' if transposed else 'to_x'}_hopper",
        jax.ShapeDtypeStruct((M, N), x.dtype),
        shared,
        t.stages,
    )(*find_tiles(sizes, M), *all_x, *all_w)


def _rows_body(group_ref, first_ref, start_ref, end_ref, count_ref, *refs: Any,
               transposed: bool, num_cols: int, t: OutputTiles):  # fmt: skip
    *operands, out_ref, (xs, ws, outs), loaded, released = refs
    pairs = list(zip(operands[: len(operands) // 2], operands[len(operands) // 2 :], strict=True))
    warpgroup = lax.axis_index("warpgroup")
    num_groups, whole = pairs[0][1].shape[0], pairs[0][0].shape[1] // INNER

    def block(program: jax.Array) -> tuple:
        tile, col = _swizzled(program, count_ref[0], num_cols, t.swizzle)
        group = group_ref[tile]
        # nothing is read for rows in no group, which stay 0
        return tile, group, col * t.cols, jnp.where(group < num_groups, whole, 0)

    def load(program: jax.Array, at: jax.Array) -> jax.Array:
        tile, group, col, steps = block(program)
        rows, cols = pl.ds(pl.multiple_of(first_ref[tile], ALIGNED), ROWS), pl.ds(col, t.cols)

        def sources(step: jax.Array, slot: jax.Array, x_ref: Any, w_ref: Any) -> list:
            inner = pl.ds(step * INNER, INNER)
            weights = w_ref.at[group, cols, inner] if transposed else w_ref.at[group, inner, cols]
            return [(x_ref.at[rows, inner], xs.at[slot]), (weights, ws.at[slot])]

        for x_ref, w_ref in pairs:
            at = load_blocks(functools.partial(sources, x_ref=x_ref, w_ref=w_ref), steps, at, loaded, released)
        return at

    def compute(program: jax.Array, at: jax.Array) -> jax.Array:
        tile, _, col, steps = block(program)
        steps *= len(pairs)
        first = first_ref[tile] + warpgroup * HALF
        start = jnp.clip(start_ref[tile] - first, 0, HALF)
        count = jnp.clip(end_ref[tile] - first, 0, HALF) - start

        def multiply(acc: Any, slot: jax.Array, _: Any = None) -> None:
            weights = ws.at[slot].transpose((1, 0)) if transposed else ws.at[slot]
            plgpu.wgmma(acc, xs.at[slot, pl.ds(warpgroup * HALF, HALF)], weights)

        parts = [(jnp.where(count > 0, steps, 0), multiply), (steps, lambda *_: None)]
        total = sum_blocks(parts, t.cols, at, loaded, released)

        def store(i: int) -> tuple:
            target = dict(first=first, start=start, count=count, col=col + i * CHUNK)
            return total[:, i * CHUNK : (i + 1) * CHUNK], functools.partial(store_rows, out_ref=out_ref, **target)

        store_chunks([store(i) for i in range(t.cols // CHUNK)], outs.at[warpgroup])
        return at + steps

    run_tiles(count_ref[0] * num_cols, load, compute, released)


# ------------------------------------------------------------------------------------------- the weights' gradient


@functools.partial(jax.jit, static_argnames=("dtype", "tiles"))  # equal calls are traced and lowered once
def weights_product(
    dy: jax.Array, x: jax.Array, sizes: jax.Array, *, dtype: Any, tiles: OutputTiles | None = None
) -> jax.Array:
    """Map dy [M, N] and x [M, K] to [E, N, K]: each group's dy^T x.

    A tile takes as long as its group has rows: those of large groups come first, and all programs sum about as many
    rows.
    """
    N, K, E = dy.shape[1], x.shape[1], len(sizes)
    t = tiles or default_tiles(K)
    shared = [shared_tiles((t.stages, INNER, columns), x.dtype) for columns in (ROWS, t.cols)]
    shared.append(shared_tiles((GROUPS, 2, HALF, CHUNK), dtype))
    ends = jnp.cumsum(sizes).astype(jnp.int32)
    return make_kernel(
        functools.partial(_weights_body, num_rows=pl.cdiv(N, ROWS), num_cols=pl.cdiv(K, t.cols), t=t),
        "grouped_matmul_to_w_hopper",
        jax.ShapeDtypeStruct((E, N, K), dtype),
        shared,
        t.stages,
    )(by_size(sizes), ends - sizes.astype(jnp.int32), ends, dy, x)


def _weights_body(order_ref, start_ref, end_ref, dy_ref, x_ref, out_ref, shared, loaded, released,
                  *, num_rows: int, num_cols: int, t: OutputTiles):  # fmt: skip
    dys, xs, outs = shared
    warpgroup = lax.axis_index("warpgroup")

    def block(program: jax.Array) -> tuple:
        group = order_ref[lax.div(program, num_rows * num_cols)]
        row, col = _swizzled(lax.rem(program, num_rows * num_cols), num_rows, num_cols, t.swizzle)
        start, end = start_ref[group], end_ref[group]
        first = lax.div(start, ALIGNED) * ALIGNED
        steps = jnp.where(end > start, lax.div(end - first + INNER - 1, INNER), 0)
        return group, row * ROWS, col * t.cols, start - first, end - first, first, steps

    def load(program: jax.Array, at: jax.Array) -> jax.Array:
        _, row, col, _, _, first, steps = block(program)

        def sources(step: jax.Array, slot: jax.Array) -> list:
            inner = pl.ds(pl.multiple_of(first + step * INNER, ALIGNED), INNER)
            cols = pl.ds(col, t.cols)
            return [(dy_ref.at[inner, pl.ds(row, ROWS)], dys.at[slot]), (x_ref.at[inner, cols], xs.at[slot])]

        return load_blocks(sources, steps, at, loaded, released)

    def compute(program: jax.Array, at: jax.Array) -> jax.Array:
        group, row, col, start, end, _, steps = block(program)
        row += warpgroup * HALF

        def multiply(acc: Any, slot: jax.Array, _: Any = None) -> None:
            own = dys.at[slot, :, pl.ds(warpgroup * HALF, HALF)]
            plgpu.wgmma(acc, own.transpose((1, 0)), xs.at[slot])

        def multiply_group(acc: Any, slot: jax.Array, step: jax.Array) -> None:
            """Set the rows of other groups to zero first."""
            own = dys.at[slot, :, pl.ds(warpgroup * HALF, HALF)]
            index = plgpu.broadcasted_iota(jnp.int32, (INNER, HALF), 0, layout=plgpu.Layout.WGMMA) + step * INNER
            values = own[...]
            own[...] = jnp.where((index >= start) & (index < end), values, jnp.zeros_like(values))
            plgpu.commit_smem()
            multiply(acc, slot)

        head = jnp.where(start > 0, jnp.minimum(steps, 1), 0)
        tail = jnp.maximum(lax.div(end, INNER), head)
        parts = [(head, multiply_group), (jnp.minimum(tail, steps), multiply), (steps, multiply_group)]
        total = sum_blocks(parts, t.cols, at, loaded, released)

        def store(i: int) -> tuple:
            target = out_ref.at[group, pl.ds(row, HALF), pl.ds(col + i * CHUNK, CHUNK)]
            part = total[:, i * CHUNK : (i + 1) * CHUNK]
            return part, lambda buffer: plgpu.copy_smem_to_gmem(buffer, target, commit_group=False)

        store_chunks([store(i) for i in range(t.cols // CHUNK)], outs.at[warpgroup])
        return at + steps

    run_tiles(out_ref.shape[0] * num_rows * num_cols, load, compute, released, there_and_back=True)
