"""The operations of a warp that multiplies packed weights by up to 8 tokens, for ops/kernels/gpu/packed_few.py.

The four threads that share a row of a warp's product (mma, 16 rows, 8 tokens, 16 values) load up to 16 bytes of codes
each, a few steps ahead, and the values of a token that belong to them. Codes become numbers in the registers in which
they arrive (packed_codes). Scales are applied where they are exact: to the numbers if they are powers of two (mxfp4),
or else to the sums of a group or of a row, in f32. Threads that share a row therefore load codes of one group.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, memref, scf

from dovetail.core.formats import CODES, Format
from dovetail.ops.kernels.gpu.packed_codes import SUMS, Pairs, Words, decoded, planes_of
from dovetail.ops.kernels.gpu.warp_ops import (
    address,
    as_f32,
    byte_address,
    c,
    c64,
    fma,
    halves,
    int32,
    load_words,
    multiply_add,
    register,
    scale_pair,
    thread,
    times,
    twice,
    wide,
)

BLOCK = 16  # rows of a warp's product
WARPS, QUAD = 4, 4  # of a warpgroup; threads that share a row
MOST_LOADED = 16  # bytes by a thread at once
ONCE = ".L1::no_allocate.L2::128B"  # for what no other program reads: 90% of the bandwidth instead of 84%


class FewPlan(NamedTuple):
    """Describe a product of few tokens."""

    form: Format
    size: int  # values of a row
    out: int  # rows of a weight
    names: int  # weights with the same input: gate and up
    blocks: int  # of 16 rows of each weight that a program computes
    ahead: int  # steps whose codes are loaded before they are needed
    ahead_x: int = 2  # steps whose tokens are: a divisor of `ahead`
    groups: int = 1  # of four warps
    is_joined: bool = False  # whether gate and up are rows of one weight, one after the other
    in_integers: bool = False  # packed_integer, with one token

    @property
    def rows(self) -> int:
        """Return the rows of each weight that a program computes."""
        return BLOCK * self.blocks

    @property
    def warps(self) -> int:
        """Return the warps of a program."""
        return WARPS * self.groups

    @property
    def threads(self) -> int:
        """Return the threads of a program."""
        return 32 * self.warps

    @property
    def per_byte(self) -> int:
        """Return the values of a byte."""
        return CODES[self.form.name][1]

    @property
    def loaded(self) -> int:
        """Return the bytes that a thread loads at once: those of a row's four threads are of one group."""
        if not self.scales_sums:
            return MOST_LOADED
        return min(self.form.group // self.per_byte // QUAD, MOST_LOADED)

    @property
    def width(self) -> int:
        """Return the bytes of a row of codes."""
        return self.size // self.per_byte

    @property
    def step(self) -> int:
        """Return the bytes of a row that a program loads at once."""
        return self.warps * QUAD * self.loaded

    @property
    def steps(self) -> int:
        """Return the steps of a warp; in the last one there may be nothing left for some threads."""
        return pl.cdiv(self.width, self.step)

    @property
    def scales_sums(self) -> bool:
        """Return whether scales of groups multiply sums."""
        return bool(self.form.group) and self.form.name != "mxfp4"


class LoadedStep(NamedTuple):
    """Hold what a thread has loaded for a step: an item for each block of each weight."""

    words: list[tuple[list, list]]  # of codes: of row g and of row g + 8
    scales: list[tuple]  # one of each of these rows, if they have groups
    zeros: list[tuple]


State = tuple[list, list[LoadedStep], list]  # the totals, and the steps and tokens that are loaded ahead


class Warp:
    """Write the operations of a warp."""

    sums = 4  # of a block by a thread: tokens 2q and 2q + 1 of row g, and of row g + 8

    def __init__(self, p: FewPlan, partial: Any, x: Any, inputs: dict[str, list], expert, row, source, count) -> None:
        self.p, self.partial, self.x, self.inputs = p, partial, x, inputs
        lane = arith.remui(thread(), c(32))
        self.warp = arith.divui(thread(), c(32))
        self.row, self.quad = arith.divui(lane, c(QUAD)), arith.remui(lane, c(QUAD))
        # lanes without a token share the last one
        token = arith.minui(self.row, arith.subi(count, c(1)))
        self.token = wide(arith.addi(source, token))
        each = p.out * (p.names if p.is_joined else 1)
        first = arith.addi(wide(row), arith.muli(wide(expert), c64(each)))
        first = arith.addi(first, wide(self.row))
        self.rows = []  # of each block of each weight: (weight, its array, its two rows)
        for i in range(p.names):
            array, before = (0, i * p.out) if p.is_joined else (i, 0)
            for block in range(p.blocks):
                rows = [arith.addi(first, c64(before + BLOCK * block + half)) for half in (0, 8)]
                self.rows.append((i, array, rows))

    def run(self) -> None:
        """Add up all steps and store the sums."""
        p = self.p
        zero = utils.c(0.0, ir.F32Type.get())
        totals = [[zero] * self.sums for _ in self.rows]
        ahead = [self.load(c(i), i) for i in range(min(p.ahead, p.steps))]
        self.prepare()
        tokens = [self.tokens(c(i), i) for i in range(min(p.ahead_x, p.steps))]
        rounds = max(0, (p.steps - 1) // p.ahead - 1)  # the last step is not loaded in the loop
        if rounds > 1:
            totals, ahead, tokens = self.loop(rounds, totals, ahead, tokens)
        done = rounds * p.ahead if rounds > 1 else 0
        for i in range(done, p.steps):
            current, own, ahead, tokens = ahead[0], tokens[0], ahead[1:], tokens[1:]
            if i + p.ahead < p.steps:
                ahead.append(self.load(c(i + p.ahead), i + p.ahead))
            if i + p.ahead_x < p.steps:
                tokens.append(self.tokens(c(i + p.ahead_x), i + p.ahead_x))
            totals = self.multiply(own, current, totals)
        self.store(totals)

    def prepare(self) -> None:
        """Do what is needed before the tokens are loaded."""

    def loop(
        self, rounds: int, totals: list, ahead: list[LoadedStep], tokens: list
    ) -> tuple[list, list[LoadedStep], list]:
        """Do `rounds` rounds in a loop."""
        leaves, tree = jax.tree.flatten((totals, ahead, tokens), is_leaf=lambda x: isinstance(x, ir.Value))
        index = ir.IndexType.get()
        loop = scf.ForOp(utils.c(0, index), utils.c(rounds, index), utils.c(1, index), leaves)
        with ir.InsertionPoint(loop.body):
            first = times(arith.index_cast(int32(), loop.induction_variable), self.p.ahead)
            found = self.round(first, *jax.tree.unflatten(tree, list(loop.inner_iter_args)))
            scf.yield_(jax.tree.leaves(found, is_leaf=lambda x: isinstance(x, ir.Value)))
        return jax.tree.unflatten(tree, list(loop.results))

    def round(
        self, first: Any, totals: list, ahead: list[LoadedStep], tokens: list
    ) -> tuple[list, list[LoadedStep], list]:
        """Do `ahead` steps: after them, each register has its role again."""
        p = self.p
        ahead, tokens = list(ahead), list(tokens)
        for i in range(p.ahead):
            now, at = arith.addi(first, c(i)), i % p.ahead_x
            current, ahead[i] = ahead[i], self.load(arith.addi(now, c(p.ahead)))
            own, tokens[at] = tokens[at], self.tokens(arith.addi(now, c(p.ahead_x)))
            totals = self.multiply(own, current, totals)
        return totals, ahead, tokens

    def offset(self, step: Any, known: int | None) -> tuple[Any, Any]:
        """Return the first byte of a row that a thread loads, and whether there is one; None if there always is."""
        p = self.p
        chunk = arith.addi(times(step, p.warps), self.warp)
        offset = times(arith.addi(times(chunk, QUAD), self.quad), p.loaded)
        if known is None or (known + 1) * p.step <= p.width:
            return offset, None
        is_there = arith.cmpi(arith.CmpIPredicate.slt, offset, c(p.width))
        return arith.minsi(offset, c(p.width - p.loaded)), is_there

    def load(self, step: Any, known: int | None = None) -> LoadedStep:
        """Load the codes and scales of a step, whose number may be `known`."""
        p = self.p
        offset, _ = self.offset(step, known)
        words, scales, zeros = [], [], []
        group = arith.divui(offset, c((p.form.group or 1) // p.per_byte or 1))
        for _, i, rows in self.rows:
            codes = self.inputs["codes"][i]
            words.append(tuple(load_words(byte_address(codes, r, p.width, offset), p.loaded // 4, ONCE) for r in rows))
            if p.form.group:
                scales.append(tuple(self.scalar("scale", i, r, group) for r in rows))
            if "zero" in self.inputs:
                zeros.append(tuple(self.scalar("zero", i, r, group) for r in rows))
        return LoadedStep(words, scales, zeros)

    def scalar(self, kind: str, i: int, row: Any, group: Any = None) -> Any:
        """Return the scale, zero point or bias of a row, as it is stored."""
        from jaxlib.mlir.dialects import llvm

        ref = self.inputs[kind][i]
        memory = ir.MemRefType(ref.type)
        columns = memory.shape[-1] if kind != "bias" else 1
        column = c64(0) if group is None else wide(group)
        return llvm.load(memory.element_type, address(ref, row, columns, column, memory.element_type))

    def multiply(self, tokens: list, loaded: LoadedStep, totals: list) -> list:
        """Return the totals plus the products of a step."""
        p = self.p
        zero = utils.c(0.0, ir.F32Type.get())
        pairs = self.pairs(tokens)
        found = []
        for at, total in enumerate(totals):
            sums = [zero] * 4 if p.scales_sums else total
            low, high = ([self.numbers(loaded, at, half, word) for word in loaded.words[at][half]] for half in (0, 1))
            for word, of_word in enumerate(pairs):
                for plane in range(0, len(of_word), 2):
                    left = [low[word][plane], high[word][plane], low[word][plane + 1], high[word][plane + 1]]
                    sums = multiply_add(sums, left, of_word[plane : plane + 2])
            if p.scales_sums:
                scales = [as_f32(x) for x in loaded.scales[at]]
                sums = [fma(x, scales[i // 2], y) for i, (x, y) in enumerate(zip(sums, total, strict=True))]
            found.append(sums)
        return found

    def numbers(self, loaded: LoadedStep, at: int, half: int, word: Any) -> list:
        """Return a pair of numbers for each plane of a word of codes."""
        name = self.p.form.name
        found = []
        for plane in planes_of(name):
            own = plane._replace(minus=None) if name == "uint4" else plane
            pair = decoded(Words.of(word), own, Pairs.of)
            if name == "uint4":  # 128 + q - (128 + zero)
                pair = pair - Pairs.of(Words.of(twice(arith.extui(int32(), loaded.zeros[at][half]))) | 0x4300)
            if name == "mxfp4":
                pair = pair * Pairs.of(Words.of(scale_pair(loaded.scales[at][half])))
            found.append(register(pair.value))
        return found

    def tokens(self, step: Any, known: int | None = None) -> list:
        """Load the values of a token that belong to the codes of a step."""
        p = self.p
        offset, is_there = self.offset(step, known)
        place = address(self.x, self.token, p.size, wide(times(offset, p.per_byte)), ir.BF16Type.get())
        values = load_words(place, p.loaded * p.per_byte // 2)
        return values if is_there is None else [arith.select(is_there, value, c(0)) for value in values]

    def pairs(self, tokens: list) -> list[list]:
        """Return the pairs of a token's values that the planes of each word are multiplied with.

        Of 2 * planes values in a row, plane p has p and planes + p.
        """
        planes = len(planes_of(self.p.form.name))
        found = []
        for first in range(0, len(tokens), planes):
            of_word = tokens[first : first + planes]
            found.append([halves(of_word[i // 2], of_word[(planes + i) // 2], i % 2) for i in range(planes)])
        return found

    def store(self, totals: list) -> None:
        """Store the sums times the rows' scales; the first warp adds the biases."""
        p, index = self.p, ir.IndexType.get()
        is_first = arith.cmpi(arith.CmpIPredicate.eq, self.warp, c(0))
        zero, each = utils.c(0.0, ir.F32Type.get()), self.sums // 2
        for at, ((i, _, _), total) in enumerate(zip(self.rows, totals, strict=True)):
            scales, biases = self.end("scale", at), self.end("bias", at)
            for n, value in enumerate(self.whole(total)):
                value = arith.mulf(value, scales[n // each]) if scales else value
                value = arith.addf(value, arith.select(is_first, biases[n // each], zero)) if biases else value
                token = arith.addi(times(self.quad, each), c(n % each))
                row = arith.addi(self.row, c(at % p.blocks * BLOCK + n // each * 8))
                place = [self.warp, c(i), token, row]
                memref.store(value, self.partial, [arith.index_cast(index, at) for at in place])

    def whole(self, total: list) -> list:
        """Return a block's sums without what was left out of the numbers."""
        factor = utils.c(SUMS, ir.F32Type.get())
        return [arith.mulf(value, factor) for value in total] if self.p.form.name == "mxfp4" else total

    def end(self, kind: str, at: int) -> list | None:
        """Return the scales or biases of a block's rows, in f32, if rows have them."""
        if kind not in self.inputs or (kind == "scale" and self.p.form.group):
            return None
        _, array, rows = self.rows[at]
        return [as_f32(self.scalar(kind, array, r)) for r in rows]
