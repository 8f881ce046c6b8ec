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
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, scf

from dovetail.core.formats import Format
from dovetail.ops.capabilities import tries_unmeasured
from dovetail.ops.kernels.gpu.experts import Tiles
from dovetail.ops.kernels.gpu.packed_persistent import PersistentWarp, share, suits, token_words
from dovetail.ops.kernels.gpu.packed_warp import BLOCK, FewPlan, Warp
from dovetail.ops.kernels.gpu.warp_ops import address, as_vector, c, register, thread, times, wide

FEW = 8  # tokens of a tile
MANY = 4 * 132  # programs, from which on each multiprocessor has several of four warps
AHEAD = 4  # loads of 32 bytes by a thread that are under way
SMS = 132  # multiprocessors
MOST_PROGRAMS = {1: 4, 2: 3}  # persistent ones of a multiprocessor whose registers it has, by the weights
SHARED, RESERVED = 227 * 1024, 1280  # bytes of shared memory: of a multiprocessor, and used by each program beside its own
SCALAR = plgpu.Layout.WG_SPLAT(())


def plan(form: Format, tiles: Tiles, shape: tuple[int, ...], names: int = 1, is_joined: bool = False) -> FewPlan:
    """Return the plan of a product with `names` weights [.., out, in], or with one that holds them joined."""
    out, size = shape[-2] // (names if is_joined else 1), shape[-1]
    programs = tiles.table.shape[1] * out // BLOCK
    p = FewPlan(form, size, out, names, 1, max(1, AHEAD // names), is_joined=is_joined)
    if tries_unmeasured() and (found := _persistent(p, tiles)):
        return found
    if p.per_byte == 1:
        return p._replace(groups=2, ahead=2) if programs < MANY else p
    # programs share what they read of the tokens, which are many bytes beside 4 bits
    shares = names == 1 and programs >= 2 * MANY and len(tiles.row) > FEW // 2 and out % (2 * BLOCK) == 0
    return p._replace(blocks=2) if shares else p


def _persistent(p: FewPlan, tiles: Tiles) -> FewPlan | None:
    """Return the plan of programs that compute several blocks in turn, if shared memory has room for the tokens."""
    p = p._replace(ahead=min(p.ahead, p.steps), tokens=min(FEW, len(tiles.row)))
    shared = 4 * (p.tokens * token_words(p) + 2 * p.warps * p.names * FEW * p.rows) + RESERVED
    at_once = min(MOST_PROGRAMS[p.names], SHARED // shared)
    if not suits(p) or at_once < 2:
        return None
    if tiles.table.shape[1] > 1:
        return p._replace(programs=SMS * at_once)
    blocks = p.out // p.rows  # as many for each program, or one less
    return p._replace(programs=pl.cdiv(blocks, pl.cdiv(blocks, SMS * at_once)))


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
        run = _persistent_program if p.programs else _program
        run(p, None if is_matrix else reads, len(tiles.row), epilogue, table_ref, x_ref, inputs, out_ref)

    is_matrix = tiles.table.shape[1] == len(weights[0]["codes"]) == 1  # with one tile, of all tokens
    grid = {"program": p.programs} if p.programs else {"tile": tiles.table.shape[1], "block": p.out // p.rows}
    return plgpu.kernel(
        entry,
        out_type=jax.ShapeDtypeStruct((tiles.R, p.out), dtype or x.dtype),
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        num_threads=p.groups,
        thread_name="group",
        kernel_name=f"packed_few_{p.form.name}",
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )(tiles.table, x, *leaves)


def _program(
    p: FewPlan, reads: int | None, T: int, epilogue: Callable, table_ref: Any, x_ref: Any, inputs: dict, out_ref: Any
) -> None:
    """Compute some blocks of rows for one tile; `reads` is None if there is one tile, of all T tokens."""

    def body(partial: Any, done: Any) -> None:
        expert, source, target, count = _tile(table_ref, reads, T, lax.axis_index("tile") if reads else None)
        row = lax.axis_index("block") * p.rows
        _add_up(p, partial, x_ref, inputs, expert, row, source, count)
        plgpu.commit_smem()
        plgpu.barrier_arrive(done)

        @pl.when(lax.axis_index("group") == 0)
        def _() -> None:
            plgpu.barrier_wait(done)
            _finish(p, epilogue, partial, out_ref, target, row, count)

    memory = plgpu.SMEM((p.warps, p.names, FEW, p.rows), jnp.float32), plgpu.Barrier(num_arrivals=p.groups)
    run = functools.partial(pl.run_scoped, body, *memory, collective_axes="group")
    if reads is None:
        run()
    else:
        pl.when(table_ref[3, lax.axis_index("tile")] > 0)(run)


def _tile(table_ref: Any, reads: int | None, T: int, tile: Any) -> tuple:
    """Return a tile's expert, first row read, first row written, and tokens."""
    if reads is None:  # without a load before the others
        return tuple(jnp.int32(n) for n in (0, 0, 0, T))
    return tuple(table_ref[i, tile] for i in (0, reads, 2, 3))


def _finish(
    p: FewPlan, epilogue: Callable, partial: Any, out_ref: Any, target: Any, row: Any, count: Any
) -> None:
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


def _persistent_program(
    p: FewPlan, reads: int | None, T: int, epilogue: Callable, table_ref: Any, x_ref: Any, inputs: dict, out_ref: Any
) -> None:
    """Compute some blocks of rows of one tile, one after another; see _program."""
    blocks = p.out // p.rows
    if reads is None:
        tile, part, each = None, lax.axis_index("program"), jnp.int32(p.programs)
    else:
        tile, part, each = _share(p, table_ref, lax.axis_index("program"))

    def body(partial: Any, own: Any) -> None:
        expert, source, target, count = _tile(table_ref, reads, T, tile)
        turns = lax.div(blocks - part + each - 1, each)
        warp = functools.partial(_turn, p, partial, x_ref, own, inputs, expert, source, count)

        def turn(n: jax.Array, ahead: jax.Array) -> jax.Array:
            row, slot = (part + n * each) * p.rows, n % 2  # the other slot may still be read
            ahead = warp(ahead, row, row + each * p.rows, n + 1 < turns, slot)
            _finish(p, epilogue, partial.at[slot], out_ref, target, row, count)
            return ahead

        ahead = warp(None, part * p.rows)
        if reads is None and p.programs == blocks:
            warp(ahead, part * p.rows)
            _finish(p, epilogue, partial.at[0], out_ref, target, part * p.rows, count)
        else:
            lax.fori_loop(0, turns, turn, ahead)

    memory = (
        plgpu.SMEM((2, p.warps, p.names, FEW, p.rows), jnp.float32), plgpu.SMEM((p.tokens * token_words(p),), jnp.int32),
    )  # fmt: skip
    run = functools.partial(pl.run_scoped, body, *memory, collective_axes="group")
    if reads is None:
        run()
    else:
        pl.when(part < jnp.minimum(each, blocks))(run)


def _share(p: FewPlan, table_ref: Any, program: Any) -> tuple:
    """Return the tile of a program, which of its programs this is (not below all: it has none), and how many it has."""
    scalar = plgpu.ShapeDtypeStruct((), jnp.int32, layout=SCALAR)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR), return_type=[scalar] * 3)
    def find(_: Any, table: Any, program: Any) -> list:
        found = share(table, table_ref.shape[1], p.programs, _as_i32(program))
        return [mgpu.FragmentedArray.splat(x, (), is_signed=True) for x in found]

    return tuple(find(table_ref, program))


def _turn(p: FewPlan, partial: Any, x_ref: Any, own: Any, inputs: dict[str, list], *given: Any) -> Any:
    """Begin (ahead None) or compute a block, and return what is loaded ahead.

    given: expert, source, count, ahead, row; and for a block the row after, whether there is one, and the slot.
    """
    kinds = [kind for kind, refs in inputs.items() if refs]
    refs = [ref for kind in kinds for ref in inputs[kind]]
    expert, source, count, ahead, row, *rest = given
    scalars, begins = [expert, source, count, row, *rest], ahead is None
    structure = PersistentWarp.structure(p)
    size = (structure.num_leaves * 128,)
    layout = plgpu.Layout.WG_STRIDED(size, vec_size=1)
    result = plgpu.ShapeDtypeStruct(size, jnp.int32, layout=layout) if begins or rest else None

    @plgpu.inline_mgpu(
        arg_types=(*[plgpu.RefType()] * 3, [plgpu.RefType()] * len(refs), [SCALAR] * len(scalars), [] if begins else [layout]),
        return_type=result,
    )
    def run(_: Any, partial: Any, x: Any, own: Any, refs: list, scalars: list, ahead: list) -> Any:
        each = len(refs) // len(kinds)
        found = {kind: refs[i * each :][:each] for i, kind in enumerate(kinds)}
        expert, source, count, row, *rest = map(_as_i32, scalars)
        warp = PersistentWarp(p, partial, x, own, found, expert, source, count)
        if begins:
            left = warp.begin(row)
            warp.fill()
        else:
            left = warp.block(row, jax.tree.unflatten(structure, [register(x) for x in ahead[0].registers.flat]), *rest)
        utils.warpgroup_barrier()
        if result is None:
            return None
        registers = np.array([as_vector(x) for x in jax.tree.leaves(left, is_leaf=lambda x: isinstance(x, ir.Value))], dtype=object)
        return mgpu.FragmentedArray(_registers=registers, _layout=layout.to_mgpu(), _is_signed=True)

    return run(partial, x_ref, own, refs, scalars, [] if begins else [ahead])


def _add_up(
    p: FewPlan, partial: Any, x_ref: Any, inputs: dict[str, list], expert: Any, row: Any, source: Any, count: Any
) -> None:
    """Store the sums of each warp, with scales and biases, as `partial` [warp, weight, token, row]."""
    kinds = [kind for kind, refs in inputs.items() if refs]
    refs = [ref for kind in kinds for ref in inputs[kind]]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), [plgpu.RefType()] * len(refs), *[SCALAR] * 4))
    def run(_: Any, partial: Any, x: Any, refs: list, *scalars: Any) -> None:
        each = len(refs) // len(kinds)
        found = {kind: refs[i * each :][:each] for i, kind in enumerate(kinds)}
        Warp(p, partial, x, found, *map(_as_i32, scalars)).run()

    run(partial, x_ref, refs, expert, row, source, count)


def _as_i32(array: Any) -> Any:
    return array.registers.flat[0]
