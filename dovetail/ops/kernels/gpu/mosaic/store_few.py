"""Normalise, rotate and store the heads of few tokens for Hopper (Pallas, Mosaic GPU), written thread by thread.

A few lanes of a warp take a head: each has as many numbers of both halves, which are rotated into each other, and reads
all it needs at once.

T tokens, N query heads, K key heads, H head dim.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dovetail.core.types import Paged
from dovetail.ops.kernels.gpu.mosaic.row_ops import RowThreads
from dovetail.ops.kernels.gpu.mosaic.threads import THREADS, WARP, Number
from dovetail.ops.paged import is_rounded, round_rows, token_places

DIMS = (32, 64, 128, 256)


class HeadSizes(NamedTuple):
    """Describe the heads of tokens."""

    T: int
    N: int
    K: int
    H: int
    places: int  # there are in all pages
    eps: float
    offset: float

    @property
    def lanes(self) -> int:
        """Return the lanes of a head: each has a word or two of two numbers of each half."""
        return min(WARP, self.H // 4)


def why_not_few(qkv: Any) -> str | None:
    """Return why the kernel does not take qkv [T, N + 2K, H], or None."""
    if qkv.dtype != jnp.bfloat16:
        return f"{qkv.dtype}"
    return None if qkv.shape[-1] in DIMS else f"heads of {qkv.shape[-1]} dims"


@functools.partial(jax.jit, static_argnames=("eps", "offset"))  # equal calls are traced and lowered once
def rotate_store(
    ctx: Paged,
    pages: jax.Array,  # [P, page, 2K, H] bf16
    qkv: jax.Array,  # [T, N + 2K, H] bf16
    tables: tuple,  # cos and sin [T, H / 2] f32
    norms: tuple[jax.Array, jax.Array] | None,  # weights [H] of the queries' and the keys' norm
    eps: float,
    offset: float,
) -> tuple[jax.Array, jax.Array]:
    """Return the queries [T, N, H] and the pages."""
    (T, count, H), K = qkv.shape, pages.shape[2] // 2
    heads = HeadSizes(T, count - 2 * K, K, H, pages.shape[0] * pages.shape[1], eps, offset)
    given = [token_places(ctx, pages, T), *tables, *(x.astype(qkv.dtype) for x in norms or ()), qkv]

    programs, out = pl.cdiv(T * count * heads.lanes, THREADS), jax.ShapeDtypeStruct((T, heads.N, H), qkv.dtype)
    return _run("rotate_store", functools.partial(rotate, heads=heads), given, pages, programs, out)


@jax.jit  # equal calls are traced and lowered once
def write_heads(ctx: Paged, pages: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Write as ops.paged.write_heads does: pages [P, page, 2K, H] with k and v [T, K, H]."""
    if is_rounded(pages):
        k, v = (round_rows(rows, pages.dtype) for rows in (k, v))
    k, v = (x.astype(pages.dtype) for x in (k, v))
    (T, K, H), places = k.shape, pages.shape[0] * pages.shape[1]
    program = functools.partial(copy, rows=T * K, K=K, width=H * pages.dtype.itemsize, places=places)
    programs, given = pl.cdiv(T * K * H * pages.dtype.itemsize, 4 * THREADS), [token_places(ctx, pages, T), k, v]
    return _run("write_pages", program, given, pages, programs, [])[1]


def _run(name: str, program: Any, given: list, pages: jax.Array, programs: int, out: Any) -> tuple[Any, jax.Array]:
    """Run a program of a warpgroup that writes pages in place; return what else it writes, and the pages."""

    def body(*refs: Any) -> None:
        @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WG_SPLAT(()), [plgpu.RefType()] * len(refs)))
        def run(_: Any, number: Any, refs: list) -> None:
            program(RowThreads(), Number(number.registers.flat[0]), *refs)

        run(lax.axis_index("program"), list(refs))  # pyright: ignore[reportCallIssue]

    held = jax.new_ref(pages.reshape(-1, *pages.shape[2:]), memory_space=plgpu.GMEM)
    kernel: Any = pl.kernel(
        body,
        out_type=out,
        mesh=plgpu.Mesh(grid=(programs,), grid_names=("program",)),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        name=name,
    )
    found = kernel(*given, held)
    return found, jax.freeze(held).reshape(pages.shape)


