"""The kernel of ops/kernels/gpu/prompt.py: attention of the work items of a step, for Hopper (Pallas, Mosaic GPU).

A program per multiprocessor takes work items in turn, those with the most keys first. Two warpgroups compute, each for
64 rows, and alternate: one multiplies while the other one exponentiates. A third one loads queries and pages ahead by
TMA, also those of the next item. Only blocks of keys that some row does not see in full are masked.

N query heads, H head dim; W query heads of a work item, R = 64 / W tokens of a warpgroup. Row r of a warpgroup is token
r % R of head r // R.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dovetail.ops.kernels.gpu.prompt_items import GROUPS, KEYS, ROWS, PromptItem, PromptShape

STAGES = 2  # blocks of keys, and of values, in shared memory
# A score without weight. It is not -inf, because -inf minus -inf is NaN. It is a power of two, so that its product with
# the scale is exact: the row's maximum is rounded, a multiply-add is not, and exp2 of their difference would be inf.
HIDDEN = -(2.0**100)
LOG2E = math.log2(math.e)
ACC = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]


def _in_registers(x: jax.Array) -> jax.Array:
    """Return a matrix, or a vector of its rows, in the registers in which a product leaves it."""
    return plgpu.layout_cast(x, plgpu.Layout.WGMMA if x.ndim == 2 else plgpu.Layout.WGMMA.reduce(1))


class Buffers(NamedTuple):
    """Hold the shared memory of a program."""

    queries: Any  # [2, GROUPS, 64, H]: of an item, and then its output; the next item's
    keys: Any  # [STAGES, KEYS, H]
    values: Any
    rows: Any  # [GROUPS, 64, H]: output, not in tiles, for stores of single rows


class Barriers(NamedTuple):
    """Hold the barriers of a program."""

    queries_loaded: Any
    keys_loaded: Any
    values_loaded: Any
    queries_released: Any
    keys_released: Any
    values_released: Any
    turn: Any
    cleared: Any


class Program(NamedTuple):
    """Hold what the functions of a program share."""

    shape: PromptShape
    buffers: Buffers
    barriers: Barriers


def attend_items(*refs: Any, shape: PromptShape, dtype: Any, programs: int) -> None:
    """Allocate the buffers and run the three warpgroups."""
    *inputs, out_ref = refs

    def shared(*dims: int) -> Any:
        """Return shared memory in tiles, swizzled, as the products of a warpgroup read it."""
        transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
        return plgpu.SMEM((*dims, shape.dim), dtype, transforms=transforms)

    copies = KEYS // min(KEYS, shape.page)
    pl.run_scoped(
        functools.partial(_run, inputs, out_ref, shape=shape, programs=programs),
        Buffers(
            shared(2, GROUPS, ROWS), shared(STAGES, KEYS), shared(STAGES, KEYS),
            plgpu.SMEM((GROUPS, ROWS, shape.dim), dtype),
        ),
        Barriers(
            plgpu.Barrier(num_arrivals=GROUPS * shape.heads, num_barriers=2),
            plgpu.Barrier(num_arrivals=copies, num_barriers=STAGES),
            plgpu.Barrier(num_arrivals=copies, num_barriers=STAGES),
            plgpu.Barrier(num_arrivals=GROUPS, num_barriers=2),
            plgpu.Barrier(num_arrivals=GROUPS, num_barriers=STAGES),
            plgpu.Barrier(num_arrivals=GROUPS, num_barriers=STAGES),
            plgpu.Barrier(num_arrivals=GROUPS),
            plgpu.Barrier(num_arrivals=GROUPS),
        ),
        collective_axes="group",
    )  # fmt: skip


def _run(
    inputs: list, out_ref: Any, buffers: Buffers, barriers: Barriers, *, shape: PromptShape, programs: int
) -> None:
    """Take the items of a program, by the number of the warpgroup: compute, or load."""
    tiles_ref, count_ref, tables_ref, q_ref, pages_ref, *sinks = inputs
    program, group = lax.axis_index("program"), lax.axis_index("group")
    items = count_ref[0] * shape.groups

    def place(turn: Any) -> Any:
        """Return a program's item: every second round in reverse, so that none has the longest of each."""
        return turn * programs + jnp.where(lax.rem(turn, 2) == 0, program, programs - 1 - program)

    def item(turn: Any) -> PromptItem:
        at = jnp.minimum(place(turn), items - 1)
        tile = lax.div(at, shape.groups)
        return PromptItem(lax.rem(at, shape.groups), *(tiles_ref[tile, i] for i in range(6)))

    def each(body: Any) -> None:
        """Call body(item, its place in turn, steps before it) for each item; the next item is read meanwhile."""

        def step(turn: Any, carry: tuple) -> tuple:
            current, done = carry
            following = item(turn + 1)
            body(current, lax.rem(turn, 2), done)
            begin, end = current.blocks(shape.window)
            return following, done + end - begin

        rounds = lax.div(items, programs)
        rounds = rounds + (place(rounds) < items).astype(jnp.int32)
        lax.fori_loop(0, rounds, step, (item(jnp.int32(0)), jnp.int32(0)))

    @pl.when(group < GROUPS)
    def _compute() -> None:
        plgpu.set_max_registers(232, action="increase")
        for barrier in (barriers.keys_released, barriers.values_released):
            for slot in range(STAGES):
                plgpu.barrier_arrive(barrier.at[slot])
        plgpu.barrier_arrive(barriers.queries_released.at[0])
        pl.when(group == 1)(lambda: plgpu.barrier_arrive(barriers.turn))
        each(functools.partial(_attend, Program(shape, buffers, barriers), out_ref, sinks))
        plgpu.wait_smem_to_gmem(0)

    @pl.when(group == GROUPS)
    def _load() -> None:
        plgpu.set_max_registers(40, action="decrease")
        each(functools.partial(_fetch, Program(shape, buffers, barriers), tables_ref, q_ref, pages_ref))


