"""Keys, values and queries in the registers of warps, for the kernel of ops/kernels/gpu/decode_warp.py.

Each of the 32 threads, number 4 g + t, has
- of keys g and g + 8 every fourth 16 bytes: which dims a product takes together is free, if it is the same ones of Q;
- of values 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 every eighth 16 bytes: two keys' numbers of a dim become a register.
It copies these into shared memory ahead of time (cp.async), where it finds them later: no thread reads what another one
copied, and so none waits for another one. fp8 becomes f16, by one instruction for two numbers.

C = R * G' columns of a tile (queries of a key head), in blocks of 8: t has columns 2 t and 2 t + 1 of each.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from dovetail.ops.kernels.gpu.mosaic.threads import WARP

CHUNK = 16  # keys
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
        """Return the f32 in shared memory of a column: four lie between the dims of two threads."""
        return self.dim // self.value_dims * (self.value_dims + 4)

    @property
    def width_bytes(self) -> int:
        """Return the bytes of a key."""
        return self.dim * self.itemsize

    @property
    def value_bytes(self) -> int:
        """Return the bytes of the dims of a value that a thread loads at once."""
        return self.value_dims * self.itemsize

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


class WarpKeys:
    """Copy the keys and values of a part and score the keys."""

    def __init__(self, on: Any, part: WarpPart, tables: Any, pages: Any, memory: Any, shape: WarpShape) -> None:
        self.on, self.part, self.tables, self.data, self.shape = on, part, tables, pages, shape
        self.lane, self.memory_ref = on.thread % WARP, memory
        self.memory = on.thread // WARP * shape.warp_words  # the warp's own
        self.g, self.t = self.lane // QUAD, self.lane % QUAD
        self.known = part.position + part.count

    def bounds(self) -> tuple[Any, Any]:
        """Return the first chunk of the part and the one after the last."""
        s, on = self.shape, self.on
        first = self.known * 0
        if s.window:
            behind = self.part.position - (s.window - 1)
            first = on.select(behind > 0, behind, 0) // CHUNK
        last = (self.known + (CHUNK - 1)) // CHUNK
        share = (last - first + (s.splits - 1)) // s.splits
        begin = first + self.part.split * share
        end = on.at_most(begin + share, last)
        self.last = on.at_most(end * CHUNK, self.known) - 1  # key that is read
        return begin, end

    def pages(self, chunk: Any) -> list:
        """Return the first slot of the pages of both halves of a chunk."""
        count = 1 if self.shape.page % CHUNK == 0 else 2
        found = []
        for half in range(count):
            key = self.on.at_most(chunk * CHUNK + half * ROWS, self.last)
            place = self.part.seq * self.shape.width + key // self.shape.page
            found.append(self.on.load(self.tables, place) * self.shape.page)
        return found

    def _row(self, chunk: Any, place: Any, page: list, half: int) -> Any:
        """Return the row of the pages with a key of a half of a chunk."""
        key = self.on.at_most(chunk * CHUNK + place + half * ROWS, self.last)
        return page[half % len(page)] + key % self.shape.page

    def before(self, slot: Any) -> Any:
        """Return the slot before this one, in a circle."""
        return self.on.select(slot == 0, self.shape.stages - 1, slot - 1)

    def after(self, slot: Any) -> Any:
        """Return the slot after this one."""
        return self.on.select(slot == self.shape.stages - 1, 0, slot + 1)

    def copy(self, chunk: Any, page: list, place: Any) -> None:
        """Copy what this thread needs of a chunk's keys and values into its places from word `place` on."""
        s = self.shape
        head = self.part.head * (2 * s.width_bytes)
        keys = [(self._row(chunk, self.g, page, half), head + self.t * 16) for half in (0, 1)]
        offset = head + self.g * s.value_bytes + s.width_bytes
        places = [(self.t * 2 + i, half) for half in (0, 1) for i in (0, 1)]
        values = [(self._row(chunk, at, page, half), offset) for at, half in places]
        for rows, size, threads in ((keys, 16, QUAD), (values, s.value_bytes, ROWS)):
            mine = place + self.lane * (size // 4)
            for row, offset in rows:
                for start in range(0, s.width_bytes, size * threads):
                    self.on.copy(self.memory_ref, mine, self.data, row, s.row, offset + start, size)
                    mine = mine + size // 4 * WARP
            place = place + s.chunk_words // 2
        self.on.end_copies()

    def keys(self, place: Any) -> list:
        """Return the words of keys g and g + 8 of a chunk."""
        return self._copied(place, 2, 16)

    def values(self, place: Any) -> list:
        """Return the words of values 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 of a chunk."""
        return self._copied(place + self.shape.chunk_words // 2, 4, self.shape.value_bytes)

    def _copied(self, place: Any, rows: int, size: int) -> list:
        """Return the words of each row in copies of `size` bytes."""
        count, each = self.shape.chunk_words // 2 // WARP // (size // 4), size // 4
        found = [self.on.copied(self.memory_ref, place + (self.lane + i * WARP) * each, each) for i in range(count)]
        per = count // rows
        return [[word for words in found[i : i + per] for word in words] for i in range(0, count, per)]

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
                words += on.words(q, row, s.dim * 2, lane % QUAD * size + (start + at), 4)
        words = [on.as_f16(x) for x in words] if s.itemsize == 1 else words
        found.append([words[i : i + 2] for i in range(0, len(words), 2)])
    return found
