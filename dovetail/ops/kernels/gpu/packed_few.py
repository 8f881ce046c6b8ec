"""Multiply packed weights by up to 8 tokens on Hopper, at the memory's bandwidth (Pallas, Mosaic GPU).

Nothing is copied to shared memory and no thread waits for another one until the end. A program computes some blocks of
16 rows; its warps take turns along the input (packed_warp), so that a row is read in runs of 256 or 512 bytes. The
values of the tokens come from the L1 cache, which the programs of a multiprocessor share. At the end the warps' sums
are added in shared memory.

T tokens, N = 8 tokens of a tile, I tiles, R rows written.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, scf

from dovetail.core.formats import Format
from dovetail.ops.kernels.gpu import packed_integer
from dovetail.ops.kernels.gpu.experts import Tiles, tile_number
from dovetail.ops.kernels.gpu.packed_warp import BLOCK, FewPlan, Warp
from dovetail.ops.kernels.gpu.warp_ops import address, c, thread, times, wide

FEW = 8  # tokens of a tile
MANY = 4 * 132  # programs, from which on each multiprocessor has several of four warps
FEW_PROGRAMS = 2 * 132  # up to which they have eight warps, in integers
AHEAD = 4  # loads of 32 bytes by a thread that are under way
SCALAR = plgpu.Layout.WG_SPLAT(())


def plan(form: Format, tiles: Tiles, shape: tuple[int, ...], names: int = 1, is_joined: bool = False) -> FewPlan:
    """Return the plan of a product with `names` weights [.., out, in], or with one that holds them joined."""
    out, size = shape[-2] // (names if is_joined else 1), shape[-1]
    programs = tiles.table.shape[1] * out // BLOCK
    p = FewPlan(form, size, out, names, 1, max(1, AHEAD // names), is_joined=is_joined)
    if len(tiles.row) == 1 and packed_integer.suits(p):
        return _in_integers(p, programs)
    if p.per_byte == 1:
        return p._replace(groups=2, ahead=2) if programs < MANY else p
    # programs share what they read of the tokens, which are many bytes beside 4 bits
    shares = names == 1 and programs >= 2 * MANY and len(tiles.row) > FEW // 2 and out % (2 * BLOCK) == 0
    return p._replace(blocks=2) if shares else p


def _in_integers(p: FewPlan, programs: int) -> FewPlan:
    """Return the plan of a product in integers."""
    groups = 2 if programs <= FEW_PROGRAMS and p.names == 1 else 1
    p = p._replace(in_integers=True, ahead_x=1, groups=groups)
    # registers for 4 programs of four warps, or 2 of eight: a loop of 4 steps needs more than all of 8 at once
    return p._replace(ahead=1 if p.names > 1 else 4 if p.steps * groups <= 8 else 2)


def product(
    x: jax.Array,
    weights: list[dict[str, jax.Array]],
    biases: list[jax.Array],
    tiles: Tiles,
    p: FewPlan,
    *,
    reads: int = 1,
    epilogue: Callable[[list], list] = lambda sums: sums,
    dtype: Any = None,
) -> jax.Array:
    """Multiply the rows of each tile by its expert's weights [E, out, in]: x [.., in] -> [R, out].

    Args:
        x: The tokens.
        weights: The arrays of each weight.
        biases: A bias [E, out] for each weight, or none.
        tiles: The tiles.
        p: The plan.
        reads: The row of the table with the first row that a tile reads.
        epilogue: A function from the sums of each weight, [8, rows] f32, to a list with the output.
        dtype: The dtype of the output; x's if None.
    """
    kinds = ("codes", "scale", "zero")[: 3 if p.form.name == "uint4" else 2]
    arrays = {kind: [w[kind] for w in weights] for kind in kinds} | {"bias": biases}
    leaves, tree = jax.tree.flatten(arrays)

    def entry(table_ref: Any, x_ref: Any, *refs: Any) -> None:
        inputs, out_ref = jax.tree.unflatten(tree, refs[:-1]), refs[-1]
        finish = functools.partial(_finish, p, epilogue, out_ref)
        _program(p, None if is_matrix else reads, len(tiles.row), finish, table_ref, x_ref, inputs)

    is_matrix = tiles.table.shape[1] == len(weights[0]["codes"]) == 1  # with one tile, of all tokens
    return plgpu.kernel(
        entry,
        out_type=jax.ShapeDtypeStruct((tiles.R, p.out), dtype or x.dtype),
        grid=(tiles.table.shape[1], p.out // p.rows),
        grid_names=("tile", "block"),
        num_threads=p.groups,
        thread_name="group",
        kernel_name=f"packed_few_{p.form.name}{'_gated' if p.names > 1 else ''}",
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )(tiles.table, x, *leaves)


def _program(p: FewPlan, reads: int | None, T: int, finish: Callable, table_ref: Any, x_ref: Any, inputs: dict) -> None:
    """Compute some blocks of rows for one tile; if `reads` is None, one tile holds all T tokens."""

    def body(partial: Any, done: Any, *memory: Any) -> None:
        expert, source, target, count = _tile_of(table_ref, reads, T, lax.axis_index("tile") if reads else None)
        row = lax.axis_index("block") * p.rows
        _add_up(p, (partial, *memory), x_ref, inputs, expert, row, source, count)
        plgpu.commit_smem()
        plgpu.barrier_arrive(done)

        @pl.when(lax.axis_index("group") == 0)
        def _() -> None:
            plgpu.barrier_wait(done)
            finish(partial, target, row, count)

    memory = [plgpu.SMEM((p.warps, p.names, FEW, p.rows), jnp.float32), plgpu.Barrier(num_arrivals=p.groups)]
    if p.in_integers:
        memory += [plgpu.SMEM((n,), jnp.int32) for n in packed_integer.sizes(p)]
    run = functools.partial(pl.run_scoped, body, *memory, collective_axes="group")
    if reads is None or p.in_integers:  # the experts of one token are distinct: all tiles are in use
        run()
    else:
        pl.when(tile_number(table_ref, 3, lax.axis_index("tile")) > 0)(run)


def _tile_of(table_ref: Any, reads: int | None, T: int, tile: Any) -> tuple:
    """Return a tile's expert, first row read, first row written, and tokens."""
    if reads is None:  # known at trace time: the kernel need not load the table first
        return tuple(jnp.int32(n) for n in (0, 0, 0, T))
    return tuple(tile_number(table_ref, i, tile) for i in (0, reads, 2, 3))


