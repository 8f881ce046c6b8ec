"""Products of many tokens with packed weights for Hopper (Pallas, Mosaic GPU): copies run ahead of the products.

The arithmetic is that of packed_fp8: products of e4m3 numbers, with each token as two of them, for experts in mxfp4 and
fp8. What is around it differs from packed_product:

- A program stays on its multiprocessor and computes one item after another: some rows of a tile's weights. One
  warpgroup copies codes and tokens (TMA), also those of the next item, ahead of two or three that compute.
- These share the tokens in shared memory, of which packed_product copies as many bytes for each 64 rows as of codes.
- A part's products run while the codes of the next one become numbers.

Each step of the input has a slot of shared memory. Its barrier `loaded` completes when its copies have arrived, and
`released` when all workers, the warpgroups that compute, have read it. Scales and biases have memory and barriers of
their own.
"""

from __future__ import annotations

import functools
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
from dovetail.ops.kernels.gpu.experts import CHUNK, Tiles, begin_stores, shared_tiles
from dovetail.ops.kernels.gpu.packed_codes import ROWS
from dovetail.ops.kernels.gpu.packed_halves import E4M3, STEP, split_rows

PROGRAMS = 132  # multiprocessors of an H100 or H200 (SXM)
GROUPS = {"mxfp4": (32,), "fp8": (0, 128)}  # of values under a scale, by the format
SHARED = 226 * 1024  # bytes of shared memory of a program
LEAST_STAGES, MOST_STAGES = 3, 8
REGISTERS = {3: (152, 56), 2: (224, 56)}  # of a thread that computes and of one that copies, by the workers
MOST_SUMS = 80  # of these registers, with three workers: accumulators of one part and the sums of all


class PipelinePlan(NamedTuple):
    """Describe a product: what a worker computes, 64 rows of each weight, and the number of workers."""

    part: packed_product.Plan
    workers: int  # warpgroups that compute
    buffers: int = 1  # of scales and biases: with two, the next item's arrive while an item is computed

    @property
    def parts(self) -> int:
        """Return the blocks of 64 rows that a program computes at a time: a worker's are next to each other."""
        return self.workers * self.part.names


def fits(form: Format, shape: tuple[int, ...], names: int = 1) -> bool:
    """Return whether there are products with this format and shape, and shared memory for the largest tiles."""
    if form.group not in GROUPS.get(form.name, ()) or (form.name == "fp8" and shape[-1] % STEP):
        return False  # copies into tiles are of rows of whole tiles
    return _plan(form, packed_fp8.MOST_TOKENS, shape, names).part.stages >= 2


def plan(form: Format, tiles: Tiles, shape: tuple[int, ...], names: int = 1) -> PipelinePlan:
    """Return the plan of a product with weights [.., out, in]."""
    return _plan(form, tiles.N, shape, names)


def _plan(form: Format, N: int, shape: tuple[int, ...], names: int) -> PipelinePlan:
    part = packed_product.Plan(form, N, STEP, form.group or STEP, shape[-1], names, 1, 1, 0)
    workers = 3 if (names + 1) * N // 2 <= MOST_SUMS else 2
    tried = [PipelinePlan(_with_stages(part, workers, buffers), workers, buffers) for buffers in (2, 1)]
    return next((p for p in tried if p.part.stages >= LEAST_STAGES), tried[1])


def _with_stages(part: packed_product.Plan, workers: int, buffers: int) -> packed_product.Plan:
    """Return the plan with as many stages as there is shared memory for."""
    step = workers * part.names * ROWS * part.inner // CODES[part.form.name][1] + part.N * part.inner * 2
    vectors = part.names * (ROWS * packed_product.scale_bytes(part.form, part.size) + 448)
    fitting = (SHARED - workers * (buffers * vectors + ROWS * part.N * 2)) // step
    return part._replace(stages=min(fitting, MOST_STAGES, max(2, part.steps)))


