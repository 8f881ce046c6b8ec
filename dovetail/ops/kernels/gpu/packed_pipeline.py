"""Products of many tokens with packed weights for Hopper (Pallas, Mosaic GPU): copies run ahead of the products.

The arithmetic is that of packed_product: codes become bf16 numbers in registers, which are the left operand of a
warpgroup's products with the tokens. What is around it differs:

- A program stays on its multiprocessor and computes one item after another: some rows of a tile's weights. One
  warpgroup copies codes and tokens (TMA), also those of the next item, ahead of two or three that compute.
- These share the tokens in shared memory, of which packed_product copies as many bytes for each 64 rows as of codes.
- Products run while the next codes are unpacked; sums stay in the accumulators where no scales multiply them.

Each step of the input has a slot of shared memory. Its barrier `loaded` completes when its copies have arrived, and
`released` when all workers, the warpgroups that compute, have read it. Scales and biases have memory and barriers of
their own.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dovetail.core.formats import CODES, Format
from dovetail.ops.kernels.gpu import packed_fp8, packed_product
from dovetail.ops.kernels.gpu.experts import ACC, CHUNK, Tiles, begin_stores, shared_tiles
from dovetail.ops.kernels.gpu.packed_codes import PRODUCT, REGISTER, ROWS, in_order

PROGRAMS = 132  # multiprocessors of an H100 or H200 (SXM)
MOST_TOKENS = packed_product.MOST_TOKENS | {0: 128}  # of a tile, by the group of scales that multiply sums
PIECE = 64  # values of a row that are unpacked at a time: their registers are held until they are multiplied
SHARED, FP8_SHARED = 222 * 1024, 226 * 1024  # bytes of shared memory of a program
LEAST_STAGES, MOST_STAGES = 3, 8
REGISTERS = {3: (160, 32), 2: (232, 40)}  # of a thread that computes and of one that copies, by the workers
NO_VECTORS = ("codes", "lanes")  # of the inputs
FP8_REGISTERS = {3: (152, 56), 2: (224, 56)}  # there are more kinds of copies
MOST_SUMS, MOST_FP8_SUMS = 80, 80  # of these registers, with three workers


class PipelinePlan(NamedTuple):
    """Describe a product: what a worker computes, 64 rows of each weight, and the number of workers."""

    part: packed_product.Plan
    workers: int  # warpgroups that compute
    is_fp8: bool = False  # with the arithmetic of packed_fp8
    buffers: int = 1  # of scales and biases: with two, the next item's arrive while an item is computed

    @property
    def parts(self) -> int:
        """Return the blocks of 64 rows that a program computes at a time: a worker's are next to each other."""
        return self.workers * self.part.names


def takes_fp8(form: Format) -> bool:
    """Return whether products with this format are those of e4m3 numbers; DOVETAIL_UNMEASURED_KERNELS=2: of bf16."""
    return form.name in ("mxfp4", "fp8") and os.environ.get("DOVETAIL_UNMEASURED_KERNELS") != "2"


def most_tokens(form: Format) -> int:
    """Return the most tokens of a tile."""
    if takes_fp8(form):
        return packed_fp8.MOST_TOKENS
    return MOST_TOKENS[0 if form.name == "mxfp4" else form.group]


def fits(form: Format, shape: tuple[int, ...], names: int = 1) -> bool:
    """Return whether shared memory holds what a product of the largest tiles needs."""
    return _plan(form, most_tokens(form), shape, names).part.stages >= 2


def plan(form: Format, tiles: Tiles, shape: tuple[int, ...], names: int = 1) -> PipelinePlan:
    """Return the plan of a product with weights [.., out, in]."""
    return _plan(form, tiles.N, shape, names)


def _plan(form: Format, N: int, shape: tuple[int, ...], names: int) -> PipelinePlan:
    if takes_fp8(form):
        part = packed_product.Plan(form, N, packed_fp8.STEP, form.group or packed_fp8.STEP, shape[-1], names, 1, 1, 0)
        workers = 3 if (names + 1) * N // 2 <= MOST_FP8_SUMS else 2  # with the accumulators of one part
        tried = [
            PipelinePlan(_with_stages(part, workers, buffers, FP8_SHARED), workers, True, buffers) for buffers in (2, 1)
        ]
        return next((p for p in tried if p.part.stages >= LEAST_STAGES), tried[1])
    part = packed_product.Plan(form, N, 128, form.group or PIECE, shape[-1], names, 1, 1, 0)
    sums = names * N // 2 * (1 + part.scales_sums)
    wide = (256, 192, 128) if form.name == "mxfp4" else (128,)
    tried = [
        PipelinePlan(_with_stages(part._replace(inner=inner), workers), workers)
        for workers in ((3, 2) if sums <= MOST_SUMS else (2,))
        for inner in wide
    ]
    return min(tried, key=_cost)


