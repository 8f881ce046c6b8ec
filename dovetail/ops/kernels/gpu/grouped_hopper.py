"""Grouped matmul for Hopper (Pallas, Mosaic GPU): each group of rows by its own weights, forward and backward.

The grid is one program per multiprocessor, which computes tiles of the output one after another. In a program, one
warpgroup copies blocks of both operands to shared memory (TMA), ahead of two that multiply them (wgmma), each for half
of the tile's rows. A tile has rows of one group. It begins at a multiple of `ALIGNED` rows, as copies must, so that it
may begin and end with rows of other groups: they are computed and not stored, or set to zero where they are summed.

M rows, sorted by group, E groups, K input dim, N output dim, I tiles of rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dovetail.ops.kernels.gpu.grouped import _swizzled
from dovetail.ops.kernels.gpu.mosaic.sorting import TileSizes, tiles_of_groups, why_not_sort

PROGRAMS = 132  # multiprocessors of an H100 or H200 (SXM)
GROUPS, HALF = 2, 64  # warpgroups that multiply, and the rows of the tile that each computes
ROWS = GROUPS * HALF
INNER = 64  # of the summed dim at a time: 128 bytes, the widest swizzle
ALIGNED = 8  # rows of a swizzled tile of shared memory
CHUNK = 64  # columns that are stored at a time
ACC = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]


@dataclass(frozen=True)
class OutputTiles:
    """Describe the tiles of the output.

    Their columns, the blocks of operands in shared memory, and how many tiles along the rows are computed before the
    columns advance: they share what they read of the other operand while it is in the L2 cache.
    """

    cols: int = 256
    stages: int = 4
    swizzle: int = 8


def why_not_hopper(rows: int, out: int, inner: int, dtype: Any) -> str | None:
    """Return why the kernels cannot multiply [rows, inner] by [E, out, inner], or None."""
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
        return f"{jnp.dtype(dtype).name}, not bf16 or f16"
    if out % INNER or inner % INNER:
        return f"weights of {out} x {inner}, not multiples of {INNER}"
    if rows % ALIGNED:
        return f"{rows} rows, not a multiple of {ALIGNED}"
    return None


def default_tiles(cols: int) -> OutputTiles:
    """Return the tiles that compute the fewest columns beyond the last."""
    fewest = min((256, 192, 128), key=lambda block: (pl.cdiv(cols, block) * block, -block))
    return OutputTiles(cols=fewest, stages={256: 4, 192: 4, 128: 6}[fewest])


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
    shared = [_shared((t.stages, ROWS, INNER), x.dtype), _shared((t.stages, *block), w.dtype)]
    # a part of the rows of a tile may be stored: tiles of one row
    shared.append(_shared((GROUPS, 2, HALF, CHUNK), x.dtype, rows=1))
    return _kernel(
        functools.partial(_rows_body, transposed=transposed, num_cols=pl.cdiv(N, t.cols), t=t),
        f"grouped_matmul_{'forward' if transposed else 'to_x'}_hopper",
        jax.ShapeDtypeStruct((M, N), x.dtype),
        shared,
        t.stages,
    )(*_tiles_of(sizes, M), *all_x, *all_w)


def _tiles_of(sizes: jax.Array, num_rows: int) -> tuple[jax.Array, ...]:
    """Return what `tiles_of` does, by one kernel if it can."""
    if why_not_sort(sizes, len(sizes)):
        return tiles_of(sizes, num_rows)
    return tiles_of_groups(sizes, num_rows, sizes_of_tiles(num_rows, len(sizes)))


def tiles_of(sizes: jax.Array, num_rows: int) -> tuple[jax.Array, ...]:
    """Return tiles of rows of one group: its group, first row, first and last + 1 row of the group [I], and how many.

    The rows in no group are a last group, E. The arrays have room for as many tiles as there can be.
    """
    num_tiles = sizes_of_tiles(num_rows, len(sizes)).tiles
    sizes = jnp.append(sizes, num_rows - sizes.sum()).astype(jnp.int32)
    ends = jnp.cumsum(sizes)
    firsts = (ends - sizes) // ALIGNED * ALIGNED
    tiles = jnp.where(sizes > 0, -(-(ends - firsts) // ROWS), 0)
    tile_ends = jnp.cumsum(tiles)
    tile = jnp.arange(num_tiles, dtype=jnp.int32)
    # by comparing with all: a search by halves is a loop of small kernels on a GPU
    group = jnp.searchsorted(tile_ends, tile, side="right", method="compare_all").astype(jnp.int32)
    group = jnp.minimum(group, len(sizes) - 1)
    first = firsts[group] + (tile - (tile_ends - tiles)[group]) * ROWS
    return group, first, jnp.maximum((ends - sizes)[group], first), ends[group], tile_ends[-1:]


def sizes_of_tiles(num_rows: int, num_groups: int) -> TileSizes:
    """Return how many tiles there can be, and their sizes."""
    return TileSizes(pl.cdiv(num_rows + (num_groups + 1) * (ROWS + ALIGNED), ROWS), ROWS, ALIGNED)


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

        def sources(step: jax.Array, x_ref: Any, w_ref: Any) -> list:
            inner = pl.ds(step * INNER, INNER)
            weights = w_ref.at[group, cols, inner] if transposed else w_ref.at[group, inner, cols]
            return [(x_ref.at[rows, inner], xs), (weights, ws)]

        for x_ref, w_ref in pairs:
            at = _load(functools.partial(sources, x_ref=x_ref, w_ref=w_ref), steps, at, loaded, released)
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
        total = _sum(parts, t.cols, at, loaded, released)

        def store(buffer: Any, at: int) -> None:
            offset, size = start, HALF
            while size:  # the bits of `count`: a copy has a fixed number of rows
                _store_if(
                    (count & size) != 0,
                    buffer.at[pl.ds(offset, size)],
                    out_ref.at[pl.ds(first + offset, size), pl.ds(col + at, CHUNK)],
                )
                offset, size = offset + (count & size), size // 2

        _store(total, outs.at[warpgroup], store)
        return at + steps

    _run(count_ref[0] * num_cols, load, compute, released)


def _store_if(condition: jax.Array, source: Any, target: Any) -> None:
    pl.when(condition)(lambda: plgpu.copy_smem_to_gmem(source, target, commit_group=False))


# ------------------------------------------------------------------------------------------- the weights' gradient


@functools.partial(jax.jit, static_argnames=("dtype", "tiles"))  # equal calls are traced and lowered once
def weights_product(
    dy: jax.Array, x: jax.Array, sizes: jax.Array, *, dtype: Any, tiles: OutputTiles | None = None
) -> jax.Array:
    """Map dy [M, N] and x [M, K] to [E, N, K]: each group's dy^T x."""
    N, K, E = dy.shape[1], x.shape[1], len(sizes)
    t = tiles or default_tiles(K)
    shared = [_shared((t.stages, INNER, columns), x.dtype) for columns in (ROWS, t.cols)]
    shared.append(_shared((GROUPS, 2, HALF, CHUNK), dtype))
    ends = jnp.cumsum(sizes).astype(jnp.int32)
    return _kernel(
        functools.partial(_weights_body, num_rows=pl.cdiv(N, ROWS), num_cols=pl.cdiv(K, t.cols), t=t),
        "grouped_matmul_to_w_hopper",
        jax.ShapeDtypeStruct((E, N, K), dtype),
        shared,
        t.stages,
    )(ends - sizes.astype(jnp.int32), ends, dy, x)


