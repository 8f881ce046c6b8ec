"""Keys, values and queries in the registers of warps, for the kernel of ops/kernels/gpu/decode_warp.py.

A token's key and value of a head are adjacent. A warp copies them into shared memory ahead of time (cp.async): eight
threads 128 bytes, so that a sector of 32 bytes is asked for once. Keys past the end are zeros, and are not read.
Each of the 32 threads, number 4 g + t, then has
- of keys g and g + 8 every fourth 16 bytes: which dims a product takes together is free, if it is the same ones of Q;
- of values 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 every eighth 16 bytes: two keys' numbers of a dim become a register.
`swizzle` says where in 128 bytes a token's 16 bytes lie, so that both are read without conflicts of banks. fp8 becomes
f16, by one instruction for two numbers.

C = R * G' columns of a tile (queries of a key head), in blocks of 8: t has columns 2 t and 2 t + 1 of each.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from dovetail.ops.kernels.gpu.mosaic.threads import WARP, WARPS

CHUNK = 16  # keys
PIECE = 16  # bytes that a thread copies at once
BLOCK = 8  # columns
QUAD, ROWS = 4, 8  # threads t and g
HIDDEN = -1e30  # a score without weight: not -inf, whose difference to itself is NaN
LOG2E = math.log2(math.e)


class WarpShape(NamedTuple):
    """Hold what is static in a kernel."""

    tokens: int
    heads: int
    kv_heads: int
    dim: int
    columns: int  # C, a multiple of 8
    group: int  # G'
    page: int
    width: int  # pages of a sequence in the table
    itemsize: int  # bytes of a number of a page
    splits: int
    scale: float
    window: int | None
    softcap: float | None
    stages: int  # chunks of a warp in shared memory, of which all but one are under way

    @property
    def blocks(self) -> range:
        """Return the blocks of columns."""
        return range(self.columns // BLOCK)

    @property
    def of_group(self) -> int:
        """Return G."""
        return self.heads // self.kv_heads

    @property
    def row(self) -> int:
        """Return the bytes of the keys and values of a token."""
        return 2 * self.kv_heads * self.dim * self.itemsize

    @property
    def value_dims(self) -> int:
        """Return how many neighbouring dims of a value a thread loads: 16 bytes, or 8 of a short row."""
        return min(16 // self.itemsize, self.dim // ROWS)

    @property
    def held(self) -> int:
        """Return the f32 in shared memory of a column: four lie between the dims of two threads, and four columns."""
        return self.dim // self.value_dims * (self.value_dims + 4) + 4

    @property
    def width_bytes(self) -> int:
        """Return the bytes of a key."""
        return self.dim * self.itemsize

    @property
    def value_bytes(self) -> int:
        """Return the bytes of the dims of a value that a thread loads at once."""
        return self.value_dims * self.itemsize

    @property
    def pieces(self) -> int:
        """Return how many 16 bytes the key and the value of a token have."""
        return 2 * self.width_bytes // PIECE

    @property
    def chunk_words(self) -> int:
        """Return the words of the keys and values of a chunk."""
        return CHUNK * 2 * self.width_bytes // 4

    @property
    def warp_words(self) -> int:
        """Return the words of shared memory of a warp: chunks, and at the end its sums."""
        return max(self.stages * self.chunk_words, self.columns * self.held)

    @property
    def kind(self) -> str:
        """Return the numbers that products multiply."""
        return "f16" if self.itemsize == 1 else "bf16"


class WarpPart(NamedTuple):
    """Hold what a program computes: some keys of a tile, for a key head."""

    head: Any
    seq: Any
    first: Any  # token of the tile
    count: Any  # of its tokens
    position: Any  # of the first one
    split: Any
    begin: Any  # chunk
    end: Any  # and the one after the last


def swizzle(token: Any) -> Any:
    """Return what the numbers of a token's 16 bytes are combined with (exclusive or), which decides their banks.

    It is linear: swizzle(x + y) = swizzle(x) ^ swizzle(y) where x and y have no bit in common.
    """
    return (token // 2 % 4 * 2) ^ (token % 2 * 4)


def chunks_of(position: Any, count: Any, split: Any, s: WarpShape) -> tuple[Any, Any]:
    """Return the first chunk of a part and the one after the last. It has a chunk for each warp, or none."""
    div, turns = lambda x, y: lax.div(x, jnp.int32(y)), WARPS * s.splits
    first = div(jnp.maximum(position - (s.window - 1), 0), CHUNK) if s.window else 0
    last = div(position + count + (CHUNK - 1), CHUNK)
    share = div(last - first + (turns - 1), turns) * WARPS
    begin = first + split * share
    return begin, jnp.minimum(begin + share, last)


class WarpKeys:
    """Copy the keys and values of a part and score the keys."""

    def __init__(self, on: Any, part: WarpPart, tables: Any, pages: Any, memory: Any, shape: WarpShape) -> None:
        self.on, self.part, self.tables, self.data, self.shape = on, part, tables, pages, shape
        self.lane, self.memory_ref = on.thread % WARP, memory
        self.memory = on.thread // WARP * shape.warp_words  # the warp's own
        self.g, self.t = self.lane // QUAD, self.lane % QUAD
        self.token, self.piece = self.lane // shape.pieces, self.lane % shape.pieces  # that it copies, the first ones
        self.last = on.at_most(part.end * CHUNK, part.position + part.count) - 1  # key that is read

    def pages(self, chunk: Any) -> list:
        """Return the first slot of the page of a chunk, or of the pages of both halves."""
        count = 1 if self.shape.page % CHUNK == 0 else 2
        found = []
        for half in range(count):
            key = self.on.at_most(chunk * CHUNK + half * ROWS, self.last)
            place = self.part.seq * self.shape.width + key // self.shape.page
            found.append(self.on.load(self.tables, place) * self.shape.page)
        return found

    def before(self, slot: Any) -> Any:
        """Return the slot before this one, in a circle."""
        return self.on.select(slot == 0, self.shape.stages - 1, slot - 1)

    def after(self, slot: Any) -> Any:
        """Return the slot after this one."""
        return self.on.select(slot == self.shape.stages - 1, 0, slot + 1)

    def copy(self, chunk: Any, page: list, place: Any) -> None:
        """Copy this thread's share of a chunk's keys and values to word `place` and following."""
        s, on = self.shape, self.on
        left = self.last - chunk * CHUNK - self.token  # tokens after this thread's first one
        offset = self.part.head * (s.pieces * PIECE) + self.piece * PIECE
        own = self.piece ^ swizzle(self.token)
        for first in range(0, CHUNK, CHUNK // len(page)):
            row = page[first // ROWS] + (chunk * CHUNK + first) % s.page + self.token
            source = on.address(self.data, row, s.row, offset)
            for at in range(first * s.pieces, (first + CHUNK // len(page)) * s.pieces, WARP):
                token, piece = divmod(at, s.pieces)
                target = place + (self.token * s.pieces + (own ^ swizzle(token)) + at) * (PIECE // 4)
                begin = (token - first) * s.row + piece * PIECE
                on.copy(self.memory_ref, target, self.data, source, begin, left > token - 1)
        on.end_copies()

    def keys(self, place: Any) -> list:
        """Return the words of keys g and g + 8 of a chunk."""
        own, found = self.t ^ swizzle(self.g), []
        for row in (0, ROWS):
            pieces = [(own ^ i % 8) + (self.g * self.shape.pieces + i // 8 * 8) for i in self._every(QUAD, PIECE)]
            found.append(self._words(place, [x + row * self.shape.pieces for x in pieces], 4))
        return found

    def values(self, place: Any) -> list:
        """Return the words of values 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 of a chunk."""
        s, found = self.shape, []
        before, count = s.width_bytes // PIECE, PIECE // s.value_bytes  # pieces of the key; threads of a piece
        own = (self.g // count + before % 8) ^ swizzle(self.t * 2)
        place = place + self.g % count * (s.value_bytes // 4)
        for row in (0, 1, ROWS, ROWS + 1):
            starts = [before // 8 * 8 + i for i in self._every(ROWS, s.value_bytes)]
            pieces = [(own ^ swizzle(row)) + (self.t * (2 * s.pieces) + row * s.pieces + i) for i in starts]
            found.append(self._words(place, pieces, s.value_bytes // 4))
        return found

    def _every(self, threads: int, size: int) -> range:
        """Return the pieces of a key or value that a thread's first one is followed by, if `threads` take turns."""
        return range(0, self.shape.width_bytes // PIECE, max(1, threads * size // PIECE))

    def _words(self, place: Any, pieces: list, count: int) -> list:
        """Return the first `count` words of each piece."""
        found = [self.on.copied(self.memory_ref, place + piece * (PIECE // 4), count) for piece in pieces]
        return [word for words in found for word in words]

    def scores(self, chunk: Any, keys: list, queries: list) -> list:
        """Return for each block the scores of keys g and g + 8 in both columns, in base 2."""
        on, s = self.on, self.shape
        left = [_key_pairs(on, low, high, s) for low, high in _steps(keys, s)]
        found = []
        for block in s.blocks:
            chains = [[on.constant(0.0)] * 4 for _ in (0, 1)]  # each waits for its last product
            for i, numbers in enumerate(left):
                chains[i % 2] = on.multiply(chains[i % 2], numbers, queries[block][i], s.kind)
            sums = [self._scaled(x + y) for x, y in zip(*chains, strict=True)]
            found.append([self._visible(chunk, block, i, x) for i, x in enumerate(sums)])
        return found

    def _scaled(self, score: Any) -> Any:
        on, s = self.on, self.shape
        if s.softcap is None:
            return score * (s.scale * LOG2E)
        # tanh x = 1 - 2 / (e^2x + 1)
        power = on.exp2(score * (2 * LOG2E * s.scale / s.softcap))
        return on.inverse(power + 1.0) * (-2 * s.softcap * LOG2E) + s.softcap * LOG2E

    def _visible(self, chunk: Any, block: int, i: int, score: Any) -> Any:
        """Return score i, or HIDDEN if the column's token does not see the key."""
        s, on = self.shape, self.on
        column = self.t * 2 + (block * BLOCK + i % 2)
        last = self.part.position + (column // s.group if s.columns > s.group else 0)
        behind = last - (chunk * CHUNK + self.g) - i // 2 * ROWS
        score = on.select(behind < 0, HIDDEN, score)
        return on.select(behind > s.window - 1, HIDDEN, score) if s.window else score


def _steps(keys: list, s: WarpShape) -> list:
    """Return for each product with 16 dims the words of both keys."""
    count = 1 if s.itemsize == 1 else 2
    return [[row[i : i + count] for row in keys] for i in range(0, len(keys[0]), count)]


def _key_pairs(on: Any, low: list, high: list, s: WarpShape) -> list:
    """Return 4 dims of keys g and g + 8 as a thread's left operand."""
    (a, c), (b, d) = (on.unpack(row[0]) if s.itemsize == 1 else row for row in (low, high))
    return [a, b, c, d]


def value_pairs(on: Any, words: list, s: WarpShape) -> list:
    """Return a word of each of the four values as left operands, each of two dims."""
    if s.itemsize == 2:
        return [[on.permute(words[i], words[i + 1], order) for i in (0, 2) for order in (0x5410, 0x7632)]]
    found = []
    for order in (0x5140, 0x7362):
        numbers = [on.unpack(on.permute(words[i], words[i + 1], order)) for i in (0, 2)]
        found.append([x for pair in numbers for x in pair])
    return found


def column_of(on: Any, part: WarpPart, column: Any, s: WarpShape) -> tuple[Any, Any]:
    """Return the row [T * N] of a column's query and whether it has one; another column's row if not."""
    token, head = column // s.group, column % s.group
    is_one = (token < part.count) & (head < s.of_group)
    token, head = on.at_most(token, part.count - 1), on.at_most(head, s.of_group - 1)
    return (part.first + token) * s.heads + part.head * s.of_group + head, is_one


def queries_of(on: Any, part: WarpPart, q: Any, s: WarpShape) -> list:
    """Return for each block the right operands of each 16 dims: column g, the dims that `WarpKeys.keys` loads."""
    lane = on.thread % WARP
    found = []
    for block in s.blocks:
        row = column_of(on, part, lane // QUAD + block * BLOCK, s)[0]
        size = 16 // s.itemsize * 2  # bytes of the dims of 16 bytes of a key
        words = []
        for start in range(0, s.dim * 2, size * QUAD):
            for at in range(0, size, 16):
                words += on.words(q, row, s.dim * 2, lane % QUAD * size + (start + at))
        words = [on.as_f16(x) for x in words] if s.itemsize == 1 else words
        found.append([words[i : i + 2] for i in range(0, len(words), 2)])
    return found