def _finish(p: FewPlan, epilogue: Callable, out_ref: Any, partial: Any, target: Any, row: Any, count: Any) -> None:
    """Add up the warps' sums and store the output."""
    own = [[_strided(p, partial[warp, i]) for warp in range(p.warps)] for i in range(p.names)]
    (y,) = epilogue([functools.reduce(jnp.add, sums) for sums in own])
    _store(p, y.astype(out_ref.dtype), out_ref, target, row, count)


def _strided(p: FewPlan, values: jax.Array) -> jax.Array:
    """Return values [8, rows] with neighbours along the rows in a thread."""
    return plgpu.layout_cast(values, plgpu.Layout.WG_STRIDED((FEW, p.rows), vec_size=p.blocks))


def _store(p: FewPlan, y: jax.Array, out_ref: Any, target: jax.Array, row: jax.Array, count: jax.Array) -> None:
    """Store the first `count` tokens of y [8, rows] from row `target` and column `row` of the output on."""

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WG_STRIDED((FEW, p.rows), vec_size=p.blocks), plgpu.RefType(), *[SCALAR] * 3)
    )
    def store(_: Any, y: Any, out_ref: Any, *scalars: Any) -> None:
        from jaxlib.mlir.dialects import llvm

        target, row, count = (_as_i32(x) for x in scalars)
        place = times(thread(), p.blocks)
        token, column = arith.divui(place, c(p.rows)), arith.remui(place, c(p.rows))
        branch = scf.IfOp(arith.cmpi(arith.CmpIPredicate.slt, token, count))
        with ir.InsertionPoint(branch.then_block):
            kind = ir.MemRefType(out_ref.type).element_type
            (register,) = y.registers.flat
            pointer = address(out_ref, wide(arith.addi(target, token)), p.out, wide(arith.addi(row, column)), kind)
            llvm.store(register, pointer)
            scf.yield_([])

    store(y, out_ref, target, row, count)


def _add_up(
    p: FewPlan, memory: tuple, x_ref: Any, inputs: dict[str, list], expert: Any, row: Any, source: Any, count: Any
) -> None:
    """Store the sums of each warp, with scales and biases, as the first array of memory [warp, weight, token, row]."""
    kinds = [kind for kind, refs in inputs.items() if refs]
    refs = [ref for kind in kinds for ref in inputs[kind]]

    given = [*memory, x_ref], refs

    @plgpu.inline_mgpu(arg_types=(*[[plgpu.RefType()] * len(each) for each in given], *[SCALAR] * 4))
    def run(_: Any, arrays: list, refs: list, *scalars: Any) -> None:
        each = len(refs) // len(kinds)
        found = {kind: refs[i * each :][:each] for i, kind in enumerate(kinds)}
        kind: Any = packed_integer.IntegerWarp if p.in_integers else Warp
        kind(p, *arrays, found, *map(_as_i32, scalars)).run()

    run(*given, expert, row, source, count)


def _as_i32(array: Any) -> Any:
    return array.registers.flat[0]
