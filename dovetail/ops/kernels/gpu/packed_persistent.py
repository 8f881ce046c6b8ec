"""The operations of a warp that multiplies several blocks of packed weights in turn, for kernels/gpu/packed_few.py.

Beside packed_warp: a program loads the first codes of its next block before it adds up the sums of the last one, so
that loads are always under way. The tokens lie in shared memory, in the pairs that the planes of a word are multiplied
with. Loads are pinned to where they are written: otherwise the compiler moves them to the products that need them,
which leaves two steps under way, and moves all scales of a block behind its products.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith

from dovetail.ops.kernels.gpu.packed_codes import planes_of
from dovetail.ops.kernels.gpu.packed_warp import ONCE, QUAD, WARPS, FewPlan, LoadedStep, Warp
from dovetail.ops.kernels.gpu.warp_ops import (
    as_f32,
    ballot,
    bits_of,
    byte_address,
    c,
    count_ones,
    load_now,
    load_shared,
    load_words,
    moved,
    number,
    pin,
    repeat,
    store_shared,
    thread,
    times,
    wide,
)

THREADS = 32 * WARPS
PIECE = 8  # values of a token in 16 bytes
FILLED = 8  # pieces that a thread loads at once
PAD = 64  # bytes after each token: two tokens are read from different banks


def suits(p: FewPlan) -> bool:
    """Return whether each step of a row begins with a group, and whole pieces of a token belong to a load."""
    return p.step % max(1, p.form.group // p.per_byte) == 0 and p.loaded * p.per_byte % PIECE == 0


def pieces(p: FewPlan) -> int:
    """Return the pieces of a token in shared memory, as many for each thread."""
    return pl.cdiv(p.steps * p.step * p.per_byte // PIECE, THREADS) * THREADS


def token_words(p: FewPlan) -> int:
    """Return the words of 32 bits from a token to the next one in shared memory."""
    return (16 * pieces(p) + PAD) // 4


class Rows(NamedTuple):
    """Describe a thread's two rows of a block: the weight's array, the first row, where its first bytes are."""

    array: int
    first: Any
    places: dict[str, Any]


def share(table: Any, tiles: int, programs: int, program: Any) -> tuple:
    """Return the tile of a program, which of its programs this is (as many as it has, if the program has no tile), and how many it has.

    The programs are divided among the tiles in use, whose tokens, in the last row of the table, are not 0. Each lane
    looks at one tile of 32.
    """
    lane, zero = arith.remui(thread(), c(32)), c(0)
    masks = []
    for first in range(0, tiles, 32):
        at = arith.addi(lane, c(first))
        place = byte_address(table, wide(c(3)), 4 * tiles, times(arith.minsi(at, c(tiles - 1)), 4))
        is_used = arith.cmpi(arith.CmpIPredicate.slt, zero, load_words(place, 1)[0])
        masks.append(ballot(arith.andi(is_used, arith.cmpi(arith.CmpIPredicate.slt, at, c(tiles)))))
    used = functools.reduce(arith.addi, map(count_ones, masks))
    each = arith.divui(c(programs), arith.maxui(used, c(1)))
    rank, before, tile = arith.divui(program, each), zero, zero
    for i, mask in enumerate(masks):
        own = arith.addi(before, count_ones(arith.andi(mask, arith.subi(arith.shli(c(1), lane), c(1)))))
        bit = arith.andi(arith.shrui(mask, lane), c(1))
        is_it = arith.andi(arith.cmpi(arith.CmpIPredicate.eq, own, rank), arith.cmpi(arith.CmpIPredicate.eq, bit, c(1)))
        found = ballot(is_it)  # of one lane, or none
        exists = arith.cmpi(arith.CmpIPredicate.eq, count_ones(found), c(1))
        lower = count_ones(arith.subi(found, c(1)))
        tile = arith.select(exists, arith.addi(lower, c(32 * i)), tile)
        before = arith.addi(before, count_ones(mask))
    has_tile = arith.cmpi(arith.CmpIPredicate.slt, rank, used)
    return tile, arith.select(has_tile, arith.remui(program, each), each), each


class PersistentWarp(Warp):
    """Write the operations of a warp; `own` is the shared memory of the tokens."""

    def __init__(self, p: FewPlan, partial: Any, x: Any, own: Any, inputs: dict[str, list], expert, source, count):
        super().__init__(p, partial, x, inputs, expert, c(0), source, count)
        self.own, self.source, self.count = own, source, count
        self.at = times(arith.addi(times(self.warp, QUAD), self.quad), p.loaded)
        self.per_group = max(1, p.form.group // p.per_byte)  # bytes of a row
        self.each = p.loaded * p.per_byte // PIECE  # pieces of a load
        self.kinds = [kind for kind in ("codes", "scale", "zero") if kind in inputs and (kind == "codes" or p.form.group)]
        token = arith.minui(self.row, arith.subi(count, c(1)))
        piece = arith.addi(times(self.warp, QUAD * self.each), self.quad)
        self.place = arith.addi(times(token, 4 * token_words(p)), times(piece, 16))

    # --- the tokens ---------------------------------------------------------------------------------------------------

    def fill(self) -> None:
        """Copy the tokens to shared memory, in pairs, with zeros after the end of a row."""
        each = pieces(self.p) // THREADS
        at_once, total = min(FILLED, self.p.tokens * each), times(self.count, each)

        def some(i: Any) -> None:
            numbers = [arith.addi(times(i, at_once), c(j)) for j in range(at_once)]
            numbers = [arith.minsi(n, arith.subi(total, c(1))) for n in numbers]
            found = [self.piece(arith.divui(n, c(each)), arith.remui(n, c(each))) for n in numbers]
            for place, words in found:
                store_shared(self.own, place, words)

        repeat(arith.divui(arith.addi(total, c(at_once - 1)), c(at_once)), some)

    def piece(self, token: Any, number: Any) -> tuple[Any, list]:
        """Return the place of a thread's piece in shared memory, and its values in pairs."""
        p, each = self.p, self.each
        at = arith.addi(times(number, THREADS), thread())
        is_there = arith.cmpi(arith.CmpIPredicate.slt, at, c(p.size // PIECE))
        column = times(arith.minsi(at, c(p.size // PIECE - 1)), 2 * PIECE)
        values = load_words(byte_address(self.x, wide(arith.addi(self.source, token)), 2 * p.size, column), 4)
        pairs = [arith.select(is_there, x, c(0)) for of_word in super().pairs(values) for x in of_word]
        # the pieces that the threads of a quad read at once lie side by side
        of_quad, inner = times(arith.divui(at, c(QUAD * each)), QUAD * each), times(arith.remui(at, c(each)), QUAD)
        to = arith.addi(arith.addi(of_quad, inner), arith.remui(arith.divui(at, c(each)), c(QUAD)))
        return arith.addi(times(token, 4 * token_words(p)), times(to, 16)), pairs

    def ordered(self, place: Any, step: int) -> list:
        """Return the pairs of a token's values that belong to the codes of a step."""
        first = step * self.bytes_of_tokens
        return [x for i in range(self.each) for x in load_shared(self.own, place, first + 16 * QUAD * i)]

    @property
    def bytes_of_tokens(self) -> int:
        """Return the bytes of a token in a step."""
        return 2 * self.p.step * self.p.per_byte

    def pairs(self, tokens: list) -> list[list]:
        """Return the pairs of each word: they are in this order."""
        planes = len(planes_of(self.p.form.name))
        return [tokens[i : i + planes] for i in range(0, len(tokens), planes)]

    # --- the codes ----------------------------------------------------------------------------------------------------

    def find(self, row: Any) -> list[Rows]:
        """Return a thread's rows of the block that begins at a row."""
        found = []
        for _, array, (first, _) in self.rows:
            first = arith.addi(first, wide(row))
            group = arith.divui(self.at, c(self.per_group))
            offsets = {kind: self.at if kind == "codes" else times(group, self.item(kind)) for kind in self.kinds}
            places = {k: byte_address(self.inputs[k][array], first, self.width(k), at) for k, at in offsets.items()}
            found.append(Rows(array, first, places))
        return found

    def item(self, kind: str) -> int:
        """Return the bytes of a scale or zero point."""
        return bits_of(self.inputs[kind][0]) // 8

    def width(self, kind: str) -> int:
        """Return the bytes from a row to the next one."""
        return self.p.width if kind == "codes" else self.p.size // self.p.form.group * self.item(kind)

    def stride(self, kind: str) -> int:
        """Return the bytes from a step to the next one."""
        return self.p.step if kind == "codes" else self.p.step // self.per_group * self.item(kind)

    def load(self, rows: list[Rows], step: int, when: Any = None) -> LoadedStep:
        """Load the codes and scales of the step that comes so many after the rows' places."""
        found: dict[str, list[tuple]] = {kind: [] for kind in ("codes", "scale", "zero")}
        for kind in self.kinds:
            for each in rows:
                ats = [step * self.stride(kind) + half * self.width(kind) for half in (0, 8)]
                if kind == "codes":
                    pair = tuple(load_now(each.places[kind], at, self.p.loaded, when, ONCE) for at in ats)
                else:
                    pair = tuple(load_now(each.places[kind], at, self.item(kind), when)[0] for at in ats)
                found[kind].append(pair)
        return LoadedStep(*found.values())

    def load_known(self, rows: list[Rows], step: int, when: Any = None) -> LoadedStep:
        """Load a step that may be the last one, in which threads behind the end of a row load its end once more."""
        p = self.p
        if (step + 1) * p.step <= p.width:
            return self.load(rows, step, when)
        at = arith.minsi(arith.addi(self.at, c(step * p.step)), c(p.width - p.loaded))
        moves = {"codes": arith.subi(at, self.at)}
        group = arith.subi(*(arith.divui(n, c(self.per_group)) for n in (at, self.at)))
        moves |= {kind: times(group, self.item(kind)) for kind in self.kinds if kind != "codes"}
        return self.load([r._replace(places={k: moved(x, moves[k]) for k, x in r.places.items()}) for r in rows], 0, when)

    def edges(self, rows: list[Rows]) -> list[dict[str, list]]:
        """Load the scales and biases of rows."""
        kinds = [kind for kind in ("scale", "bias") if kind in self.inputs and (kind == "bias" or not self.p.form.group)]
        found = []
        for each in rows:
            refs = {kind: self.inputs[kind][each.array] for kind in kinds}
            sizes = {kind: bits_of(ref) // 8 for kind, ref in refs.items()}
            places = {kind: byte_address(ref, each.first, sizes[kind], c(0)) for kind, ref in refs.items()}
            loaded = {k: [load_now(places[k], half * sizes[k], sizes[k])[0] for half in (0, 8)] for k in kinds}
            found.append({kind: [(x, refs[kind]) for x in pair] for kind, pair in loaded.items()})
        return found

    # --- a block ------------------------------------------------------------------------------------------------------

    def begin(self, row: Any) -> list[LoadedStep]:
        """Load the first steps of the first block."""
        rows = self.find(row)
        ahead = [self.load_known(rows, i) for i in range(self.p.ahead)]
        pin()
        return ahead

    def block(
        self, row: Any, ahead: list[LoadedStep], after: Any = None, has_next: Any = None, slot: Any = None
    ) -> list[LoadedStep]:
        """Add up and store the sums of a block, and return the first steps of the one `after` it, if there is one.

        Args:
            row: The first row of the block.
            ahead: The block's first steps.
            after: The first row of the block after it; None if there never is one.
            has_next: Whether there is one.
            slot: Where in `partial` to store the sums; 0 if None.
        """
        p, self.slot = self.p, (c(0) if slot is None else slot,)
        self.now = self.find(row)
        self.ends = self.edges(self.now)
        totals = [[utils.c(0.0, ir.F32Type.get())] * 4 for _ in self.rows]
        rounds = max(0, (p.steps - 1) // p.ahead - 1)  # the last step is not loaded in the loop
        rounds = rounds if rounds > 1 else 0
        if rounds:
            totals, ahead, _ = self.loop(rounds, totals, ahead, [])
        following = None if after is None else self.find(after)
        for i in range(rounds * p.ahead, p.steps):
            own, current, ahead = self.ordered(self.place, i), ahead[0], ahead[1:]
            if i + p.ahead < p.steps:
                ahead = [*ahead, self.load_known(self.now, i + p.ahead)]
            elif following is not None:
                ahead = [*ahead, self.load_known(following, i + p.ahead - p.steps, has_next)]
            pin()
            totals = self.multiply(own, self.typed(current), totals)
        self.store(totals)
        return ahead

    def round(self, first: Any, totals: list, ahead: list[LoadedStep], tokens: list) -> tuple[list, list, list]:
        """Do `ahead` steps of a block: after them, each register has its role again."""
        rows = [
            r._replace(places={k: moved(x, times(first, self.stride(k))) for k, x in r.places.items()}) for r in self.now
        ]
        place, ahead = arith.addi(self.place, times(first, self.bytes_of_tokens)), list(ahead)
        for i in range(self.p.ahead):
            own, current = self.ordered(place, i), ahead[i]
            ahead[i] = self.load(rows, i + self.p.ahead)
            pin()
            totals = self.multiply(own, self.typed(current), totals)
        return totals, ahead, tokens

    def typed(self, loaded: LoadedStep) -> LoadedStep:
        """Return the step with scales and zero points as numbers of their types."""
        scales, zeros = (
            [tuple(number(x, self.inputs[kind][0]) for x in pair) for pair in pairs]
            for kind, pairs in (("scale", loaded.scales), ("zero", loaded.zeros))
        )
        return LoadedStep(loaded.words, scales, zeros)

    def end(self, kind: str, at: int) -> list | None:
        """Return the scales or biases of the rows, in f32."""
        pair = self.ends[at].get(kind)
        return None if pair is None else [as_f32(number(x, ref)) for x, ref in pair]

    # --- what is loaded ahead, between two blocks ---------------------------------------------------------------------

    @staticmethod
    def structure(p: FewPlan) -> Any:
        """Return the structure of what is loaded ahead."""
        blocks = range(p.names * p.blocks)
        words = [([0] * max(1, p.loaded // 4),) * 2 for _ in blocks]
        scales = [(0, 0) for _ in blocks if p.form.group]
        zeros = scales if p.form.name == "uint4" else []
        return jax.tree.structure([LoadedStep(words, scales, zeros)] * p.ahead)