def _cost(p: PipelinePlan) -> tuple[int, ...]:
    """Compare plans: enough stages, many workers, few values past the end of a row, and then few steps."""
    return -min(p.part.stages, LEAST_STAGES), -p.workers, p.part.steps * p.part.inner, p.part.steps


def _with_stages(
    part: packed_product.Plan, workers: int, buffers: int = 1, shared: int = SHARED
) -> packed_product.Plan:
    """Return the plan with as many stages as there is shared memory for."""
    step = workers * part.names * ROWS * part.inner // CODES[part.form.name][1] + part.N * part.inner * 2
    vectors = part.names * (ROWS * packed_product.scale_bytes(part.form, part.size) + 448)
    fitting = (shared - workers * (buffers * vectors + ROWS * part.N * 2)) // step
    return part._replace(stages=min(fitting, MOST_STAGES, max(2, part.steps)))


class PipelineMemory(NamedTuple):
    """Hold the shared memory and the barriers of a program."""

    codes: Any  # [stages, workers x parts, 64, bytes]
    x: Any  # [stages, N, inner]
    vectors: dict[str, Any]  # scales, zero points and biases [buffers x workers x parts, ..]
    results: Any  # [workers, 1, N, 64]
    loaded: Any
    released: Any
    vectors_loaded: Any
    vectors_released: Any


class TileRows(NamedTuple):
    """Describe what a program computes at a time."""

    expert: Any
    source: Any  # first row read
    target: Any  # first row written
    count: Any  # of tokens
    block: Any  # the first one, of 64 rows
    buffer: Any  # of its scales and biases


def product(
    x: jax.Array,
    weights: list[dict[str, jax.Array]],
    biases: list[jax.Array],
    tiles: Tiles,
    p: PipelinePlan,
    *,
    reads: int = 1,
    epilogue: Callable[[list], list] = lambda sums: sums,
) -> jax.Array:
    """Multiply as packed_product.product does, with a plan of this module."""
    out = weights[0]["codes"].shape[1]
    kinds = ("codes", "scale", "zero")[: 3 if p.part.form.name == "uint4" else 2]
    arrays = {kind: [packed_product.in_blocks(kind, w[kind], p.part) for w in weights] for kind in kinds}
    dtype = x.dtype
    if p.is_fp8:
        x, greatest = packed_fp8.split_rows(x, tiles.source if x is tiles.x else None, p.part.form.name)
        arrays |= {"token": [greatest] * p.part.names, "lanes": [packed_fp8.tables().view(np.int32).reshape(-1)]}
    else:
        x = in_order(x, p.part.form.name)
    leaves, tree = jax.tree.flatten(arrays | ({"bias": biases} if biases else {}))

    def entry(table_ref: Any, x_ref: Any, *refs: Any) -> None:
        inputs = jax.tree.unflatten(tree, refs[:-1])
        body = functools.partial(_program, p, epilogue, reads, table_ref, x_ref, inputs, refs[-1])
        pl.run_scoped(body, *_memory(p, inputs, dtype), collective_axes="warpgroup")

    return plgpu.kernel(
        entry,
        out_type=jax.ShapeDtypeStruct((tiles.R, out), dtype),
        grid=(PROGRAMS,),
        grid_names=("program",),
        num_threads=p.workers + 1,
        thread_name="warpgroup",
        kernel_name=f"packed_pipeline_{p.part.form.name}" + "_fp8" * p.is_fp8,
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )(tiles.table, x, *leaves)


