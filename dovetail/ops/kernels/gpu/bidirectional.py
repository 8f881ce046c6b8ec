"""Bidirectional attention of heads of 65 to 80 dims for Hopper (Pallas, Mosaic GPU).

cuDNN multiplies such heads as if they had 128 dims. Here a head is 64 columns and a tail of 16, and the rows of q, k
and v are [64 columns of every head, 16 of every head]: boxes of TMA begin at multiples of their own width. Two
warpgroups compute, each for its own queries and in turns (one multiplies while the other one exponentiates); a third
one loads keys and values ahead.

N items, P patches of an item, K heads, H head dim, W = K * 80 columns.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

WIDE, TAIL = 64, 16  # columns of a head
COLUMNS = WIDE + TAIL
GROUPS, QUERIES = 2, 64  # warpgroups that compute, and the queries of each
STAGES = 2  # blocks of keys in shared memory
ACC = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]


def why_not_split(patches: int, heads: int, head_dim: int) -> str | None:
    """Return why the kernel cannot run, or None."""
    if heads * COLUMNS % WIDE:
        return f"{heads} heads, not a multiple of 4"  # boxes divide the columns
    if not WIDE < head_dim <= COLUMNS:
        return f"heads of {head_dim} dims, not 65 to 80"
    if patches % (GROUPS * QUERIES):
        return f"{patches} patches, not a multiple of {GROUPS * QUERIES}"
    return None


def split_columns(x: jax.Array, axis: int) -> jax.Array:
    """Return x [.., K, H, ..] with the dims `axis` (K) and `axis + 1` as one of W columns, padded by zeros."""
    wide, tail = jnp.split(x, [WIDE], axis=axis + 1)
    padding = [(0, 0)] * x.ndim
    padding[axis + 1] = (0, TAIL - tail.shape[axis + 1])
    flat = (part.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :]) for part in (wide, jnp.pad(tail, padding)))
    return jnp.concatenate(list(flat), axis=axis)


def split_attention(qkv: jax.Array, *, heads: int, scale: float) -> jax.Array:
    """Return attention [N, P, W] of qkv [N, P, 3 W], whose columns are those of `split_columns` for q, k and v."""
    N, P, _ = qkv.shape
    keys = 256 if P % 256 == 0 else 128
    stages = min(STAGES, P // keys)
    body = functools.partial(_attend, heads=heads, scale=scale * math.log2(math.e), keys=keys, steps=P // keys)

    def entry(qkv_ref: Any, out_ref: Any) -> None:
        def buffers(count: int, rows: int) -> list[Any]:
            return [_shared((count, rows, columns), qkv.dtype) for columns in (WIDE, TAIL)]

        pl.run_scoped(
            functools.partial(body, qkv_ref, out_ref),
            (buffers(GROUPS, QUERIES), buffers(stages, keys), buffers(stages, keys)),
            # each is loaded by two copies and released by both warpgroups
            tuple(plgpu.Barrier(num_arrivals=2, num_barriers=n) for n in (GROUPS, stages, stages)),
            (plgpu.Barrier(num_arrivals=GROUPS, num_barriers=stages),) * 2,
            plgpu.Barrier(num_arrivals=GROUPS),
            collective_axes="group",
        )

    return plgpu.kernel(
        entry,
        out_type=jax.ShapeDtypeStruct((N, P, heads * COLUMNS), qkv.dtype),
        grid=(heads, P // (GROUPS * QUERIES), N),
        grid_names=("head", "tile", "item"),
        num_threads=GROUPS + 1,
        thread_name="group",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(qkv)


def _shared(shape: tuple[int, int, int], dtype: Any) -> Any:
    """Return shared memory in tiles, swizzled by the bytes of a row, as the products of a warpgroup read it."""
    columns = shape[-1]
    transforms = (plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(columns * jnp.dtype(dtype).itemsize))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def _attend(
    qkv_ref: Any,
    out_ref: Any,
    shared: tuple,
    loaded: tuple,
    released: tuple,
    turn: Any,
    *,
    heads: int,
    scale: float,
    keys: int,
    steps: int,
) -> None:
    """Attend the queries of a tile, or load their keys and values, by the number of the warpgroup."""
    group, head, item = (lax.axis_index(name) for name in ("group", "head", "item"))
    queries, *blocks = shared
    queries_loaded, *blocks_loaded = loaded
    stages = blocks[0][0].shape[0]

    def parts(ref: Any, rows: Any, which: int) -> list[Any]:
        """Return the two parts of a head in the columns of q, k or v, or of the output."""
        wide, tail = which * heads * COLUMNS, which * heads * COLUMNS + heads * WIDE
        columns = (pl.ds(wide + head * WIDE, WIDE), pl.ds(tail + head * TAIL, TAIL))
        return [ref.at[item, rows, each] for each in columns]

    def load(rows: Any, which: int, into: list[Any], slot: Any, barrier: Any) -> None:
        for source, target in zip(parts(qkv_ref, rows, which), into, strict=True):
            plgpu.copy_gmem_to_smem(source, target.at[slot], barrier.at[slot])

    def fetch(step: Any, slot: Any, wait: bool) -> None:
        for which in (0, 1):
            if wait:
                plgpu.barrier_wait(released[which].at[slot])
            load(pl.ds(step * keys, keys), 1 + which, blocks[which], slot, blocks_loaded[which])

    @pl.when(group < GROUPS)
    def _compute() -> None:
        plgpu.set_max_registers(232, action="increase")
        rows = pl.ds((lax.axis_index("tile") * GROUPS + group) * QUERIES, QUERIES)
        load(rows, 0, queries, group, queries_loaded)
        plgpu.barrier_wait(queries_loaded.at[group])
        own = [each.at[group] for each in queries]
        outs = _loop(own, blocks, blocks_loaded, released, turn, scale, steps)
        for out, buffer in zip(outs, own, strict=True):
            buffer[...] = out.astype(buffer.dtype)
        plgpu.commit_smem()
        for buffer, target in zip(own, parts(out_ref, rows, 0), strict=True):
            plgpu.copy_smem_to_gmem(buffer, target)
        plgpu.wait_smem_to_gmem(0)

    @pl.when(group == GROUPS)
    def _load() -> None:
        plgpu.set_max_registers(40, action="decrease")
        for step in range(stages):
            fetch(step, step, wait=False)

        @pl.loop(0, steps - stages)
        def _(step: Any) -> None:
            fetch(step + stages, lax.rem(step, jnp.array(stages, step.dtype)), wait=True)


def _loop(own: list, blocks: list, loaded: list, released: tuple, turn: Any, scale: float, steps: int) -> list:
    """Return softmax(q k) v of a warpgroup's queries: two parts, f32."""
    (keys, values), (keys_loaded, values_loaded), (keys_released, values_released) = blocks, loaded, released
    stages, rows = keys[0].shape[0], own[0].shape[0]
    spread = lambda x, like: lax.broadcast_in_dim(x, like.shape, [0])  # noqa: E731
    swap = _turns(turn)

    def step(i: Any, carry: tuple) -> tuple:
        outs, top, total = carry
        slot, following = (lax.rem(i + ahead, jnp.array(stages, i.dtype)) for ahead in (0, 1))

        def scores_of(acc: Any) -> Any:
            for q, k in zip(own, keys, strict=True):
                plgpu.wgmma(acc, q, k.at[slot].transpose((1, 0)))
            swap()
            return acc[...]

        scores = pl.run_scoped(scores_of, ACC((rows, keys[0].shape[1]), jnp.float32))
        plgpu.barrier_arrive(keys_released.at[slot])
        new = jnp.maximum(top, scores.max(axis=1) * scale)
        shrink = jnp.exp2(top - new)
        weights = jnp.exp2(scores * scale - spread(new, scores))
        outs = [out * spread(shrink, out) for out in outs]
        total = total * shrink + weights.sum(axis=1)
        # nothing of the softmax moves into the other warpgroup's turn
        outs, total, new, weights = lax.optimization_barrier((outs, total, new, weights.astype(own[0].dtype)))
        plgpu.barrier_arrive(turn)
        plgpu.barrier_wait(values_loaded.at[slot])
        plgpu.barrier_wait(turn)

        def weighted(accs: list) -> None:
            for acc, v in zip(accs, values, strict=True):
                plgpu.wgmma(acc, weights, v.at[slot])
            pl.when(i + 1 < steps)(lambda: plgpu.barrier_wait(keys_loaded.at[following]))

        outs = pl.run_state(weighted)([ACC.init(out) for out in outs])
        plgpu.barrier_arrive(values_released.at[slot])
        return outs, new, total

    def full(shape: tuple[int, ...], value: float, layout: Any) -> jax.Array:
        return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

    vector = plgpu.Layout.WGMMA.reduce(1)
    outs = [full((rows, n), 0.0, plgpu.Layout.WGMMA) for n in (WIDE, TAIL)]
    plgpu.barrier_wait(keys_loaded.at[0])
    pl.when(lax.axis_index("group") == 1)(swap)
    start = outs, full((rows,), -jnp.inf, vector), full((rows,), 0.0, vector)
    outs, _, total = lax.fori_loop(0, steps, step, start)
    pl.when(lax.axis_index("group") == 0)(swap)
    return [out / spread(total, out) for out in outs]


def _turns(turn: Any) -> Callable[[], None]:
    """Return the function that hands the tensor cores to the other warpgroup and waits for them."""

    def swap() -> None:
        plgpu.barrier_arrive(turn)
        plgpu.barrier_wait(turn)

    return swap