def _weights_body(start_ref, end_ref, dy_ref, x_ref, out_ref, shared, loaded, released,
                  *, num_rows: int, num_cols: int, t: OutputTiles):  # fmt: skip
    dys, xs, outs = shared
    warpgroup = lax.axis_index("warpgroup")

    def block(program: jax.Array) -> tuple:
        group = lax.div(program, num_rows * num_cols)
        row, col = _swizzled(lax.rem(program, num_rows * num_cols), num_rows, num_cols, t.swizzle)
        start, end = start_ref[group], end_ref[group]
        first = lax.div(start, ALIGNED) * ALIGNED
        steps = jnp.where(end > start, lax.div(end - first + INNER - 1, INNER), 0)
        return group, row * ROWS, col * t.cols, start - first, end - first, first, steps

    def load(program: jax.Array, at: jax.Array) -> jax.Array:
        _, row, col, _, _, first, steps = block(program)

        def sources(step: jax.Array) -> list:
            inner = pl.ds(pl.multiple_of(first + step * INNER, ALIGNED), INNER)
            return [(dy_ref.at[inner, pl.ds(row, ROWS)], dys), (x_ref.at[inner, pl.ds(col, t.cols)], xs)]

        return _load(sources, steps, at, loaded, released)

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
        total = _sum(parts, t.cols, at, loaded, released)

        def store(buffer: Any, at: int) -> None:
            target = out_ref.at[group, pl.ds(row, HALF), pl.ds(col + at, CHUNK)]
            plgpu.copy_smem_to_gmem(buffer, target, commit_group=False)

        _store(total, outs.at[warpgroup], store)
        return at + steps

    _run(out_ref.shape[0] * num_rows * num_cols, load, compute, released)


