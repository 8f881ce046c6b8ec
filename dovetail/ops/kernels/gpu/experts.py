"""Experts of few tokens for Hopper (Pallas, Mosaic GPU): each weight in use is read once, at the memory's bandwidth.

The weights are the left operand of a warpgroup's products, which has at least 64 rows, and the tokens of an expert the
right one, which has at least 8, so that few tokens waste little. A program computes 64 rows of gate and up and applies
the activation, or it computes some rows of down. Tiles of tokens never span two experts. The outputs of a token are
summed by XLA, in f32.

Up to 8 tokens are not sorted: each expert in use multiplies all of them. More are copied in the order of their experts,
each of which begins at a multiple of 8 rows.

T tokens, D model dim, E experts, F their width, k experts per token, M = T k, I tiles, N tokens of a tile, R rows.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dovetail.ops.kernels.gpu.mosaic.routing import Sizes, arrangement

FEW = 512  # tokens of a step, at most: with more, grouped products are as fast (benchmarks/experts.py)
ROWS, INNER = 64, 64  # of a weight's tile in shared memory
CHUNK = 8  # tokens that are stored at once
MAX_TOKENS = 128  # of a tile
SLACK = 2.5  # standard deviations by which a tile is larger than the mean group: what does not fit reads weights again
# Bytes of shared memory of a program. With the first, two programs share a multiprocessor: one loads while the other
# one begins or ends. The second is for tiles of which the first holds fewer than MIN_STAGES.
SHARED = (100 * 1024, 210 * 1024)
MIN_STAGES = 3
PROGRAMS = 2 * 132  # that run at once on an H100 or H200
ACC = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]


def why_not_few_tokens(x: Any, params: dict, glu: Any) -> str | None:
    """Return why the kernel cannot run, or None."""
    _, F, D = params["gate"].shape
    if x.ndim != 2:  # in training, and the kernel has no gradient
        return "x is not a matrix"
    if len(x) > FEW:
        return f"more than {FEW} tokens"
    if not all(isinstance(a, jax.Array) and a.dtype == jnp.bfloat16 for a in (x, *params.values())):
        return "not arrays of bf16"
    if F % ROWS or D % ROWS:  # tiles are whole
        return f"dims of {D} and {F}, not multiples of {ROWS}"
    return "exact GELU" if glu.limit is None and glu.kind == "gelu" else None


@functools.partial(jax.jit, static_argnames="glu")  # the layers of a model share one lowered function
def few_token_experts(x: jax.Array, weights: jax.Array, chosen: jax.Array, params: dict, glu: Any) -> jax.Array:
    """Return [T, D], the weighted sums over the tokens' experts: x [T, D], weights and chosen [T, k].

    `glu` is an ops.glu.Glu.
    """
    arrange = all_tokens if len(x) <= CHUNK else sorted_tokens
    tiles = arrange(x, chosen, len(params["gate"]))
    hidden = product(tiles.x, params, ("gate", "up"), tiles, lambda sums: [glu.in_kernel(*sums)], 1)
    out = product(hidden, params, ("down",), tiles, lambda sums: sums, _blocks(x.shape[1], tiles))
    return jnp.einsum("tkd,tk->td", out[tiles.row].astype(jnp.float32), weights).astype(x.dtype)


# --- which rows an expert multiplies ----------------------------------------------------------------------------------


class Tiles(NamedTuple):
    """Describe the tiles of tokens."""

    x: jax.Array  # [.., D], the tokens as the first product reads them
    table: jax.Array  # [4, I] int32: expert, first row read, first row written, tokens (0: unused); see `tile_number`
    row: jax.Array  # [T, k] int32: the rows written for a token
    N: int
    R: int  # rows written
    source: tuple[jax.Array, jax.Array] | None = None  # tokens, and the index of each row of x among them


def all_tokens(x: jax.Array, chosen: jax.Array, E: int) -> Tiles:
    """Return a tile of all tokens, of which there are at most 8, for each expert in use."""
    T, k = chosen.shape
    flat = chosen.reshape(-1).astype(jnp.int32)
    if T * k <= E:  # a tile is the first pair of an expert; those of one token are distinct
        pair = jnp.arange(T * k, dtype=jnp.int32)
        tile = pair if T == 1 else jnp.min(jnp.where(flat[:, None] == flat, pair, T * k), axis=1)
        expert, is_used = flat, tile == pair
    else:
        tile, expert = flat, jnp.arange(E, dtype=jnp.int32)
        is_used = jnp.any(flat[:, None] == expert, axis=0)
    first = jnp.arange(len(expert), dtype=jnp.int32) * CHUNK
    table = jnp.stack([expert, jnp.zeros_like(first), first, jnp.where(is_used, T, 0)])
    if T == 1:  # the rest is known: a kernel less, and the first thing that others wait for
        table = expert[None]
    row = tile.reshape(T, k) * CHUNK + jnp.arange(T, dtype=jnp.int32)[:, None]
    return Tiles(x, table, row, CHUNK, len(expert) * CHUNK)


def tile_number(table_ref: Any, which: int, tile: Any) -> Any:
    """Return a number of the table; that of a single token has only experts."""
    if table_ref.shape[0] > 1:
        return table_ref[which, tile]
    return (table_ref[0, tile], tile * 0, tile * CHUNK, tile * 0 + 1)[which]


def sorted_tokens(x: jax.Array, chosen: jax.Array, E: int, most: int = MAX_TOKENS, slack: float = SLACK) -> Tiles:
    """Return the tokens in the order of their experts, and their tiles, of at most `most` tokens."""
    T, k = chosen.shape
    sizes = Sizes(T, k, E, tokens_of_tile(T * k, E, most, slack), CHUNK)
    table, row, token = arrangement(sizes, functools.partial(places, sizes=sizes))(chosen)
    return Tiles(x[token], table, row, sizes.N, sizes.rows, (x, token))


def places(chosen: jax.Array, sizes: Sizes) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the table of the tiles, the rows of the tokens, and the token of each row, or 0, from chosen [T, k].

    Positions are counted by comparing all pairs: a sort is several kernels.
    """
    _, k, E, N, chunk = sizes
    M = sizes.M
    flat = chosen.reshape(-1).astype(jnp.int32)
    pair, expert = jnp.arange(M, dtype=jnp.int32), jnp.arange(E, dtype=jnp.int32)
    count = functools.partial(jnp.sum, axis=1, dtype=jnp.int32)
    size = count(flat == expert[:, None])
    within = count((flat == flat[:, None]) & (pair < pair[:, None]))
    before = expert < expert[:, None]
    starts = count(jnp.where(before, -(-size // chunk) * chunk, 0))
    first_tile = count(jnp.where(before, -(-size // N), 0))
    tile = jnp.arange(sizes.tiles, dtype=jnp.int32)
    owner = count(first_tile <= tile[:, None]) - 1
    offset = (tile - first_tile[owner]) * N
    first = starts[owner] + offset
    table = jnp.stack([owner, first, first, jnp.clip(size[owner] - offset, 0, N)])
    row = starts[flat] + within
    token = jnp.zeros(sizes.rows, jnp.int32).at[row].set(pair // k, unique_indices=True)
    return table, row.reshape(chosen.shape), token  # rows of no pair are not written back


def tokens_of_tile(M: int, E: int, most: int, slack: float) -> int:
    """Return the tokens of a tile: those of most groups fill as few tiles as they can, of at most `most`.

    Groups of random choices have sizes around the mean that differ by its root, of which `slack` are added.
    """
    size = M / E + slack * math.sqrt(M / E)
    return max(CHUNK, math.ceil(size / math.ceil(size / most) / CHUNK) * CHUNK)


# --- the products -----------------------------------------------------------------------------------------------------


def _blocks(dim: int, tiles: Tiles) -> int:
    """Return how many blocks of 64 rows of down a program computes.

    With one it would read little, but one it is where the card would have too few programs.
    """
    blocks = dim // ROWS
    if tiles.table.shape[1] * blocks < 2 * PROGRAMS:
        return 1
    return next((n for n in (2, 3) if blocks % n == 0 and n * tiles.N <= 2 * MAX_TOKENS), 1)


def product(
    x: jax.Array, params: dict, names: tuple[str, ...], tiles: Tiles, epilogue: Callable, blocks: int
) -> jax.Array:
    """Multiply the rows of each tile by its expert's weights [E, out, in] of these names: x [.., in] -> [R, out].

    Args:
        x: The tokens as `tiles` has them, or the rows of a previous product.
        params: The experts' weights and biases.
        names: The weights of this product.
        tiles: The tiles.
        epilogue: A function from the sums, [64, N] f32 for each block of each weight, to an output for each block.
        blocks: The blocks of 64 rows of each weight that a program computes.
    """
    ws = [params[name] for name in names]
    biases = [params[f"{name}_bias"] for name in names if f"{name}_bias" in params]
    size, parts = ws[0].shape[1], len(ws) * blocks
    stages = _stages(parts, blocks, tiles.N, x.shape[1] // INNER)
    reads = 1 if x is tiles.x else 2  # a second product reads where the first one wrote
    body = functools.partial(_program, blocks, epilogue, reads)

    def entry(table_ref: Any, x_ref: Any, *refs: Any) -> None:
        arrays = table_ref, x_ref, refs[: len(ws)], refs[len(ws) : -1], refs[-1]
        run = functools.partial(
            pl.run_scoped,
            functools.partial(body, *arrays),
            shared_tiles((stages, parts, ROWS, INNER), x.dtype),
            shared_tiles((stages, tiles.N, INNER), x.dtype),
            shared_tiles((blocks, tiles.N, ROWS), x.dtype),
            plgpu.SMEM((parts, ROWS), x.dtype),
            plgpu.Barrier(num_arrivals=parts + 1, num_barriers=stages),
            plgpu.Barrier(num_arrivals=parts),
        )
        pl.when(tile_number(table_ref, 3, lax.axis_index("tile")) > 0)(run)

    # the default in jax 0.12, and not in 0.10
    semantics = plgpu.LoweringSemantics.Warpgroup
    return plgpu.kernel(
        entry,
        out_type=jax.ShapeDtypeStruct((tiles.R, size), x.dtype),
        grid=(tiles.table.shape[1], size // (ROWS * blocks)),
        grid_names=("tile", "block"),
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=semantics),
    )(tiles.table, x, *ws, *biases)


def _stages(parts: int, blocks: int, N: int, steps: int) -> int:
    """Return how many steps are in shared memory at once, of which one is multiplied and the others are loaded."""
    step, results = (parts * ROWS + N) * INNER * 2, blocks * N * ROWS * 2
    fitting = [(size - results) // step for size in SHARED]
    return min(fitting[0] if fitting[0] >= MIN_STAGES else fitting[1], steps + 1)


def shared_tiles(shape: tuple[int, ...], dtype: Any) -> Any:
    """Return shared memory in tiles, swizzled, as a warpgroup's products read it."""
    return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)))


def _program(
    blocks: int, epilogue: Callable, reads: int,
    table_ref: Any, x_ref: Any, weights: Any, biases: Any, out_ref: Any,
    tiles_w: Any, tiles_x: Any, results: Any, vectors: Any, loaded: Any, biases_loaded: Any,
) -> None:  # fmt: skip
    """Compute the rows of some blocks for one tile."""
    tile, block = lax.axis_index("tile"), lax.axis_index("block")
    expert, source, target, count = (tile_number(table_ref, i, tile) for i in (0, reads, 2, 3))
    source, target = pl.multiple_of(source, CHUNK), pl.multiple_of(target, CHUNK)
    rows = [pl.ds((block * blocks + i) * ROWS, ROWS) for i in range(blocks)]
    parts = [(i, each) for each in rows for i in range(len(weights))]

    def fetch(step: Any, slot: Any) -> None:
        columns = pl.ds(step * INNER, INNER)
        for at, (i, part) in enumerate(parts):
            plgpu.copy_gmem_to_smem(weights[i].at[expert, part, columns], tiles_w.at[slot, at], loaded.at[slot])
        tokens = pl.ds(source, tiles_x.shape[1])  # those past the last row are zeros
        plgpu.copy_gmem_to_smem(x_ref.at[tokens, columns], tiles_x.at[slot], loaded.at[slot])

    for step in range(tiles_w.shape[0] - 1):
        fetch(step, step)
    for at, (i, part) in enumerate(parts if biases else ()):
        plgpu.copy_gmem_to_smem(biases[i].at[expert, part], vectors.at[at], biases_loaded)

    sums = _sums(tiles_w, tiles_x, loaded, fetch, x_ref.shape[1] // INNER)
    if biases:
        plgpu.barrier_wait(biases_loaded)
        added = (plgpu.layout_cast(vectors[at], plgpu.Layout.WGMMA.reduce(1)) for at in range(len(parts)))
        sums = [x + lax.broadcast_in_dim(b.astype(x.dtype), x.shape, [0]) for x, b in zip(sums, added, strict=True)]
    store_rows(epilogue(sums), results, out_ref, rows, target, count)


def store_rows(outputs: list, results: Any, out_ref: Any, rows: list, target: Any, count: Any) -> None:
    """Store outputs [64, N], one for each block of `rows`, as `count` rows of out_ref [R, out] from `target` on."""
    begin_stores(outputs, results, out_ref, rows, target, count)
    plgpu.wait_smem_to_gmem(0)


def begin_stores(outputs: list, results: Any, out_ref: Any, rows: list, target: Any, count: Any) -> None:
    """Store as `store_rows` does, without waiting until the copies from shared memory are done."""
    for i, out in enumerate(outputs):
        store_transposed(results.at[i], out.astype(results.dtype))
    plgpu.commit_smem()
    for first in range(0, results.shape[1], CHUNK):
        chunk, into = pl.ds(first, CHUNK), pl.ds(target + first, CHUNK)

        @pl.when(first < count)  # the rows after a tile are another one's
        def _(chunk: Any = chunk, into: Any = into) -> None:
            for i, columns in enumerate(rows):
                plgpu.copy_smem_to_gmem(results.at[i, chunk], out_ref.at[into, columns])


def store_transposed(ref: Any, x: jax.Array) -> None:
    """Store x [64, N] as [N, 64] in shared memory."""
    ref.transpose((1, 0))[...] = plgpu.layout_cast(x, plgpu.Layout.WGMMA_TRANSPOSED)


def _sums(tiles_w: Any, tiles_x: Any, loaded: Any, fetch: Callable, steps: int) -> list[jax.Array]:
    """Return the products of each part with the tokens, [64, N] f32."""
    stages, parts, N = tiles_w.shape[0], tiles_w.shape[1], tiles_x.shape[1]

    def slot_of(step: Any) -> Any:
        return lax.rem(step, jnp.array(stages, step.dtype))

    def multiply(sums: list) -> list[jax.Array]:
        @pl.loop(0, steps)
        def _(step: Any) -> None:
            slot, ahead = slot_of(step), step + stages - 1
            plgpu.barrier_wait(loaded.at[slot])
            for at, acc in enumerate(sums):
                plgpu.wgmma(acc, tiles_w.at[slot, at], tiles_x.at[slot].transpose((1, 0)))
            plgpu.wgmma_wait(parts)  # those of the previous step are done, and its slot is free
            pl.when(ahead < steps)(lambda: fetch(ahead, slot_of(ahead)))

        return [acc[...] for acc in sums]

    return pl.run_scoped(multiply, [ACC((ROWS, N), jnp.float32) for _ in range(parts)])
