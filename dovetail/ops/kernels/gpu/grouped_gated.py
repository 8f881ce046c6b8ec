"""Gated unit of experts in training on Hopper: the products of gate and up, and the unit, in one kernel (Mosaic GPU).

A tile of the output has columns of gate and the same ones of up, side by side in registers: the rows are read once for
both, and the unit is computed from the sums before they are rounded. Gate and up are stored for the backward pass,
whose kernels are those of grouped_hopper.

M rows, sorted by group, E groups, K input dim, N output dim.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dovetail.ops.glu import Glu
from dovetail.ops.kernels.gpu.grouped import _swizzled
from dovetail.ops.kernels.gpu.grouped_hopper import rows_products, weights_product, why_not_hopper
from dovetail.ops.kernels.gpu.grouped_parts import (
    ALIGNED,
    CHUNK,
    GROUPS,
    HALF,
    INNER,
    ROWS,
    OutputTiles,
    find_tiles,
    load_blocks,
    make_kernel,
    run_tiles,
    shared_tiles,
    store_chunks,
    store_rows,
    sum_blocks,
)
from dovetail.ops.kernels.gpu.mosaic.rows import load_raw

COLS = 128  # of gate and of up in a tile
PER_ROW = plgpu.Layout.WGMMA.reduce(1)  # registers of a number for each row


def why_not_gated(rows: int, w: Any, dtype: Any, glu: Glu) -> str | None:
    """Return why the kernel cannot compute the unit of [rows, K] by gate and up like w [E, N, K], or None."""
    if not (glu.limit is not None or glu.kind in ("silu", "gelu_tanh")):
        return f"{glu.kind} is not computed in kernels"
    if w.shape[1] % COLS:
        return f"{w.shape[1]} columns, not a multiple of {COLS}"
    return why_not_hopper(rows, w.shape[1], w.shape[2], dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def grouped_gated(
    x: jax.Array,  # [M, K]
    ws: tuple[jax.Array, jax.Array],  # gate and up, [E, N, K]
    share: jax.Array,  # [M, 1] f32
    sizes: jax.Array,  # [E] int32
    glu: Glu,
) -> jax.Array:
    """Return the gated unit [M, N] of each row by its group's weights, times the row's share."""
    return gated_products(x, ws, share, sizes, glu)[2]


def _gated_forward(x, ws, share, sizes, glu: Glu):
    *products, hidden = gated_products(x, ws, share, sizes, glu)
    gate, up = (checkpoint_name(y, "product") for y in products)
    return hidden, (x, ws, share, sizes, gate, up)


def _gated_backward(glu: Glu, saved, dy):
    x, ws, share, sizes, gate, up = saved
    *dys, dshare = jax.vjp(functools.partial(weighted, glu), gate, up, share)[1](dy)
    dx = rows_products(tuple(dys), ws, sizes, transposed=False)
    return dx, tuple(weights_product(d, x, sizes, dtype=w.dtype) for d, w in zip(dys, ws, strict=True)), dshare, None


grouped_gated.defvjp(_gated_forward, _gated_backward)


def weighted(glu: Glu, gate: jax.Array, up: jax.Array, share: jax.Array) -> jax.Array:
    """Return the unit of gate and up [M, N], times each row's share [M, 1] f32."""
    return (glu(gate, up).astype(jnp.float32) * share).astype(gate.dtype)


@functools.partial(jax.jit, static_argnames="glu")  # equal calls are traced and lowered once
def gated_products(
    x: jax.Array, ws: tuple[jax.Array, jax.Array], share: jax.Array, sizes: jax.Array, glu: Glu
) -> list[jax.Array]:
    """Return gate, up and `grouped_gated`, each [M, N]."""
    M, N, t = len(x), ws[0].shape[1], OutputTiles(cols=2 * COLS)
    shared = [shared_tiles((t.stages, ROWS, INNER), x.dtype), shared_tiles((t.stages, t.cols, INNER), x.dtype)]
    shared.append(shared_tiles((GROUPS, 2, HALF, CHUNK), x.dtype, rows=1))
    share = jnp.pad(share[:, 0], (0, ROWS))  # the last tile may have rows past the last
    return make_kernel(
        functools.partial(_body, glu=glu, num_cols=N // COLS, t=t),
        "grouped_gated_hopper",
        [jax.ShapeDtypeStruct((M, N), x.dtype)] * 3,
        shared,
        t.stages,
        copies=3,
        approx_math=True,
    )(*find_tiles(sizes, M), x, *ws, share)


def _body(group_ref, first_ref, start_ref, end_ref, count_ref, x_ref, gate_ref, up_ref, share_ref, *refs: Any,
          glu: Glu, num_cols: int, t: OutputTiles):  # fmt: skip
    *out_refs, (xs, ws, outs), loaded, released = refs
    warpgroup = lax.axis_index("warpgroup")
    num_groups, whole = gate_ref.shape[0], x_ref.shape[1] // INNER

    def block(program: jax.Array) -> tuple:
        tile, col = _swizzled(program, count_ref[0], num_cols, t.swizzle)
        group = group_ref[tile]
        # nothing is read for rows in no group, which stay 0
        return tile, group, col * COLS, jnp.where(group < num_groups, whole, 0)

    def load(program: jax.Array, at: jax.Array) -> jax.Array:
        tile, group, col, steps = block(program)
        rows, cols = pl.ds(pl.multiple_of(first_ref[tile], ALIGNED), ROWS), pl.ds(col, COLS)

        def sources(step: jax.Array, slot: jax.Array) -> list:
            inner = pl.ds(step * INNER, INNER)
            halves = [(w, ws.at[slot, pl.ds(i * COLS, COLS)]) for i, w in enumerate((gate_ref, up_ref))]
            return [(x_ref.at[rows, inner], xs.at[slot]), *((w.at[group, cols, inner], to) for w, to in halves)]

        return load_blocks(sources, steps, at, loaded, released)

    def compute(program: jax.Array, at: jax.Array) -> jax.Array:
        tile, _, col, steps = block(program)
        first = first_ref[tile] + warpgroup * HALF
        start = jnp.clip(start_ref[tile] - first, 0, HALF)
        count = jnp.clip(end_ref[tile] - first, 0, HALF) - start

        def multiply(acc: Any, slot: jax.Array, _: Any = None) -> None:
            plgpu.wgmma(acc, xs.at[slot, pl.ds(warpgroup * HALF, HALF)], ws.at[slot].transpose((1, 0)))

        parts = [(jnp.where(count > 0, steps, 0), multiply), (steps, lambda *_: None)]
        total = sum_blocks(parts, t.cols, at, loaded, released)
        shares = load_raw(share_ref.at[pl.ds(first, HALF)], PER_ROW)

        def chunks(i: int) -> list[tuple[jax.Array, Callable]]:
            gate, up = (total[:, i * CHUNK + at : (i + 1) * CHUNK + at] for at in (0, COLS))
            hidden = glu.in_kernel(gate, up) * lax.broadcast_in_dim(shares, gate.shape, [0])
            target = dict(first=first, start=start, count=count, col=col + i * CHUNK)
            stores = (functools.partial(store_rows, out_ref=out, **target) for out in out_refs)
            return list(zip((gate, up, hidden), stores, strict=True))

        store_chunks([one for i in range(COLS // CHUNK) for one in chunks(i)], outs.at[warpgroup])
        return at + steps

    run_tiles(count_ref[0] * num_cols, load, compute, released)
