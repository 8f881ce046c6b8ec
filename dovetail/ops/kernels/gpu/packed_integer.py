"""Packed weights of 4 bits times one token in integers, on Hopper (ops/kernels/gpu/packed_few.py).

Beside packed_warp: a word of codes becomes 8 bytes by 3 (int4) or 8 (mxfp4) operations instead of 14 or more, since
int4 - 8 and 2 e2m1 are integers. A program first rounds the token to 15 bits, with a power of two for the values that
a product (mma, 16 rows, 8 columns, 32 values) adds up: a group of int4, and 32 values of mxfp4. So numbers down to 2^-6
of the greatest one stay as they are. They are split into two bytes, which are columns of their own: sums of a higher
and a lower byte lie side by side in a thread, and are exact. A table gives bytes of mxfp4 without signs; codes below 0
are zeros in one product and alone in another one, which is subtracted.

The four threads that share a row have different groups of mxfp4, whose scales differ: there, the token has a pair of
columns for each of the four, with zeros in the other ones' values.
"""

from __future__ import annotations

import functools
from typing import Any

from jax.experimental import pallas as pl
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith

from dovetail.ops.kernels.gpu.byte_ops import (
    bits_of,
    flipped,
    float_of,
    max_halves,
    multiply_add_bytes,
    permuted,
    shuffled,
    unknown,
)
from dovetail.ops.kernels.gpu.packed_warp import QUAD, FewPlan, LoadedStep, Warp
from dovetail.ops.kernels.gpu.warp_ops import (
    as_f32,
    barrier,
    byte_address,
    c,
    c64,
    fma,
    int32,
    load_number,
    load_shared,
    load_words,
    store_shared,
    store_shared_word,
    thread,
    times,
    wide,
)

MOST_MEMORY = 96 * 1024  # bytes of a program's token
PIECE = 16  # values, of which a column has 16 bytes
PARTS = 2  # bytes of a number: the columns of the token
COUNT = 0x4B400000  # the bits of 1.5 * 2^23 in f32, whose lowest bits count ones
GREATEST = 140  # exponents of bf16 plus that of the factor: numbers up to 16,320
LEAST = 24  # exponent of the greatest value: below it numbers lose bits
ABOVE = {"int4": 4, "mxfp4": 1}  # exponent by which the integers of codes are too large
MAGNITUDES = 0x03020100, 0x0C080604  # 2 e2m1 without a sign, in bytes


def suits(p: FewPlan) -> bool:
    """Return whether a plan can multiply one token in integers."""
    name = p.form.name
    if name not in ABOVE or (name == "mxfp4" and p.form.group != 2 * p.loaded):
        return False
    return p.loaded * p.per_byte % PIECE == 0 and 4 * sum(sizes(p)) <= MOST_MEMORY


def sizes(p: FewPlan) -> tuple[int, int]:
    """Return the words of 32 bits of the token and of its scales in shared memory."""
    return (PARTS * column_bytes(p) + chunk_bytes(p)) // 4, units(p)


def units(p: FewPlan) -> int:
    """Return the loads of a row."""
    return p.steps * p.warps * QUAD


def chunk_bytes(p: FewPlan) -> int:
    """Return the bytes of a column for the loads of the four threads that share a row."""
    return QUAD * p.loaded * p.per_byte


def column_bytes(p: FewPlan) -> int:
    """Return the bytes from a column to the next one: two columns are read from different banks."""
    return units(p) // QUAD * chunk_bytes(p) + 64