def _fetch(
    program: Program, tables_ref: Any, q_ref: Any, pages_ref: Any, item: PromptItem, side: Any, done: Any
) -> None:
    """Load the queries and pages of an item as their buffers are released."""
    shape, buffers, barriers = program
    rows = min(KEYS, shape.page)
    begin, end = item.blocks(shape.window)
    last = item.position + item.high - 1
    column = lax.div(item.head, shape.shared) * (2 * shape.dim)

    def pages_of(block: Any) -> list[Any]:
        """Return the row in pages of each part of a block; past the last key, that of the last one again."""
        keys = [jnp.minimum(block * KEYS + start, last) for start in range(0, KEYS, rows)]
        keys = [lax.div(key, rows) * rows for key in keys]
        return [tables_ref[item.seq, lax.div(key, shape.page)] * shape.page + lax.rem(key, shape.page) for key in keys]

    first_rows = pages_of(begin)
    plgpu.barrier_wait(barriers.queries_released.at[side])
    for group in range(GROUPS):
        for head in range(shape.heads):
            source = q_ref.at[shape.rows_of(item, group), shape.columns_of(item, head)]
            target = buffers.queries.at[side, group, pl.ds(head * shape.tokens, shape.tokens)]
            plgpu.copy_gmem_to_smem(source, target, barriers.queries_loaded.at[side])

    both = (
        (buffers.keys, barriers.keys_loaded, barriers.keys_released),
        (buffers.values, barriers.values_loaded, barriers.values_released),
    )

    def step(block: Any, places: list) -> list:
        slot = lax.rem(done + block - begin, STAGES)
        following = pages_of(block + 1)
        for which, (buffer, loaded, released) in enumerate(both):
            plgpu.barrier_wait(released.at[slot])
            for part, place in enumerate(places):
                columns = pl.ds(pl.multiple_of(column + which * shape.dim, shape.dim), shape.dim)
                source = pages_ref.at[pl.ds(pl.multiple_of(place, rows), rows), columns]
                plgpu.copy_gmem_to_smem(source, buffer.at[slot, pl.ds(part * rows, rows)], loaded.at[slot])
        return following

    lax.fori_loop(begin, end, step, first_rows)


