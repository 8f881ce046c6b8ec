"""Multiply packed weights by up to 8 tokens with programs that compute several blocks of rows in turn (Hopper).

Beside packed_few: as many programs as run at once, so that none begins while others end. Those of experts are divided
among the tiles in use. A program copies the tokens to shared memory once. It is not measured on a card yet: see
ops.capabilities.tries_unmeasured.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from dovetail.ops.kernels.gpu.experts import Tiles, tile_number
from dovetail.ops.kernels.gpu.packed_persistent import FewMemory, PersistentWarp
from dovetail.ops.kernels.gpu.packed_shared import ring_words, scale_words, share, suits, token_words
from dovetail.ops.kernels.gpu.packed_warp import FewPlan
from dovetail.ops.kernels.gpu.warp_ops import barrier

FEW = 8  # tokens of a tile
SMS = 132  # multiprocessors
WARPS, ENOUGH = 16, 12  # that a multiprocessor has registers for, and that keep it busy
SHARED = 228  # KiB of shared memory of a multiprocessor
AHEAD = 8, 6, 4, 3  # steps whose codes shared memory has room for: a step is copied when the one before it is done
UNDER_WAY = 64 * 1024  # bytes of codes that a multiprocessor waits for: 4.17 TB/s for 2 us
SCALAR = plgpu.Layout.WG_SPLAT(())


def plan(p: FewPlan, tiles: Tiles) -> FewPlan | None:
    """Return the best plan of persistent programs, or None if none suits the shape and shared memory."""
    return max(candidates(p, tiles), key=lambda found: found[0], default=(0, None))[1]


def candidates(p: FewPlan, tiles: Tiles) -> list[tuple[float, FewPlan]]:
    """Return the plans that suit the shape and shared memory, each with how well it uses a multiprocessor."""
    p = p._replace(blocks=1, tokens=min(FEW, len(tiles.row)))
    is_known = len(tiles.row) == 1 or tiles.table.shape[1] == 1  # how many tiles are in use
    found = []
    for groups, ahead in itertools.product((1, 2), AHEAD):
        each = p._replace(groups=groups, ahead=ahead)
        if suits(each) and ahead <= each.steps:
            fitting = min(WARPS // each.warps, SHARED // memory(each))
            found += [_planned(each, tiles.table.shape[1], n, is_known) for n in range(1, fitting + 1)]
    return [(quality, each) for quality, each in found if each.programs >= tiles.table.shape[1]]


def _planned(p: FewPlan, tiles: int, at_once: int, is_known: bool) -> tuple[float, FewPlan]:
    """Return how well a multiprocessor is used by so many programs, as a share, and their plan."""
    blocks, programs, balance = p.out // p.rows, SMS * at_once, 1.0
    if is_known:
        turns = pl.cdiv(tiles * blocks, SMS * at_once)
        programs = tiles * pl.cdiv(blocks, turns)  # as many blocks for each, or one less
        at_once = pl.cdiv(programs, SMS)
        balance = tiles * blocks / (SMS * at_once * turns)
    under_way = 4 * ring_words(p) // p.ahead * (p.ahead - 1) * at_once
    quality = balance * min(1, under_way / UNDER_WAY) * min(1, at_once * p.warps / ENOUGH)
    return quality, p._replace(programs=programs)


def sizes(p: FewPlan) -> tuple[int, ...]:
    """Return the words of 32 bits of the parts of a program's shared memory."""
    return p.tokens * token_words(p), ring_words(p), scale_words(p), 2 * p.warps * p.names * FEW * p.rows


def memory(p: FewPlan) -> int:
    """Return the KiB of shared memory that a program takes: its arrays begin at whole ones, and CUDA has one."""
    return 1 + sum(pl.cdiv(4 * words, 1024) for words in sizes(p))


def tile_of(table_ref: Any, reads: int | None, T: int, tile: Any) -> tuple:
    """Return a tile's expert, first row read, first row written, and tokens."""
    if reads is None:  # known at trace time: the kernel need not load the table first
        return tuple(jnp.int32(n) for n in (0, 0, 0, T))
    return tuple(tile_number(table_ref, i, tile) for i in (0, reads, 2, 3))


def program(p: FewPlan, reads: int | None, T: int, finish: Callable, table_ref: Any, x_ref: Any, inputs: dict) -> None:
    """Compute some blocks of rows of one tile; if `reads` is None, one tile holds all T tokens."""
    blocks, number = p.out // p.rows, lax.axis_index("program")
    if reads is None:
        tile, part, each = None, number, jnp.int32(p.programs)
    elif T == 1:  # its experts are distinct: all tiles are in use
        each = jnp.int32(p.programs // table_ref.shape[1])
        tile, part = lax.div(number, each), lax.rem(number, each)
    else:
        tile, part, each = _share(p, table_ref, number)

    def body(*parts: Any) -> None:
        own = FewMemory(*parts)
        expert, source, target, count = tile_of(table_ref, reads, T, tile)
        run = functools.partial(_run, p, own, x_ref, inputs, expert, source, count)
        turns = lax.div(blocks - part + each - 1, each)

        def turn(n: Any, _: Any) -> None:
            row = (part + n * each) * p.rows
            run(row, row + each * p.rows, n + 1 < turns, n)

            @pl.when(lax.axis_index("group") == 0)
            def _() -> None:
                finish(own.partial.at[n % 2], target, row, count)  # the other half may still be read

        run(part * p.rows)
        lax.fori_loop(0, turns, turn, None)

    shapes = [plgpu.SMEM((n,), jnp.int32) for n in sizes(p)[:-1]]
    shapes.append(plgpu.SMEM((2, p.warps, p.names, FEW, p.rows), jnp.float32))
    run = functools.partial(pl.run_scoped, body, *shapes, collective_axes="group")
    if reads is None:
        run()
    else:
        pl.when(part < jnp.minimum(each, blocks))(run)


def _share(p: FewPlan, table_ref: Any, number: Any) -> tuple:
    """Return the tile of a program, which of its programs this is, and how many it has."""
    scalar = plgpu.ShapeDtypeStruct((), jnp.int32, layout=SCALAR)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR), return_type=[scalar] * 3)
    def find(_: Any, table: Any, number: Any) -> list:
        found = share(table, table_ref.shape[1], p.programs, number.registers.flat[0])
        return [mgpu.FragmentedArray.splat(x, (), is_signed=True) for x in found]

    return tuple(find(table_ref, number))  # pyright: ignore[reportCallIssue]


def _run(p: FewPlan, memory: FewMemory, x_ref: Any, inputs: dict[str, list], *scalars: Any) -> None:
    """Compute a block, or begin if there are no scalars after its row.

    The scalars are of PersistentWarp (expert, source, count) and of its `block`.
    """
    kinds = [kind for kind, refs in inputs.items() if refs]
    refs = [ref for kind in kinds for ref in inputs[kind]]
    types = (*[plgpu.RefType()] * (len(memory) + 1), [plgpu.RefType()] * len(refs), [SCALAR] * len(scalars))

    @plgpu.inline_mgpu(arg_types=types)
    def run(_: Any, *given: Any) -> None:
        *parts, x, refs, scalars = given
        each = len(refs) // len(kinds)
        found = {kind: refs[i * each :][:each] for i, kind in enumerate(kinds)}
        expert, source, count, row, *rest = (scalar.registers.flat[0] for scalar in scalars)
        warp = PersistentWarp(p, FewMemory(*parts), x, found, expert, source, count)
        warp.block(row, *rest) if rest else warp.begin(row)
        barrier(p.threads)

    run(*memory, x_ref, refs, list(scalars))