class IntegerWarp(Warp):
    """Write the operations of a warp."""

    sums = 2  # of a block: of row g and of row g + 8

    def __init__(self, p: FewPlan, partial: Any, words: Any, scales: Any, x: Any, inputs: dict, *scalars: Any) -> None:
        super().__init__(p, partial, x, inputs, *scalars)
        self.words, self.unit_scales = words, scales
        self.source = scalars[2]
        self.table, self.kept = [unknown(x) for x in MAGNITUDES], unknown(0xF0F0F0F0)
        chunk, own = times(self.warp, chunk_bytes(p)), times(self.quad, PIECE)
        if p.form.name == "mxfp4":  # rows of the table of columns are lanes: those of other threads' groups read zeros
            is_own = arith.cmpi(arith.CmpIPredicate.eq, arith.divui(self.row, c(PARTS)), self.quad)
            column = times(arith.remui(self.row, c(PARTS)), column_bytes(p))
            zeros = c(PARTS * column_bytes(p))
            self.place = arith.addi(arith.select(is_own, arith.addi(column, chunk), zeros), own)
            self.stride = arith.select(is_own, c(p.warps * chunk_bytes(p)), c(0))
            first = arith.addi(times(self.warp, QUAD), self.quad)
        else:
            column = arith.minui(self.row, c(PARTS - 1))  # other lanes share the last one
            self.place = arith.addi(arith.addi(times(column, column_bytes(p)), chunk), own)
            self.stride = c(p.warps * chunk_bytes(p))
            first = times(self.warp, QUAD)
        self.scale_place = times(first, 4)

    # --- the token ----------------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Round the token and store it in shared memory; begin to load the biases, which are needed last."""
        p = self.p
        self.biases = [super(IntegerWarp, self).end("bias", at) for at in range(len(self.rows))]
        if p.form.name == "mxfp4":
            place = times(arith.remui(thread(), c(chunk_bytes(p) // 16)), 16)
            zeros = arith.addi(place, c(PARTS * column_bytes(p)))
            store_shared(self.words, zeros, [c(0)] * 4)
        for number in range(pl.cdiv(units(p), p.threads)):
            self.unit(number)
        barrier(p.threads)

    def unit(self, number: int) -> None:
        """Round and store the values of a load, as its thread: the threads of a row have neighbours."""
        p = self.p
        at = arith.addi(c(number * p.threads), thread())
        at = arith.remui(at, c(units(p))) if units(p) % p.threads else at
        values = self.values(at)
        most = functools.reduce(max_halves, [arith.andi(x, c(0x7FFF7FFF)) for x in values])
        most = arith.maxui(arith.andi(most, c(0xFFFF)), arith.shrui(most, c(16)))
        for distance in (1, 2) if p.form.name == "int4" else ():  # they share a group
            most = arith.maxui(most, shuffled(most, distance))
        exponent = arith.maxui(arith.shrui(most, c(7)), c(LEAST))
        factor = arith.shli(arith.subi(c(127 + GREATEST), exponent), c(23))
        inverse = arith.subi(exponent, c(GREATEST - 127 + ABOVE[p.form.name]))
        is_number = arith.cmpi(arith.CmpIPredicate.slt, exponent, c(255))
        inverse = arith.select(is_number, arith.shli(inverse, c(23)), c(0x7FC00000))
        store_shared_word(self.unit_scales, times(at, 4), inverse)
        place = arith.addi(times(arith.divui(at, c(QUAD)), chunk_bytes(p)), times(arith.remui(at, c(QUAD)), PIECE))
        for i in range(0, len(values), PIECE // 2):
            halves = [self.bytes_of(values[j : j + 4], float_of(factor)) for j in (i, i + 4)]
            for part in range(PARTS):
                to = arith.addi(place, c(part * column_bytes(p) + 2 * QUAD * i))
                store_shared(self.words, to, [x for half in halves for x in half[part]])

    def values(self, at: Any) -> list:
        """Load the values of the token that belong to a load of codes; behind the row's end there are zeros."""
        p = self.p
        offset = times(at, p.loaded)
        row, column = wide(self.source), times(offset, 2 * p.per_byte)
        if p.width % p.step == 0:
            return load_words(byte_address(self.x, row, 2 * p.size, column), p.loaded * p.per_byte // 2)
        is_there = arith.cmpi(arith.CmpIPredicate.slt, offset, c(p.width))
        column = arith.minsi(column, c(2 * p.per_byte * (p.width - p.loaded)))
        words = load_words(byte_address(self.x, row, 2 * p.size, column), p.loaded * p.per_byte // 2)
        return [arith.select(is_there, word, c(0)) for word in words]

    def bytes_of(self, words: list, factor: Any) -> list[list]:
        """Return the higher and the lower bytes of 8 values, two registers each, as their codes are multiplied."""
        begin = float_of(c(COUNT + 128))  # lower bytes are 128 too large, which their highest bit undoes
        found = []
        for word in words:
            found.append(bits_of(fma(float_of(arith.shli(word, c(16))), factor, begin)))
            found.append(bits_of(fma(float_of(arith.andi(word, c(0xFFFF0000))), factor, begin)))
        high, low = [], []
        for own in (found[::2], found[1::2]) if self.p.form.name == "int4" else (found[:4], found[4:]):
            first, second = (permuted(own[i], own[i + 1], c(0x5140)) for i in (0, 2))
            high.append(permuted(first, second, c(0x7632)))
            low.append(arith.xori(permuted(first, second, c(0x5410)), c(0x80808080)))
        return [high, low]

    def tokens(self, step: Any, known: int | None = None) -> list:
        """Load the bytes of the token for a step's codes, and their scale behind them."""
        p = self.p
        place = arith.addi(self.place, arith.muli(step, self.stride))
        pieces = range(0, chunk_bytes(p), QUAD * PIECE)
        words = [word for first in pieces for word in load_shared(self.words, place, first, 4)]
        at = arith.addi(self.scale_place, times(step, 4 * p.warps * QUAD))
        return words + load_shared(self.unit_scales, at, 0, 1)

    # --- products -----------------------------------------------------------------------------------------------------

    def multiply(self, tokens: list, loaded: LoadedStep, totals: list) -> list:
        """Return the totals plus the products of a step."""
        p = self.p
        *words, scale = tokens
        scale, found = float_of(scale), []
        for at, total in enumerate(totals):
            sums = [self.sum_of(half, words, loaded.words[at]) for half in range(1 + (p.form.name == "mxfp4"))]
            less = sums[1] if len(sums) > 1 else [c(COUNT)] * 4
            sums = [arith.subf(float_of(x), float_of(y)) for x, y in zip(sums[0], less, strict=True)]
            scales = [arith.mulf(self.scale_of(x), scale) for x in loaded.scales[at]]
            # a higher byte counts 256
            both = [fma(sums[2 * i], float_of(c(0x43800000)), sums[2 * i + 1]) for i in (0, 1)]
            found.append([fma(both[i], scales[i], total[i]) for i in (0, 1)])
        return found

    def sum_of(self, sign: int, tokens: list, words: tuple[list, list]) -> list:
        """Return COUNT plus the product of the codes of a block, of mxfp4 only those with this sign, without it."""
        sums = [c(COUNT)] * 4
        for n, (low, high) in enumerate(zip(*words, strict=True)):
            a, b = self.codes(low, sign), self.codes(high, sign)
            sums = multiply_add_bytes(sums, [a[0], b[0], a[1], b[1]], tokens[2 * n : 2 * n + 2])
        return sums

    def codes(self, word: Any, sign: int) -> list:
        """Return a word's codes in two registers of bytes; of mxfp4 those with the other sign are 0."""
        if self.p.form.name == "int4":  # 16 (q - 8), of the lower and of the higher codes of each byte
            return [flipped(x, c(0x88888888), self.kept) for x in (arith.shli(word, c(4)), word)]
        own = arith.xori(word, c(0x88888888)) if sign else word
        # a code with its highest bit set gives the sign of a byte of the table eight times: 0
        return [permuted(self.table[0], self.table[1], x) for x in (own, arith.shrui(own, c(16)))]

    def scale_of(self, scale: Any) -> Any:
        """Return a group's scale in f32; one of 2^-127 gives 0."""
        if self.p.form.name == "int4":
            return as_f32(scale)
        return float_of(arith.shli(arith.extui(int32(), scale), c(23)))

    def scalar(self, kind: str, i: int, row: Any, group: Any = None) -> Any:
        """Return the scale or bias of a row; as no thread writes it, ptxas may load it before barriers."""
        ref = self.inputs[kind][i]
        columns = 1 if group is None else ir.MemRefType(ref.type).shape[-1]
        return load_number(ref, row, columns, c64(0) if group is None else wide(group))

    def end(self, kind: str, at: int) -> list | None:
        """Return the biases of a block's rows; scales are of groups."""
        return self.biases[at] if kind == "bias" else None

    def whole(self, total: list) -> list:
        """Return a block's sums: of mxfp4 each of the four threads has a part."""
        if self.p.form.name == "mxfp4":
            for distance in (1, 2):
                total = [arith.addf(x, shuffled(x, distance)) for x in total]
        return total