class PipelineMemory(NamedTuple):
    """Hold the shared memory and the barriers of a program."""

    codes: Any  # [stages, workers x parts, 64, bytes]
    x: Any  # [stages, 2, N, inner]
    vectors: dict[str, Any]  # scales, biases and the tokens' magnitudes [buffers x workers x parts, ..]
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
    arrays = {kind: [packed_product.in_blocks(kind, w[kind], p.part) for w in weights] for kind in ("codes", "scale")}
    arrays |= {"bias": biases} if biases else {}
    both, greatest = split_rows(x, tiles.source if x is tiles.x else None, p.part.form.name)
    arrays["token"] = [greatest] * p.part.names
    if p.part.form.name == "mxfp4":
        arrays["lanes"] = [jnp.asarray(packed_fp8.tables().view(np.int32).reshape(-1))]
    leaves, tree = jax.tree.flatten(arrays)

    def entry(table_ref: Any, x_ref: Any, *refs: Any) -> None:
        inputs = jax.tree.unflatten(tree, refs[:-1])
        body = functools.partial(_program, p, epilogue, reads, table_ref, x_ref, inputs, refs[-1])
        pl.run_scoped(body, *_memory(p, inputs, x.dtype), collective_axes="warpgroup")

    return plgpu.kernel(
        entry,
        out_type=jax.ShapeDtypeStruct((tiles.R, out), x.dtype),
        grid=(PROGRAMS,),
        grid_names=("program",),
        num_threads=p.workers + 1,
        thread_name="warpgroup",
        kernel_name=f"packed_pipeline_{p.part.form.name}",
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )(tiles.table, both, *leaves)


def _memory(p: PipelinePlan, inputs: dict[str, list], dtype: Any) -> PipelineMemory:
    """Return the shared memory of a program."""
    part, is_mxfp4 = p.part, p.part.form.name == "mxfp4"
    kinds = [kind for kind in inputs if kind not in ("codes", "lanes")]
    vectors = {kind: _vector(inputs[kind][0], p.buffers * p.parts, kind, part.N) for kind in kinds}
    shape = (part.stages, p.parts, ROWS, part.inner // CODES[part.form.name][1])
    # threads read mxfp4's codes of 16 bytes, without conflicts in this order
    codes = plgpu.SMEM(shape, jnp.uint8) if is_mxfp4 else packed_product.tiled_memory(shape, E4M3, part.inner)
    return PipelineMemory(
        codes,
        packed_product.tiled_memory((part.stages, 2, part.N, part.inner), E4M3, part.inner),
        vectors,
        shared_tiles((p.workers, 1, part.N, ROWS), dtype),
        plgpu.Barrier(num_arrivals=p.parts + 2, num_barriers=part.stages),
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
    registers = REGISTERS[p.workers]

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
        table = packed_fp8.lane_tables(inputs["lanes"][0]) if "lanes" in inputs else []
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
        _copy_halves(part.N, shared, x_ref, item, pl.ds(i * part.inner, part.inner), slot)
        return _next(slot, p)

    lax.fori_loop(0, part.steps, step, slot)


def _copy_halves(N: int, shared: PipelineMemory, x_ref: Any, item: TileRows, columns: Any, slot: Any) -> None:
    """Copy both numbers of a tile's tokens, without most of the rows past the last token.

    These rows of shared memory have any numbers, and their sums are not stored. Values past the end of a row are zeros.
    """
    step = CHUNK if N <= 40 else 2 * CHUNK
    for rows in range(N, 0, -step):

        @pl.when((item.count <= rows) & (item.count > rows - step))
        def _(rows: int = rows) -> None:
            for half in range(2):
                tokens = x_ref.at[half, pl.ds(item.source, rows), columns]
                plgpu.copy_gmem_to_smem(tokens, shared.x.at[slot, half, pl.ds(0, rows)], shared.loaded.at[slot])


def _copy_vectors(N: int, shared: PipelineMemory, inputs: dict[str, list], item: TileRows, parts: list) -> None:
    """Copy the scales and biases of an item, and its tokens' magnitudes."""
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

    def release(slot: Any) -> None:
        plgpu.barrier_arrive(shared.released.at[_previous(slot, p)])

    own, following = WorkerView(first, vectors), functools.partial(_next, p=p)
    sums, greatest = packed_fp8.sums(part, shared, own, slot, table, release, following)
    sums = packed_fp8.finished(part, sums, greatest, vectors)
    plgpu.barrier_arrive(shared.vectors_released.at[item.buffer])
    block = jnp.minimum(item.block + worker, out_ref.shape[1] // ROWS - 1)
    results, rows = shared.results.at[worker], [pl.ds(block * ROWS, ROWS)]
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last item's
    begin_stores(epilogue(sums), results, out_ref, rows, item.target, item.count)


class WorkerView(NamedTuple):
    """Hold what a worker reads alone."""

    first: Any  # of its parts among those of all workers
    vectors: dict[str, list]  # of its parts