# ------------------------------------------------------------------------------------------------ parts of a kernel


def _kernel(body: Callable, name: str, out: jax.ShapeDtypeStruct, shared: list, stages: int) -> Callable:
    """Return the kernel of `body(*inputs, output, shared memory, loaded, released)`."""

    def entry(*refs: Any) -> None:
        pl.run_scoped(
            functools.partial(body, *refs),
            shared,
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),  # two copies
            plgpu.Barrier(num_arrivals=GROUPS, num_barriers=stages),
            collective_axes="warpgroup",
        )

    return plgpu.kernel(
        entry,
        out_type=out,
        grid=(PROGRAMS,),
        grid_names=("program",),
        num_threads=GROUPS + 1,
        thread_name="warpgroup",
        kernel_name=name,
    )


def _shared(shape: tuple[int, ...], dtype: Any, rows: int = ALIGNED) -> Any:
    """Return shared memory in tiles of `rows`, swizzled by 128 bytes, as copies and products expect it."""
    transforms = (plgpu.TilingTransform((rows, 128 // jnp.dtype(dtype).itemsize)), plgpu.SwizzleTransform(128))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def _run(num_tiles: Any, load: Callable, compute: Callable, released: Any) -> None:
    """Compute this program's tiles, or load their operands, by the number of the warpgroup.

    `load` and `compute` take the number of a tile and of its first step, counted over all tiles, and return the next.
    """
    program = lax.axis_index("program")
    mine = lax.div(num_tiles - program + PROGRAMS - 1, PROGRAMS)

    def over(run: Callable) -> None:
        lax.fori_loop(0, mine, lambda i, at: run(program + i * PROGRAMS, at), jnp.int32(0))

    @pl.when(lax.axis_index("warpgroup") < GROUPS)
    def _compute() -> None:
        plgpu.set_max_registers(232, action="increase")
        for stage in range(released.shape[0]):
            plgpu.barrier_arrive(released.at[stage])
        over(compute)
        plgpu.wait_smem_to_gmem(0)

    @pl.when(lax.axis_index("warpgroup") == GROUPS)
    def _load() -> None:
        plgpu.set_max_registers(40, action="decrease")
        over(load)
        for stage in range(released.shape[0]):  # nothing arrives at a barrier of a program that has ended
            plgpu.barrier_wait(released.at[stage])


def _load(sources: Callable, steps: jax.Array, at: jax.Array, loaded: Any, released: Any) -> jax.Array:
    """Copy the blocks of each step, `sources(step)`, to their shared memory; return the next step."""
    stages = released.shape[0]

    def copy(step: jax.Array, _: None) -> None:
        slot = lax.rem(at + step, jnp.int32(stages))
        plgpu.barrier_wait(released.at[slot])
        for source, target in sources(step):
            plgpu.copy_gmem_to_smem(source, target.at[slot], loaded.at[slot])

    lax.fori_loop(0, steps, copy, None)
    return at + steps


def _sum(parts: list, cols: int, at: jax.Array, loaded: Any, released: Any) -> jax.Array:
    """Return the sum [HALF, cols] f32 over the steps: of each part (end, multiply), those before its end."""
    stages = jnp.int32(released.shape[0])

    def products(acc: Any) -> jax.Array:
        def run(step: jax.Array, _: None, multiply: Callable) -> None:
            slot = lax.rem(at + step, stages)
            plgpu.barrier_wait(loaded.at[slot])
            multiply(acc, slot, step)
            plgpu.wgmma_wait(1)  # the one before is done

            @pl.when(step > 0)
            def _() -> None:
                plgpu.barrier_arrive(released.at[lax.rem(at + step + stages - 1, stages)])

        start = 0
        for end, multiply in parts:
            lax.fori_loop(start, end, functools.partial(run, multiply=multiply), None)
            start = end
        return acc[...]

    total = pl.run_scoped(products, ACC((HALF, cols), jnp.float32))
    steps = parts[-1][0]

    @pl.when(steps > 0)
    def _() -> None:
        plgpu.barrier_arrive(released.at[lax.rem(at + steps + stages - 1, stages)])

    return total


def _store(total: jax.Array, buffers: Any, store: Callable) -> None:
    """Store the sums of a tile by chunks of columns; `store(buffer, column)` copies one from shared memory."""
    for i in range(total.shape[1] // CHUNK):
        buffer = buffers.at[i % 2]
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)  # the buffer's last copy
        buffer[...] = total[:, i * CHUNK : (i + 1) * CHUNK].astype(buffers.dtype)
        plgpu.commit_smem()
        store(buffer, i * CHUNK)
        plgpu.commit_smem_to_gmem_group()
