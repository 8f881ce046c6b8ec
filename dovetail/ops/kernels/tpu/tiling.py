"""How the kernel over flat pages cuts up its work: tiles of queries, blocks of keys, lanes of a row.

T tokens of S sequences, N query heads, K key heads, G = N / K, H head dim, W width of a row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

LANES, SUBLANES = 128, 8
KEYS = 256  # of a block
BUFFER_BYTES = 2**22  # of VMEM, for this block's pages and the next's
TOKENS = 32  # of a tile, where sequences have many
ROWS = 1024  # of a tile over all heads, at most


class Span(NamedTuple):
    """Lanes of a row of a page."""

    first: int
    size: int


class Tiling(NamedTuple):
    tokens: int  # of a tile: R, a power of two
    rows: int  # of a tile for each key head: G R, in whole sublanes
    pages: int  # of a block
    heads: tuple[tuple[Span, Span], ...]  # where each key head's keys and values are

    @property
    def key(self) -> int:
        return self.heads[0][0].size

    @property
    def value(self) -> int:
        return self.heads[0][1].size


def tiling(shape: tuple[int, ...], seqs: int, kv_heads: int, pages: Any, rank: int | None = None) -> Tiling:
    """For queries of shape [T, N, H]; pages [P, page, W]. `rank`: of latents, whose row is one key of H numbers for all
    heads, the first `rank` of them its value. A decode step's tile is one token."""
    count, N, H = shape
    tokens = 1 if count <= seqs else SUBLANES if count <= SUBLANES * seqs else TOKENS
    while tokens > 1 and tokens * N > ROWS:
        tokens //= 2
    keys = min(KEYS, BUFFER_BYTES // (2 * pages.shape[2] * pages.dtype.itemsize))
    heads = ((Span(0, H), Span(0, rank)),) if rank else head_spans(kv_heads, H)
    return Tiling(tokens, whole(N // kv_heads * tokens, SUBLANES), max(1, keys // pages.shape[1]), heads)


def head_spans(K: int, H: int) -> tuple[tuple[Span, Span], ...]:
    """Keys and values of a head stand side by side. Both in one tile of lanes are read as one: the query has zeros
    where the values are, and what the keys add to the output is cut off."""
    if 2 * H <= LANES:
        return tuple((Span(2 * H * k, 2 * H), Span(2 * H * k, 2 * H)) for k in range(K))
    return tuple((Span(2 * H * k, H), Span(2 * H * k + H, H)) for k in range(K))


def num_tiles(T: int, seqs: int, tokens: int) -> int:
    """The most there can be: see ops.paged.tiles_of."""
    return T if tokens == 1 else T // tokens + seqs


def whole(size: int, unit: int = LANES) -> int:
    return -(-size // unit) * unit
