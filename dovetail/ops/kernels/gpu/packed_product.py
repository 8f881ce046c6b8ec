"""Products with packed weights for Hopper (Pallas, Mosaic GPU): codes of 8 or 4 bits are read once and never unpacked.

As in ops/kernels/gpu/experts.py, the weights are the left operand of a warpgroup's products, and the tokens the right
one. A program computes blocks of 64 rows of a weight for a tile of tokens. Codes arrive in shared memory (TMA), become
bf16 numbers in registers (packed_codes), and are multiplied from there. Scales are applied where they are exact:

- a scale for each row multiplies the sums at the end (int8, fp8),
- a power of two multiplies the numbers (mxfp4),
- other scales of groups multiply the sums of each group, in f32 (int4, uint4, fp8 in groups); zero points are
  subtracted from the numbers.

A matrix with few rows is also split along the input, so that there are enough programs; XLA adds the parts.

T tokens, E experts (1 for a matrix), N tokens of a tile, G scales of a row, S parts of the input.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dovetail.core.formats import CODES, Format
from dovetail.ops.kernels.gpu.experts import ACC, CHUNK, PROGRAMS, Tiles, shared_tiles, store_rows
from dovetail.ops.kernels.gpu.packed_codes import (
    GREATEST_SCALE,
    PER_ROW,
    PRODUCT,
    REGISTER,
    ROWS,
    SUMS,
    column,
    in_order,
    numbers,
    scale_bits,
)

FORMATS = ("int8", "fp8", "int4", "uint4", "mxfp4")
GROUPS = (0, 32, 64, 128)  # of values under a scale
# Most tokens of a tile by the group of scales that multiply sums: each has accumulators of its own.
MOST_TOKENS = {0: 64, 128: 64, 64: 32, 32: 16}
LEAST_TILE = 32  # bytes of a row in a tile of shared memory
MOST_COPIED = 256  # elements along each dim of a copy by TMA
# Bytes of shared memory of a program: three, two or one of them share a multiprocessor.
SHARED = (72 * 1024, 110 * 1024, 210 * 1024)
MOST_SCALES = 48 * 1024  # bytes of the scales of 64 rows
# Stages of a program: unpacking and products take turns in it, so that four programs with three stages each are faster
# than three with six (28,672 x 4,096 in int4 on an H200: 25.8 instead of 29.0 us for 1 token, 42.1 instead of 59.4 us
# for 64).
STAGES = 3
LEAST_STEPS = 4  # of a part of the input
LEAST_SHARE = 16  # values of the input for each token and part: the sums of parts are written and read in f32


class Plan(NamedTuple):
    """Describe a product: what a program computes, and what it has in shared memory."""

    form: Format
    N: int  # tokens of a tile
    inner: int  # values of a row in a step
    group: int  # of them under one scale, or all of a step
    size: int  # values of a row
    names: int  # weights with the same input: gate and up
    blocks: int  # of 64 rows of each weight that a program computes
    splits: int
    stages: int

    @property
    def parts(self) -> int:
        """Return the blocks of all weights."""
        return self.names * self.blocks

    @property
    def steps(self) -> int:
        """Return the steps of each part of the input; the last part may have fewer."""
        return pl.cdiv(pl.cdiv(self.size, self.inner), self.splits)

    @property
    def scales_sums(self) -> bool:
        """Return whether scales of groups multiply sums."""
        return bool(self.form.group) and self.form.name != "mxfp4"


def why_not_rows(form: Format, shape: tuple[int, ...]) -> str | None:
    """Return why the kernel cannot multiply by weights of this format and shape [.., out, in], or None."""
    out, size = shape[-2:]
    if form.name not in FORMATS or form.group not in GROUPS or (form.name == "fp8" and form.group not in (0, 128)):
        return f"no kernel for {form.describe()}"
    if out % ROWS or size % (LEAST_TILE * CODES[form.name][1]) or size % (form.group or 64):
        return f"a weight of {out} x {size}: tiles are whole"
    fits = ROWS * scale_bytes(form, size) <= MOST_SCALES and _strip(form, size)
    return None if fits else f"too many scales in rows of {size}"


def _strip(form: Format, size: int) -> tuple[int, int] | None:
    """Return the shape in which the scales of 64 rows are copied."""
    total = ROWS * (size // form.group if form.group else 1)
    return next(((total // n, n) for n in (64, 128, 256) if total % n == 0 and total // n <= MOST_COPIED), None)


def plan(form: Format, tiles: Tiles, shape: tuple[int, ...], names: int = 1, split: bool = False) -> Plan:
    """Return the plan of a product with weights [.., out, in]; `split` allows parts of the input."""
    N, (out, size), per_byte = tiles.N, shape[-2:], CODES[form.name][1]
    inner = 256 if per_byte == 2 and N <= 16 else 128
    programs = tiles.table.shape[1] * out // ROWS
    # blocks share what is read of the tokens, which are many bytes beside packed weights
    shared = N >= 32 if split else N > CHUNK and programs >= 2 * PROGRAMS
    blocks = 2 if shared and names == 1 and out % (2 * ROWS) == 0 else 1
    steps, programs = pl.cdiv(size, inner), programs // blocks
    few = min(PROGRAMS // programs, steps // LEAST_STEPS, size // (LEAST_SHARE * N))
    splits = max(1, few) if split else 1
    splits = pl.cdiv(steps, pl.cdiv(steps, splits))  # none is empty
    found = Plan(form, N, inner, form.group or inner, size, names, blocks, splits, 0)
    step = found.parts * ROWS * inner // per_byte + N * inner * 2
    rest = blocks * ROWS * N * 4 + found.parts * ROWS * (scale_bytes(form, size) + 4)
    fitting = [(size - rest) // step for size in SHARED]
    stages = next((n for n in fitting if n >= STAGES), fitting[-1])
    return found._replace(stages=max(1, min(stages, STAGES, found.steps)))


def scale_bytes(form: Format, size: int) -> int:
    """Return the bytes of scales and zero points of a row."""
    return sum(length * dtype.itemsize for name, (length, dtype) in form.lengths(size).items() if name != "codes")


def product(
    x: jax.Array,
    weights: list[dict[str, jax.Array]],
    biases: list[jax.Array],
    tiles: Tiles,
    p: Plan,
    *,
    reads: int = 1,
    epilogue: Callable[[list], list] = lambda sums: sums,
    in_parts: bool = False,
) -> jax.Array:
    """Multiply the rows of each tile by its expert's weights [E, out, in]: x [.., in] -> [R, out] in x's dtype.

    Args:
        x: The tokens.
        weights: The arrays of each weight.
        biases: A bias [E, out] for each weight, or none.
        tiles: The tiles.
        p: The plan.
        reads: The row of the table with the first row that a tile reads.
        epilogue: A function from the sums, [64, N] f32 for each block of each weight, to an output for each block.
        in_parts: Return the sums [S, tiles, out, N] in f32 instead, to be added; there is no epilogue.
    """
    out = weights[0]["codes"].shape[1]
    kinds = ("codes", "scale", "zero")[: 3 if p.form.name == "uint4" else 2]
    arrays = {kind: [in_blocks(kind, w[kind], p) for w in weights] for kind in kinds} | {"bias": biases}
    leaves, tree = jax.tree.flatten(arrays)
    I = tiles.table.shape[1]
    x = in_order(x, p.form.name)
    shape = (p.splits, I, out, p.N) if in_parts else (tiles.R, out)

    def entry(table_ref: Any, x_ref: Any, *refs: Any) -> None:
        inputs, out_ref = jax.tree.unflatten(tree, refs[:-1]), refs[-1]
        body = functools.partial(_program, p, epilogue, reads, in_parts, table_ref, x_ref, inputs, out_ref)
        run = functools.partial(pl.run_scoped, body, *_memory(p, inputs, x.dtype, in_parts))
        pl.when(table_ref[3, lax.axis_index("tile")] > 0)(run)

    return plgpu.kernel(
        entry,
        out_type=jax.ShapeDtypeStruct(shape, jnp.float32 if in_parts else x.dtype),
        grid=(I, out // (ROWS * p.blocks), p.splits),
        grid_names=("tile", "block", "part"),
        kernel_name=f"packed_product_{p.form.name}",
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )(tiles.table, x, *leaves)


def in_blocks(kind: str, array: jax.Array, p: Plan) -> jax.Array:
    """Return scales [E, out, G] as blocks of 64 rows, as they are copied; a view. Codes stay as they are."""
    if kind == "codes":
        return array
    strip = _strip(p.form, p.size) if p.form.group else (ROWS,)
    assert strip is not None
    return array.reshape(-1, *strip)


class Memory(NamedTuple):
    """Hold the shared memory and the barriers of a program."""

    codes: Any  # [stages, parts, 64, bytes]
    x: Any  # [stages, N, inner]
    vectors: dict[str, list]  # scales, zero points and biases of each part
    results: Any
    loaded: Any
    vectors_loaded: Any


def _memory(p: Plan, inputs: dict[str, list], dtype: Any, in_parts: bool) -> Memory:
    """Return the shared memory of a program."""
    per_byte = CODES[p.form.name][1]
    width = p.inner // per_byte
    shapes = {kind: (ROWS,) if kind == "bias" else refs[0].shape[1:] for kind, refs in inputs.items() if refs}
    del shapes["codes"]
    # each of its own: copies go to multiples of 128 bytes
    vectors = {kind: [plgpu.SMEM(shape, inputs[kind][0].dtype)] * p.parts for kind, shape in shapes.items()}
    plain, tiled = (p.blocks, ROWS, p.N), (p.blocks, p.N, ROWS)
    return Memory(
        tiled_memory((p.stages, p.parts, ROWS, width), inputs["codes"][0].dtype, math.gcd(width, p.size // per_byte)),
        tiled_memory((p.stages, p.N, p.inner), dtype, min(p.group, 64) * 2),
        vectors,
        plgpu.SMEM(plain, jnp.float32) if in_parts else shared_tiles(tiled, dtype),
        plgpu.Barrier(num_arrivals=p.parts + 1, num_barriers=p.stages),
        plgpu.Barrier(num_arrivals=p.parts * len(vectors)),
    )


def tiled_memory(shape: tuple[int, ...], dtype: Any, swizzle: int) -> Any:
    """Return shared memory in tiles of 8 rows of `swizzle` bytes."""
    transforms = (
        plgpu.TilingTransform((8, swizzle // jnp.dtype(dtype).itemsize)),
        plgpu.SwizzleTransform(swizzle),
    )
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def _program(
    p: Plan, epilogue: Callable, reads: int, in_parts: bool,
    table_ref: Any, x_ref: Any, inputs: dict[str, list], out_ref: Any, *memory: Any,
) -> None:  # fmt: skip
    """Compute the rows of some blocks for one tile and one part of the input."""
    shared = Memory(*memory)
    tile, block, part = (lax.axis_index(name) for name in ("tile", "block", "part"))
    expert, source, target, count = (table_ref[i, tile] for i in (0, reads, 2, 3))
    source, target = pl.multiple_of(source, CHUNK), pl.multiple_of(target, CHUNK)
    blocks = [block * p.blocks + i for i in range(p.blocks)]
    rows = [pl.ds(each * ROWS, ROWS) for each in blocks]
    parts = [(i, at) for at in range(p.blocks) for i in range(p.names)]
    steps = jnp.minimum(p.steps, pl.cdiv(p.size, p.inner) - part * p.steps)
    width = shared.codes.shape[-1]

    def fetch(step: Any, slot: Any) -> None:
        begin = part * p.steps + step
        for at, (i, which) in enumerate(parts):
            codes = inputs["codes"][i].at[expert, rows[which], pl.ds(begin * width, width)]
            plgpu.copy_gmem_to_smem(codes, shared.codes.at[slot, at], shared.loaded.at[slot])
        # values past the end of rows, and rows past the last one, are zeros
        tokens = x_ref.at[pl.ds(source, p.N), pl.ds(begin * p.inner, p.inner)]
        plgpu.copy_gmem_to_smem(tokens, shared.x.at[slot], shared.loaded.at[slot])

    for stage in range(p.stages):
        pl.when(stage < steps)(functools.partial(fetch, stage, stage))
    per_expert = inputs["codes"][0].shape[1] // ROWS
    for kind, vectors in shared.vectors.items():
        for at, (i, which) in enumerate(parts):
            found = inputs[kind][i]
            found = found.at[expert, rows[which]] if kind == "bias" else found.at[expert * per_expert + blocks[which]]
            plgpu.copy_gmem_to_smem(found, vectors[at], shared.vectors_loaded)
    plgpu.barrier_wait(shared.vectors_loaded)

    sums = _sums(p, shared, fetch, part * p.steps, steps)
    sums = finished(p, sums, shared.vectors)
    if not in_parts:
        store_rows(epilogue(sums), shared.results, out_ref, rows, target, count)
        return
    for at, x in enumerate(sums):
        shared.results[at] = x
    plgpu.commit_smem()
    for at, own in enumerate(rows):
        plgpu.copy_smem_to_gmem(shared.results.at[at], out_ref.at[part, tile, own])
    plgpu.wait_smem_to_gmem(0)


def finished(p: Plan, sums: list[jax.Array], vectors: dict[str, list]) -> list[jax.Array]:
    """Return the sums [64, N] of all values, with what is applied at the end: scales of rows, SUMS and biases."""

    def of_rows(vector: Any) -> jax.Array:
        return lax.broadcast_in_dim(plgpu.layout_cast(vector[...], PER_ROW).astype(jnp.float32), (ROWS, p.N), [0])

    if not p.form.group:
        sums = [x * of_rows(scale) for x, scale in zip(sums, vectors["scale"], strict=True)]
    if p.form.name == "mxfp4":
        sums = [x * SUMS for x in sums]
    return [x + of_rows(bias) for x, bias in zip(sums, vectors["bias"], strict=True)] if "bias" in vectors else sums


def _sums(p: Plan, shared: Memory, fetch: Callable, first: Any, steps: Any) -> list[jax.Array]:
    """Return the products of each part with the tokens over `steps` steps, [64, N] f32."""
    groups = p.inner // p.group if p.scales_sums else 1

    def step(at: Any, found: tuple) -> tuple:
        slot = lax.rem(at, jnp.array(p.stages, at.dtype))
        group = (first + at) * (p.inner // p.group)
        plgpu.barrier_wait(shared.loaded.at[slot])
        products = functools.partial(_products, p, shared, slot, group)
        if p.scales_sums:
            scale = functools.partial(spread, p, shared, "scale")
            sums = products(None, groups)
            sums = [x * scale(n // groups, group + n % groups, x) for n, x in enumerate(sums)]
            totals = [functools.reduce(jnp.add, sums[i * groups :][:groups], x) for i, x in enumerate(found)]
        else:
            totals = products(found, 1)
        plgpu.commit_smem()  # every warp has read the codes
        pl.when(at + p.stages < steps)(lambda: fetch(at + p.stages, slot))
        return tuple(totals)

    zeros = plgpu.layout_cast(jnp.zeros((ROWS, p.N), jnp.float32), PRODUCT)
    return list(lax.fori_loop(0, steps, step, (zeros,) * p.parts))


def _products(p: Plan, shared: Memory, slot: Any, group: Any, totals: Any, groups: int) -> list[jax.Array]:
    """Return the products of a step, of each group of each part; added to `totals` if given."""

    def multiply(accs: list) -> list[jax.Array]:
        for part in range(p.parts):
            for i, own in enumerate(unpacked(p, shared, slot, part, group)):
                tokens = shared.x.at[slot, :, pl.ds(i * p.group, p.group)]
                add_product(accs[part * groups + i % groups], own, tokens)
        return [acc[...] for acc in accs]

    sums = pl.run_scoped(multiply, [ACC((ROWS, p.N), jnp.float32) for _ in range(p.parts * groups)])
    return sums if totals is None else [x + y for x, y in zip(totals, sums, strict=True)]


def unpacked(p: Plan, shared: Memory, slot: Any, part: int, group: Any) -> Iterator[jax.Array]:
    """Yield the numbers of each group of a part's codes [64, group]."""
    values = numbers(plgpu.layout_cast(shared.codes[slot, part], REGISTER), p.form.name)
    for i in range(p.inner // p.group):
        own = values[:, i * p.group : (i + 1) * p.group]
        if p.form.name == "uint4":
            own = own - spread(p, shared, "zero", part, group + i, own)
        if p.form.name == "mxfp4":
            own = own * spread(p, shared, "scale", part, group + i, own)
        yield own


def add_product(acc: Any, weights: jax.Array, tokens: Any) -> None:
    """Add weights [64, n], in registers, times tokens [N, n], in shared memory, to the sums."""
    plgpu.wgmma(acc, weights, tokens.transpose((1, 0)))


def spread(p: Plan, shared: Memory, kind: str, part: int, group: Any, like: jax.Array) -> jax.Array:
    """Return the rows' scales or zero points of a group for all columns, in the shape and dtype of `like`.

    Past the last group, which only zeros are multiplied with, they are the last one's.
    """
    G, ref = p.size // p.group, shared.vectors[kind][part]
    found = column(ref, jnp.minimum(group, G - 1), G, ref.dtype)
    if kind == "scale" and p.form.name == "mxfp4":
        bits = scale_bits(jnp.minimum(found.astype(jnp.int32), GREATEST_SCALE))
        found = lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.bfloat16)
    found = found.astype(jnp.float32) if found.dtype == jnp.uint8 else found
    return lax.broadcast_in_dim(found.astype(like.dtype), like.shape, [0])
