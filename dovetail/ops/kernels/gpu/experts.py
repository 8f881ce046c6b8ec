"""Experts of few tokens for Hopper (Pallas, Mosaic GPU): the weights are read once, at the memory's bandwidth.

The weights are the left operand of a warpgroup's products, which has at least 64 rows, and an expert's tokens are the
right one, which has at least 8: few tokens waste nothing. A program computes 64 rows of gate and up and applies the
activation, or it computes some rows of down; a token's outputs are then summed. Tiles never span two experts.

Up to 8 tokens are not sorted: each expert in use multiplies all of them. Otherwise the tokens of an expert lie one
after another, and groups begin at multiples of 8 rows.

T tokens, D model dim, E experts, F their width, k experts per token, M = T k pairs, I tiles, N tokens of a tile, R rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dovetail.ops.glu import CUBE, SLOPE, Glu

ROWS, INNER = 64, 64  # of a weight's tile in shared memory
CHUNK = 8  # tokens that are stored at once
MAX_TOKENS = 128  # of a tile
FEW = 256  # tokens of a step, at most
SHARED = 100 * 1024  # bytes of a program: two share a multiprocessor, and one loads while the other one begins or ends
ORDER = 1
ACC = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]


def why_not_few_tokens(x: Any, params: dict, glu: Glu) -> str | None:
    """Return why the kernel cannot run, or None."""
    _, F, D = params["gate"].shape
    if x.ndim != 2:  # of training: there is no gradient
        return "x is not a matrix"
    if len(x) > FEW:
        return f"more than {FEW} tokens"
    if not all(isinstance(a, jax.Array) and a.dtype == jnp.bfloat16 for a in (x, *params.values())):
        return "not arrays of bf16"
    if F % ROWS or D % ROWS:  # of a weight a whole tile is copied
        return f"dims of {D} and {F}, not multiples of {ROWS}"
    return "exact GELU" if glu.limit is None and glu.kind == "gelu" else None  # Mosaic has no erf


@functools.partial(jax.jit, static_argnames="glu")  # layers of the same shape share one lowered function
def few_token_experts(x: jax.Array, weights: jax.Array, chosen: jax.Array, params: dict, glu: Glu) -> jax.Array:
    """Return [T, D], the weighted sum over each token's experts, of x [T, D], weights and chosen [T, k]."""
    arrange = all_tokens if len(x) <= CHUNK else sorted_tokens
    tiles = arrange(x, chosen, len(params["gate"]))
    hidden = product(tiles.x, params, ("gate", "up"), tiles, functools.partial(_activate, glu), blocks=1)
    out = product(hidden, params, ("down",), tiles, lambda sums: sums, blocks=_blocks(x.shape[1], tiles.N))
    return jnp.einsum("tkd,tk->td", out[tiles.row].astype(jnp.float32), weights).astype(x.dtype)


# --- which rows an expert multiplies ----------------------------------------------------------------------------------


class Tiles(NamedTuple):
    """Describe the tiles of tokens."""

    x: jax.Array  # [.., D], the tokens as they are read
    table: jax.Array  # [4, I] int32: expert, first row read, first row written, tokens (0: nothing to do)
    row: jax.Array  # [T, k] int32: where the outputs of a token are written
    N: int
    R: int


def all_tokens(x: jax.Array, chosen: jax.Array, E: int) -> Tiles:
    """Return a tile of all tokens for each expert in use: for up to 8 tokens."""
    T, k = chosen.shape
    flat = chosen.reshape(-1).astype(jnp.int32)
    if T * k <= E:  # a tile is the first pair of an expert
        pair = jnp.arange(T * k, dtype=jnp.int32)
        # the experts of one token are distinct
        tile = pair if T == 1 else jnp.min(jnp.where(flat[:, None] == flat, pair, T * k), axis=1)
        expert, is_used = flat, tile == pair
    else:
        tile, expert = flat, jnp.arange(E, dtype=jnp.int32)
        is_used = jnp.any(flat[:, None] == expert, axis=0)
    base = jnp.arange(len(expert), dtype=jnp.int32) * CHUNK
    table = jnp.stack([expert, jnp.zeros_like(base), base, jnp.where(is_used, T, 0)])
    row = tile.reshape(T, k) * CHUNK + jnp.arange(T, dtype=jnp.int32)[:, None]
    return Tiles(x, table, row, CHUNK, len(expert) * CHUNK)