def _attend(program: Program, out_ref: Any, sinks: list, item: PromptItem, side: Any, done: Any) -> None:
    """Attend the rows of a warpgroup to the keys of an item, and store them."""
    shape, buffers, barriers = program
    group = lax.axis_index("group")
    begin, end = item.blocks(shape.window)
    position = item.position + group * shape.tokens  # of the warpgroup's first token
    carry = _start(shape, sinks, item)
    plgpu.barrier_wait(barriers.queries_loaded.at[side])
    plgpu.barrier_wait(barriers.keys_loaded.at[lax.rem(done, STAGES)])
    pl.when(group == 1)(lambda: plgpu.barrier_wait(barriers.turn))
    own = buffers.queries.at[side, group]
    step = functools.partial(_step, program, own, item, position, done)
    masked = functools.partial(step, masked=True)
    if shape.window is None or shape.window > 2 * KEYS:  # else hardly a block is seen by all rows
        first, last = item.unmasked(shape.window)
        if shape.window:
            carry = lax.fori_loop(begin, first, masked, carry)
        carry = lax.fori_loop(first, last, step, carry)
        begin = last
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last item's output
    plgpu.barrier_arrive(barriers.queries_released.at[1 - side])
    out, _, total = lax.fori_loop(begin, end, masked, carry)
    plgpu.barrier_arrive(barriers.turn)
    out = out * lax.broadcast_in_dim(1.0 / total, out.shape, [0])
    _store(out_ref, own, buffers.rows.at[group], shape, item, out)
    pl.when(group == 0)(lambda: plgpu.barrier_wait(barriers.turn))


def _start(shape: PromptShape, sinks: list, item: PromptItem) -> tuple:
    """Return the softmax before any key: empty, or with the sinks, which have a share and no value."""
    out = _in_registers(jnp.zeros((ROWS, shape.dim), jnp.float32))
    if not sinks:
        top, total = (_in_registers(jnp.full((ROWS,), value, jnp.float32)) for value in (HIDDEN, 0))
        return out, top, total
    row = _in_registers(lax.iota(jnp.int32, ROWS))
    top, total = (_in_registers(jnp.full((ROWS,), value, jnp.float32)) for value in (0, 1))
    for head in range(shape.heads):
        logit = sinks[0][item.head * shape.heads + head] * LOG2E
        top = jnp.where(row >= head * shape.tokens, logit, top)
    return out, top, total