def _memory(p: PipelinePlan, inputs: dict[str, list], dtype: Any) -> PipelineMemory:
    """Return the shared memory of a program."""
    part, per_byte = p.part, CODES[p.part.form.name][1]
    width = part.inner // per_byte
    swizzle = math.gcd(128, max(PIECE, part.form.group) // per_byte, part.size // per_byte)
    parts = p.buffers * p.parts
    vectors = {kind: _vector(refs[0], parts, kind, part.N) for kind, refs in inputs.items() if kind not in NO_VECTORS}
    codes, tokens = (part.stages, p.parts, ROWS, width), packed_product.token_memory(part, dtype)
    memory = packed_product.tiled_memory(codes, inputs["codes"][0].dtype, swizzle)
    if p.is_fp8:
        tokens = packed_product.tiled_memory((part.stages, 2, part.N, part.inner), packed_fp8.E4M3, part.inner)
        # threads read mxfp4's codes of 16 bytes, in this order without conflicts
        memory = (
            plgpu.SMEM(codes, jnp.uint8)
            if per_byte == 2
            else packed_product.tiled_memory(codes, packed_fp8.E4M3, part.inner)
        )
    return PipelineMemory(
        memory,
        tokens,
        vectors,
        shared_tiles((p.workers, 1, part.N, ROWS), dtype),
        plgpu.Barrier(num_arrivals=p.parts + 1 + p.is_fp8, num_barriers=part.stages),
        plgpu.Barrier(num_arrivals=p.workers, num_barriers=part.stages),
        plgpu.Barrier(num_arrivals=p.parts * len(vectors), num_barriers=p.buffers),
        plgpu.Barrier(num_arrivals=p.workers, num_barriers=p.buffers),
    )


def _vector(ref: Any, parts: int, kind: str, N: int) -> Any:
    """Return shared memory for what _copy_vectors copies; copies go to multiples of 128 bytes."""
    if kind == "token":
        return plgpu.SMEM((parts, pl.cdiv(N, 32) * 32), ref.dtype)
    if kind == "bias" or len(ref.shape) == 2:
        return plgpu.SMEM((parts, ROWS), ref.dtype)
    *rows, width = ref.shape[1:]
    whole = max(1, 128 // (width * jnp.dtype(ref.dtype).itemsize))
    return plgpu.SMEM((parts, pl.cdiv(rows[0], whole) * whole, width), ref.dtype)


def _program(
    p: PipelinePlan, epilogue: Callable, reads: int,
    table_ref: Any, x_ref: Any, inputs: dict[str, list], out_ref: Any, *memory: Any,
) -> None:  # fmt: skip
    """Take the items of a program, by the number of the warpgroup: compute, or copy."""
    shared = PipelineMemory(*memory)
    program, worker = lax.axis_index("program"), lax.axis_index("warpgroup")
    per_tile = pl.cdiv(out_ref.shape[1], p.workers * ROWS)
    items = table_ref.shape[1] * per_tile
    registers = (FP8_REGISTERS if p.is_fp8 else REGISTERS)[p.workers]

    def over(run: Callable) -> Any:
        """Call run(item, its first slot) for each item in use; return the slot after the last one."""

        def body(turn: Any, carry: tuple) -> tuple:
            slot, buffer = carry
            at = program + turn * PROGRAMS
            tile = lax.div(at, per_tile)
            expert, source, target, count = (table_ref[i, tile] for i in (0, reads, 2, 3))
            source, target = pl.multiple_of(source, CHUNK), pl.multiple_of(target, CHUNK)
            item = TileRows(expert, source, target, count, lax.rem(at, per_tile) * p.workers, buffer)
            pl.when(count > 0)(lambda: run(item, slot))
            after = lax.rem(slot + p.part.steps, p.part.stages), lax.rem(buffer + 1, p.buffers)
            return tuple(jnp.where(count > 0, new, old) for new, old in zip(after, carry, strict=True))

        mine = lax.div(items - program + PROGRAMS - 1, PROGRAMS)
        return lax.fori_loop(0, mine, body, (jnp.int32(0), jnp.int32(0)))[0]

    @pl.when(worker < p.workers)
    def _compute() -> None:
        plgpu.set_max_registers(registers[0], action="increase")
        for buffer in range(p.buffers):
            plgpu.barrier_arrive(shared.vectors_released.at[buffer])
        for slot in range(p.part.stages - 1):  # the first step releases the last one
            plgpu.barrier_arrive(shared.released.at[slot])
        table = packed_fp8.lane_tables(inputs["lanes"][0]) if p.is_fp8 and p.part.form.name == "mxfp4" else []
        slot = over(functools.partial(_compute_item, p, epilogue, shared, worker, out_ref, table))
        plgpu.barrier_arrive(shared.released.at[_previous(slot, p)])
        plgpu.wait_smem_to_gmem(0)

    @pl.when(worker == p.workers)
    def _copy() -> None:
        plgpu.set_max_registers(registers[1], action="decrease")
        over(functools.partial(_copy_item, p, shared, x_ref, inputs))
        for buffer in range(p.buffers):  # nothing arrives in a program that has ended
            plgpu.barrier_wait(shared.vectors_released.at[buffer])
        for slot in range(p.part.stages):
            plgpu.barrier_wait(shared.released.at[slot])


def _previous(slot: Any, p: PipelinePlan) -> Any:
    return jnp.where(slot == 0, p.part.stages - 1, slot - 1)


def _next(slot: Any, p: PipelinePlan) -> Any:
    return jnp.where(slot == p.part.stages - 1, 0, slot + 1)


def _copy_item(
    p: PipelinePlan, shared: PipelineMemory, x_ref: Any, inputs: dict[str, list], item: TileRows, slot: Any
) -> None:
    """Copy what an item reads as shared memory is released."""
    part, width = p.part, shared.codes.shape[-1]
    last = inputs["codes"][0].shape[1] // ROWS - 1  # workers past it compute it again
    parts = [(name, jnp.minimum(item.block + i, last)) for i in range(p.workers) for name in range(part.names)]

    def step(i: Any, slot: Any) -> Any:
        # Into a single buffer scales come after the steps for which slots are free while the last item is computed.
        first = min(part.stages, part.steps) - 1 if p.buffers == 1 else 0
        pl.when(i == first)(lambda: _copy_vectors(part.N, shared, inputs, item, parts))
        plgpu.barrier_wait(shared.released.at[slot])
        for which, (name, block) in enumerate(parts):
            codes = inputs["codes"][name].at[item.expert, pl.ds(block * ROWS, ROWS), pl.ds(i * width, width)]
            plgpu.copy_gmem_to_smem(codes, shared.codes.at[slot, which], shared.loaded.at[slot])
        columns = pl.ds(i * part.inner, part.inner)
        if p.is_fp8:
            _copy_halves(part.N, shared, x_ref, item, columns, slot)
        else:  # values past the end of rows, and rows past the last one, are zeros
            tokens = x_ref.at[pl.ds(item.source, part.N), columns]
            plgpu.copy_gmem_to_smem(tokens, shared.x.at[slot], shared.loaded.at[slot])
        return _next(slot, p)

    lax.fori_loop(0, part.steps, step, slot)


def _copy_halves(N: int, shared: PipelineMemory, x_ref: Any, item: TileRows, columns: Any, slot: Any) -> None:
    """Copy both numbers of a tile's tokens, without most of the rows past the last token.

    These rows of shared memory have any numbers, and their sums are not stored.
    """
    step = CHUNK if N <= 40 else 2 * CHUNK
    for rows in range(N, 0, -step):

        @pl.when((item.count <= rows) & (item.count > rows - step))
        def _(rows: int = rows) -> None:
            for half in range(2):
                tokens = x_ref.at[half, pl.ds(item.source, rows), columns]
                plgpu.copy_gmem_to_smem(tokens, shared.x.at[slot, half, pl.ds(0, rows)], shared.loaded.at[slot])


def _copy_vectors(N: int, shared: PipelineMemory, inputs: dict[str, list], item: TileRows, parts: list) -> None:
    """Copy the scales, zero points and biases of an item, and its tokens' magnitudes."""
    per_expert = inputs["codes"][0].shape[1] // ROWS
    plgpu.barrier_wait(shared.vectors_released.at[item.buffer])
    for kind, target in shared.vectors.items():
        for which, (name, block) in enumerate(parts):
            ref, i = inputs[kind][name], item.buffer * len(parts) + which
            if kind == "bias":
                ref, into = ref.at[item.expert, pl.ds(block * ROWS, ROWS)], target.at[i]
            elif kind == "token":
                ref, into = ref.at[pl.ds(item.source, N)], target.at[i, pl.ds(0, N)]
            else:
                ref = ref.at[item.expert * per_expert + block]
                into = target.at[i, pl.ds(0, ref.shape[0])]
            plgpu.copy_gmem_to_smem(ref, into, shared.vectors_loaded.at[item.buffer])


def _compute_item(
    p: PipelinePlan, epilogue: Callable, shared: PipelineMemory, worker: Any, out_ref: Any, table: list,
    item: TileRows, slot: Any,
) -> None:  # fmt: skip
    """Compute a worker's rows of an item, and store them."""
    part, first = p.part, worker * p.part.parts
    begin = item.buffer * p.parts + first
    vectors = {kind: [ref.at[begin + i] for i in range(part.parts)] for kind, ref in shared.vectors.items()}
    plgpu.barrier_wait(shared.vectors_loaded.at[item.buffer])
    own = WorkerView(first, vectors)
    if p.is_fp8:

        def release(slot: Any) -> None:
            plgpu.barrier_arrive(shared.released.at[_previous(slot, p)])

        sums, greatest = packed_fp8.sums(part, shared, own, slot, table, release, functools.partial(_next, p=p))
        sums = packed_fp8.finished(part, sums, greatest, vectors)
    else:
        sums = packed_product.finished(part, _sums(p, shared, own, slot), vectors)
    plgpu.barrier_arrive(shared.vectors_released.at[item.buffer])
    block = jnp.minimum(item.block + worker, out_ref.shape[1] // ROWS - 1)
    results, rows = shared.results.at[worker], [pl.ds(block * ROWS, ROWS)]
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last item's
    begin_stores(epilogue(sums), results, out_ref, rows, item.target, item.count)


class WorkerView(NamedTuple):
    """Hold what a worker reads alone, as packed_product reads it."""

    first: Any  # of its parts among those of all workers
    vectors: dict[str, list]  # of its parts
    codes: Any = None  # by slot and part: those that are in registers


def _sums(p: PipelinePlan, shared: PipelineMemory, own: Any, slot: Any) -> list[jax.Array]:
    """Return the products of each of a worker's parts with the tokens over all steps, [64, N] f32."""
    part, acc = p.part, ACC((ROWS, p.part.N), jnp.float32)
    groups = part.inner // part.group if part.scales_sums else 1

    def run(sums: list) -> list[jax.Array]:
        def step(i: Any, slot: Any) -> Any:
            _issue(p, shared, own, slot, i, [[each] for each in sums])
            return _next(slot, p)

        lax.fori_loop(0, part.steps, step, slot)
        return [each[...] for each in sums]

    if not part.scales_sums:
        return pl.run_scoped(run, [acc] * part.parts)

    def step(i: Any, carry: tuple) -> tuple:
        def multiply(sums: list) -> list:
            _issue(p, shared, own, carry[0], i, sums)
            return [[each[...] for each in of] for of in sums]

        totals = list(carry[1])
        for n, found in enumerate(pl.run_scoped(multiply, [[acc] * groups] * part.parts)):
            for j, x in enumerate(found):
                totals[n] += x * packed_product.spread(part, own, "scale", n, i * groups + j, x)
        return _next(carry[0], p), tuple(totals)

    zeros = plgpu.layout_cast(jnp.zeros((ROWS, part.N), jnp.float32), PRODUCT)
    return list(lax.fori_loop(0, part.steps, step, (slot, (zeros,) * part.parts))[1])


def _issue(p: PipelinePlan, shared: PipelineMemory, own: Any, slot: Any, step: Any, sums: list[list]) -> None:
    """Add a step's products, for each part to the accumulators of its groups in turn.

    A piece's products run while the next piece is unpacked. A branch in a step would make ptxas wait for each product.
    """
    part = p.part._replace(inner=max(PIECE, p.part.form.group))
    pieces, groups = p.part.inner // part.inner, part.inner // part.group
    width = shared.codes.shape[-1] // pieces
    order = [(n, k) for n in range(part.parts) for k in range(pieces)]

    def load(n: int, k: int) -> jax.Array:
        return plgpu.layout_cast(shared.codes[slot, own.first + n, :, pl.ds(k * width, width)], REGISTER)

    plgpu.barrier_wait(shared.loaded.at[slot])
    codes = load(*order[0])
    for at, (n, k) in enumerate(order):
        view, codes = own._replace(codes={(0, n): codes}), load(*order[at + 1]) if at + 1 < len(order) else codes
        for j, values in enumerate(packed_product.unpacked(part, view, 0, n, (step * pieces + k) * groups)):
            tokens = shared.x.at[slot, :, pl.ds(k * part.inner + j * part.group, part.group)]
            packed_product.add_product(sums[n][(k * groups + j) % len(sums[n])], values, tokens)
        plgpu.wgmma_wait(groups)  # those of the piece before are done
        if at == 0:
            plgpu.barrier_arrive(shared.released.at[_previous(slot, p)])