def tokens_of_tile(M: int, E: int) -> int:
    """Return N: twice the mean of a group, so that most groups are one tile."""
    return min(max(CHUNK, pl.next_power_of_2(2 * M // E)), MAX_TOKENS)


def sorted_tokens(x: jax.Array, chosen: jax.Array, E: int) -> Tiles:
    """Return the tokens sorted by expert, and their tiles.

    Positions are counted, not sorted: a sort is several kernels.
    """
    T, k = chosen.shape
    M, N = T * k, tokens_of_tile(T * k, E)
    flat = chosen.reshape(-1).astype(jnp.int32)
    pair, expert = jnp.arange(M, dtype=jnp.int32), jnp.arange(E, dtype=jnp.int32)
    sizes = jnp.sum(flat == expert[:, None], axis=1, dtype=jnp.int32)
    within = jnp.sum((flat == flat[:, None]) & (pair < pair[:, None]), axis=1, dtype=jnp.int32)
    before = expert < expert[:, None]
    starts = jnp.sum(jnp.where(before, -(-sizes // CHUNK) * CHUNK, 0), axis=1, dtype=jnp.int32)
    first_tile = jnp.sum(jnp.where(before, -(-sizes // N), 0), axis=1, dtype=jnp.int32)
    tile = jnp.arange(min(E, M) + M // N, dtype=jnp.int32)
    owner = jnp.sum(first_tile <= tile[:, None], axis=1, dtype=jnp.int32) - 1
    offset = (tile - first_tile[owner]) * N
    row = starts[flat] + within
    R = M + (CHUNK - 1) * min(E, M)
    R += -R % CHUNK
    first = starts[owner] + offset
    table = jnp.stack([owner, first, first, jnp.clip(sizes[owner] - offset, 0, N)])
    rows = jnp.zeros((R, x.shape[1]), x.dtype).at[row].set(x[pair // k], unique_indices=True)
    return Tiles(rows, table, row.reshape(T, k), N, R)


# --- the products -----------------------------------------------------------------------------------------------------


def _activate(glu: Glu, sums: list[jax.Array]) -> list[jax.Array]:
    def one(gate: jax.Array, up: jax.Array) -> jax.Array:
        if glu.limit is not None:
            return glu(gate, up)
        inner = SLOPE * (gate + CUBE * gate * gate * gate) if glu.kind == "gelu_tanh" else gate
        return gate * jax.nn.sigmoid(inner) * up

    return [one(*pair) for pair in zip(sums[::2], sums[1::2], strict=True)]


def _blocks(dim: int, N: int) -> int:
    """Return how many blocks of 64 rows of down a program computes: enough of them that its start is worth it."""
    return next((n for n in (2, 3) if dim // ROWS % n == 0 and n * N <= 2 * MAX_TOKENS), 1)


def product(
    x: jax.Array, params: dict, names: tuple[str, ...], tiles: Tiles, epilogue: Callable, blocks: int
) -> jax.Array:
    """Return [R, out] of x [.., in]: the rows of each tile by its expert's weights [E, out, in] of these names.

    Args:
        x: The tokens.
        params: The experts' weights and biases.
        names: The weights.
        tiles: The tiles.
        epilogue: It maps the sums of each weight, each [64, N] f32, to what is written: as many as `blocks`.
        blocks: Blocks of 64 rows of each weight that a program computes.
    """
    ws = [params[name] for name in names]
    biases = [params[f"{name}_bias"] for name in names if f"{name}_bias" in params]
    size, parts = ws[0].shape[1], len(ws) * blocks
    stage = (parts * ROWS + tiles.N) * INNER * x.dtype.itemsize
    stages = min(max((SHARED - blocks * tiles.N * ROWS * 2) // stage, 2), x.shape[1] // INNER)
    reads = 1 if x is tiles.x else 2  # the second product reads where the first one wrote
    body = functools.partial(_program, tiles.N, blocks, epilogue, reads)

    def entry(table_ref: Any, x_ref: Any, *refs: Any) -> None:
        weights, added, out_ref = refs[: len(ws)], refs[len(ws) : -1], refs[-1]
        scoped = functools.partial(
            pl.run_scoped,
            functools.partial(body, table_ref, x_ref, weights, added, out_ref),
            _shared((stages, parts, ROWS, INNER), x.dtype),
            _shared((stages, tiles.N, INNER), x.dtype),
            _shared((blocks, tiles.N, ROWS), x.dtype),
            plgpu.SMEM((parts, ROWS), x.dtype),
            plgpu.Barrier(num_arrivals=parts + 1, num_barriers=stages),
            plgpu.Barrier(num_arrivals=parts),
        )
        pl.when(table_ref[3, lax.axis_index("tile")] > 0)(scoped)

    return plgpu.kernel(
        entry,
        out_type=jax.ShapeDtypeStruct((tiles.R, size), x.dtype),
        grid=(tiles.table.shape[1], size // (ROWS * blocks))[::ORDER],
        grid_names=("tile", "block")[::ORDER],
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )(tiles.table, x, *ws, *biases)


def _shared(shape: tuple[int, ...], dtype: Any) -> Any:
    """Return shared memory in tiles, swizzled, as a warpgroup's products read it."""
    return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)))


def _program(
    N: int, blocks: int, epilogue: Callable, reads: int, table_ref: Any, x_ref: Any, weights: Any, biases: Any, out_ref: Any,
    tiles_w: Any, tiles_x: Any, results: Any, tiles_b: Any, loaded: Any, biases_loaded: Any,
) -> None:  # fmt: skip
    """Compute the rows of one block for one tile."""
    tile, block = lax.axis_index("tile"), lax.axis_index("block")
    expert, source, target, count = (table_ref[i, tile] for i in (0, reads, 2, 3))
    source, target = (pl.multiple_of(row, CHUNK) for row in (source, target))
    stages, steps = tiles_w.shape[0], x_ref.shape[1] // INNER
    parts = [(w, pl.ds((block * blocks + i) * ROWS, ROWS)) for i in range(blocks) for w in range(len(weights))]

    def fetch(step: Any, slot: Any) -> None:
        columns = pl.ds(step * INNER, INNER)
        for i, (w, rows) in enumerate(parts):
            plgpu.copy_gmem_to_smem(weights[w].at[expert, rows, columns], tiles_w.at[slot, i], loaded.at[slot])
        plgpu.copy_gmem_to_smem(x_ref.at[pl.ds(source, N), columns], tiles_x.at[slot], loaded.at[slot])

    def slot_of(step: Any) -> Any:
        return lax.rem(step, jnp.array(stages, step.dtype))

    for step in range(stages - 1):
        fetch(step, step)
    if biases:
        for i, (w, rows) in enumerate(parts):
            plgpu.copy_gmem_to_smem(biases[w].at[expert, rows], tiles_b.at[i], biases_loaded)

    def multiply(sums: list) -> list:
        @pl.loop(0, steps)
        def _(step: Any) -> None:
            slot = slot_of(step)
            plgpu.barrier_wait(loaded.at[slot])
            for i, acc in enumerate(sums):
                plgpu.wgmma(acc, tiles_w.at[slot, i], tiles_x.at[slot].transpose((1, 0)))
            plgpu.wgmma_wait(len(sums))  # the previous step's are done: its slot is free
            ahead = step + stages - 1
            pl.when(ahead < steps)(lambda: fetch(ahead, slot_of(ahead)))

        return [acc[...] for acc in sums]

    totals = pl.run_scoped(multiply, [ACC((ROWS, N), jnp.float32) for _ in parts])
    if biases:
        plgpu.barrier_wait(biases_loaded)
        vector = plgpu.Layout.WGMMA.reduce(1)
        added = [plgpu.layout_cast(tiles_b[i], vector) for i in range(len(parts))]
        spread = [lax.broadcast_in_dim(b.astype(jnp.float32), (ROWS, N), [0]) for b in added]
        totals = [total + b for total, b in zip(totals, spread, strict=True)]
    for i, out in enumerate(epilogue(totals)):
        turned = plgpu.layout_cast(out.astype(results.dtype), plgpu.Layout.WGMMA_TRANSPOSED)
        results.at[i].transpose((1, 0))[...] = turned
    plgpu.commit_smem()
    for i in range(blocks):
        columns = pl.ds((block * blocks + i) * ROWS, ROWS)
        for row in range(0, N, CHUNK):
            into = out_ref.at[pl.ds(target + row, CHUNK), columns]
            pl.when(row < count)(functools.partial(plgpu.copy_smem_to_gmem, results.at[i, pl.ds(row, CHUNK)], into))
    plgpu.wait_smem_to_gmem(0)