def _step(
    program: Program, own: Any, item: PromptItem, position: Any, done: Any, block: Any, carry: tuple,
    masked: bool = False,
) -> tuple:  # fmt: skip
    """Attend to a block of keys: the carry is the weighted values, the rows' maxima in base 2, and their sums."""
    shape, buffers, barriers = program
    out, top, total = carry
    group = lax.axis_index("group")
    begin, end = item.blocks(shape.window)
    slot, following = (lax.rem(done + block - begin + ahead, STAGES) for ahead in (0, 1))
    spread = lambda x, like: lax.broadcast_in_dim(x, like.shape, [0])  # noqa: E731

    def swap() -> None:
        plgpu.barrier_arrive(barriers.turn)
        plgpu.barrier_wait(barriers.turn)

    def scores_of(acc: Any) -> Any:
        plgpu.wgmma(acc, own, buffers.keys.at[slot].transpose((1, 0)))
        swap()
        return acc[...]

    scores = pl.run_scoped(scores_of, ACC((ROWS, KEYS), jnp.float32))
    plgpu.barrier_arrive(barriers.keys_released.at[slot])
    scale = shape.scale
    if shape.softcap is not None:
        scores, scale = jnp.tanh(scores * scale), shape.softcap * LOG2E
    if masked:
        scores = jnp.where(_visible(shape, position - block * KEYS), scores, HIDDEN)
    new = jnp.maximum(top, scores.max(axis=1) * scale)
    shrink = jnp.exp2(top - new)
    weights = jnp.exp2(scores * scale - spread(new, scores))
    out = out * spread(shrink, out)
    total = total * shrink + weights.sum(axis=1)
    # nothing of the softmax moves into the other warpgroup's turn
    out, total, new, weights = lax.optimization_barrier((out, total, new, weights.astype(own.dtype)))
    plgpu.barrier_arrive(barriers.turn)
    plgpu.barrier_wait(barriers.values_loaded.at[slot])
    if masked:
        pl.when(item.length < (block + 1) * KEYS)(
            lambda: _clear(buffers.values.at[slot], barriers.cleared, group, item.length - block * KEYS)
        )
    plgpu.barrier_wait(barriers.turn)

    def weighted(acc: Any) -> None:
        plgpu.wgmma(acc, weights, buffers.values.at[slot])
        pl.when(block + 1 < end)(lambda: plgpu.barrier_wait(barriers.keys_loaded.at[following]))

    out = pl.run_state(weighted)(ACC.init(out))
    plgpu.barrier_arrive(barriers.values_released.at[slot])
    return out, new, total


def _visible(shape: PromptShape, ahead: Any) -> Any:
    """Return which keys [64, KEYS] of a block the rows see; `ahead` is the first row's distance to the first key."""
    row, key = (_in_registers(lax.broadcasted_iota(jnp.int32, (ROWS, KEYS), i)) for i in (0, 1))
    distance = (row & (shape.tokens - 1)) + ahead - key
    return (distance >= 0) & (distance < shape.window) if shape.window else distance >= 0


def _clear(values: Any, cleared: Any, group: Any, known: Any) -> None:
    """Set a sequence's values past its end to 0: a page may hold NaN from its last use, and 0 * NaN is not 0."""
    rows = pl.ds(pl.multiple_of(group * ROWS, ROWS), ROWS)
    part = _in_registers(values[rows])
    row = _in_registers(lax.broadcasted_iota(jnp.int32, part.shape, 0)) + group * ROWS
    values[rows] = jnp.where(row < known, part, jnp.zeros_like(part))
    plgpu.commit_smem()
    plgpu.barrier_arrive(cleared)
    plgpu.barrier_wait(cleared)


def _store(out_ref: Any, tiles: Any, plain: Any, shape: PromptShape, item: PromptItem, out: Any) -> None:
    """Store the rows of a warpgroup. If not all tokens are its sequence's, those are stored in powers of two."""
    group = lax.axis_index("group")
    low, high = (jnp.clip(edge - group * shape.tokens, 0, shape.tokens) for edge in (item.low, item.high))
    count = high - low

    @pl.when(count == shape.tokens)
    def _all() -> None:
        tiles[...] = out.astype(out_ref.dtype)
        plgpu.commit_smem()
        for head in range(shape.heads):
            source = tiles.at[pl.ds(head * shape.tokens, shape.tokens)]
            plgpu.copy_smem_to_gmem(source, out_ref.at[shape.rows_of(item, group), shape.columns_of(item, head)])

    def copy(start: Any, size: int) -> None:
        rows = pl.ds(item.first + group * shape.tokens + start, size)
        for head in range(shape.heads):
            source = plain.at[pl.ds(head * shape.tokens + start, size)]
            plgpu.copy_smem_to_gmem(source, out_ref.at[rows, shape.columns_of(item, head)])

    @pl.when((count > 0) & (count < shape.tokens))
    def _some() -> None:
        plain[...] = out.astype(out_ref.dtype)
        plgpu.commit_smem()
        size = shape.tokens // 2
        while size:
            start = low + (count & ~(2 * size - 1))
            pl.when((count & size) != 0)(functools.partial(copy, start, size))
            size //= 2
