"""Parts of the grouped products for Hopper (Pallas, Mosaic GPU): see grouped_hopper.

M rows, sorted by group, E groups, I tiles of rows.
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


def default_tiles(cols: int) -> OutputTiles:
    """Return the tiles that compute the fewest columns beyond the last."""
    fewest = min((256, 192, 128), key=lambda block: (pl.cdiv(cols, block) * block, -block))
    return OutputTiles(cols=fewest, stages={256: 4, 192: 4, 128: 6}[fewest])


# -------------------------------------------------------------------------------------------------- tiles of rows


def find_tiles(sizes: jax.Array, num_rows: int) -> tuple[jax.Array, ...]:
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


def by_size(sizes: jax.Array) -> jax.Array:
    """Return the groups in order of their sizes, the largest first."""
    number = jnp.arange(len(sizes), dtype=jnp.int32)
    larger = sizes[None] > sizes[:, None]
    before = larger | ((sizes[None] == sizes[:, None]) & (number[None] < number[:, None]))
    place = before.sum(axis=1, dtype=jnp.int32)
    return jnp.sum(jnp.where(place[None] == number[:, None], number[None], 0), axis=1, dtype=jnp.int32)


# ------------------------------------------------------------------------------------------------ parts of a kernel


def make_kernel(body: Callable, name: str, out: Any, shared: list, stages: int) -> Callable:
    """Return the kernel of `body(*inputs, *outputs, shared memory, loaded, released)`."""

    def entry(*refs: Any) -> None:
        pl.run_scoped(
            functools.partial(body, *refs),
            shared,
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
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


def shared_tiles(shape: tuple[int, ...], dtype: Any, rows: int = ALIGNED) -> Any:
    """Return shared memory in tiles of `rows`, swizzled by 128 bytes, as copies and products expect it."""
    transforms = (plgpu.TilingTransform((rows, 128 // jnp.dtype(dtype).itemsize)), plgpu.SwizzleTransform(128))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def run_tiles(num_tiles: Any, load: Callable, compute: Callable, released: Any, there_and_back: bool = False) -> None:
    """Compute this program's tiles, or load their operands, by the number of the warpgroup.

    `load` and `compute` take the number of a tile and of its first step, counted over all tiles, and return the next.
    The programs take a tile each, in their order, and again; or with `there_and_back` in the reverse order every second
    time, so that of tiles in order of their size all programs have about the same sum.
    """
    program = lax.axis_index("program")

    def tile(turn: Any) -> Any:
        is_back = there_and_back and lax.rem(turn, 2) == 1
        return turn * PROGRAMS + jnp.where(is_back, PROGRAMS - 1 - program, program)

    turns = lax.div(num_tiles + PROGRAMS - 1, PROGRAMS)
    turns = jnp.where((turns > 0) & (tile(turns - 1) >= num_tiles), turns - 1, turns)

    def over(run: Callable) -> None:
        lax.fori_loop(0, turns, lambda turn, at: run(tile(turn), at), jnp.int32(0))

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


def load_blocks(sources: Callable, steps: jax.Array, at: jax.Array, loaded: Any, released: Any) -> jax.Array:
    """Copy the blocks of each step, `sources(step, slot)`, to shared memory; return the next step."""
    stages = released.shape[0]

    def copy(step: jax.Array, _: None) -> None:
        slot = lax.rem(at + step, jnp.int32(stages))
        plgpu.barrier_wait(released.at[slot])
        for source, target in sources(step, slot):
            plgpu.copy_gmem_to_smem(source, target, loaded.at[slot])

    lax.fori_loop(0, steps, copy, None)
    return at + steps


def sum_blocks(parts: list, cols: int, at: jax.Array, loaded: Any, released: Any) -> jax.Array:
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


def store_chunks(chunks: list[tuple[jax.Array, Callable]], buffers: Any) -> None:
    """Store parts of a tile [HALF, CHUNK], each by its function of a buffer in shared memory that begins a copy."""
    for i, (chunk, store) in enumerate(chunks):
        buffer = buffers.at[i % 2]
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)  # the buffer's last copy
        buffer[...] = chunk.astype(buffers.dtype)
        plgpu.commit_smem()
        store(buffer)
        plgpu.commit_smem_to_gmem_group()


def store_rows(buffer: Any, out_ref: Any, first: jax.Array, start: jax.Array, count: jax.Array, col: jax.Array) -> None:
    """Copy `count` rows of a buffer [HALF, CHUNK], from `start` on, to rows from first + start on."""
    offset, size = start, HALF
    while size:  # the bits of `count`: a copy has a fixed number of rows
        source = buffer.at[pl.ds(offset, size)]
        target = out_ref.at[pl.ds(first + offset, size), pl.ds(col, CHUNK)]
        _store_if((count & size) != 0, source, target)
        offset, size = offset + (count & size), size // 2


def _store_if(condition: jax.Array, source: Any, target: Any) -> None:
    pl.when(condition)(lambda: plgpu.copy_smem_to_gmem(source, target, commit_group=False))