def copy(
    on: Any, number: Any, place_ref: Any, k: Any, v: Any, pages: Any, *, rows: int, K: int, width: int, places: int
) -> None:
    """Copy a word of each of a program's keys and values, whose rows have `width` bytes."""
    per = width // 4
    item = number * THREADS + on.thread
    inside, item = item < rows * per, on.at_most(item, rows * per - 1)
    row, offset = item // per, item % per * 4
    place = on.load(place_ref, row // K)
    words = [on.words(ref, row, width, offset, 1) for ref in (k, v)]
    inside = inside & (place < places)  # padding has a place past the end
    to = on.select(inside, (place * K + row % K) * 2, 0)
    for which, word in enumerate(words):
        on.put(pages, to + which, width, offset, word, inside)


def rotate(on: Any, number: Any, place_ref: Any, cos_ref: Any, sin_ref: Any, *refs: Any, heads: HeadSizes) -> None:
    """Rotate a program's heads; `refs` are the norms' weights, if there are any, qkv, the pages and the queries."""
    *norms, qkv, pages, queries = refs
    T, N, K, H = heads[:4]
    count, each, half = N + 2 * K, H // 4 // heads.lanes, H // 2
    at = number * (THREADS // heads.lanes) + on.thread // heads.lanes
    inside, at = at < T * count, on.at_most(at, T * count - 1)
    token, head, first = at // count, at % count, on.thread % heads.lanes * (2 * each)
    is_query, is_value = head < N, head > N + K - 1

    def read(ref: Any) -> list[Any]:
        """Return a lane's numbers of the rotation, in f32."""
        return [on.as_float(x) for x in on.words(ref, token, half * 4, first * 4, 2 * each)]

    def halves(ref: Any, row: Any) -> list[list[Any]]:
        words = [on.words(ref, row, H * 2, first * 2 + start, each) for start in (0, H)]
        return [[x for word in found for x in on.split(word)] for found in words]

    place, own, cos, sin = on.load(place_ref, token), halves(qkv, at), read(cos_ref), read(sin_ref)
    a, b = own
    if norms:
        of_queries, of_keys = (halves(ref, token * 0) for ref in norms)
        squares = functools.reduce(lambda x, y: x + y, [x * x for x in a + b])
        for bits in (1, 2, 4, 8, 16):
            if bits < heads.lanes:
                squares = squares + on.other_lane(squares, bits)
        scale = on.rsqrt(squares / float(H) + heads.eps)

        def normed(x: Any, of_query: Any, of_key: Any) -> Any:
            return x * scale * (on.select(is_query, of_query, of_key) + heads.offset)

        # rounded as between two operations of the reference
        a, b = (_rounded(on, [*map(normed, *each)]) for each in zip(own, of_queries, of_keys, strict=True))
    pairs = [*zip(a, b, cos, sin, strict=True)]
    turned = [x * c - y * s for x, y, c, s in pairs], [y * c + x * s for x, y, c, s in pairs]
    is_stored = inside & (head > N - 1) & (place < heads.places)  # padding has a place past the end
    key = head - N
    to = on.select(is_stored, place * (2 * K) + on.select(is_value, (key - K) * 2 + 1, key * 2), 0)
    query = on.select(is_query, token * N + head, 0)
    for start, new, old in zip((0, H), turned, own, strict=True):
        out = _words(on, [on.select(is_value, y, x) for x, y in zip(new, old, strict=True)])
        on.put(queries, query, H * 2, first * 2 + start, out, inside & is_query)
        on.put(pages, to, H * 2, first * 2 + start, out, is_stored)


def _words(on: Any, numbers: list[Any]) -> list[Any]:
    return [on.pair(x, y, "bf16") for x, y in zip(numbers[::2], numbers[1::2], strict=True)]


def _rounded(on: Any, numbers: list[Any]) -> list[Any]:
    return [x for word in _words(on, numbers) for x in on.split(word)]
