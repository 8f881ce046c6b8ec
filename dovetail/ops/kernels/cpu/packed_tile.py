"""A tile of a product with a quantised weight for CPUs: LANES rows of the weight, a lane of a vector for each.

Written as LLVM instructions, which a loop in numba does not become. A tile is unpacked once (`_unpack`), from rows as
they lie in memory, and then multiplied by all rows of x (`_multiply`):

- codes [size / 4, LANES, 4]: four neighbouring values of each row, a byte each;
- scales and offsets [size / group, LANES], f32: a value is scale * code + offset.

x is rounded to int8 in the same groups (`_round`), so that four products are one instruction (vpdpbusd on x86 with
VNNI, vpmaddubsw on AVX2, sdot on Arm), or used as it is. Addresses are integers, strides in bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import cfunc, types
from numba.core import cgutils
from numba.extending import intrinsic

from dovetail.ops.kernels.cpu.threads import symbol

HAS = {name for name, is_there in llvm.get_host_cpu_features().items() if is_there}
VNNI = {"avx512vnni", "avx512bw", "avx512vl"} <= HAS
LANES = 16 if VNNI else 8
MOST = 8 if VNNI else 4  # rows of x at a time: their sums stay in registers
BIAS = 128 if VNNI else 0  # vpdpbusd multiplies unsigned codes: those of 8 bits are raised by this
_INT, _BYTE, _SHORT, _LANE, _FLOAT = (*(ir.IntType(bits) for bits in (64, 8, 16, 32)), ir.FloatType())
_BYTES, _INTS, _FLOATS = (ir.VectorType(kind, n) for kind, n in ((_BYTE, 4 * LANES), (_LANE, LANES), (_FLOAT, LANES)))


class _Code:
    """Emit common instructions with one builder."""

    def __init__(self, builder: Any):
        self.builder = builder

    def at(self, base: Any, *offsets: Any) -> Any:
        """Return base + the offsets, numbers or values."""
        for offset in offsets:
            base = self.builder.add(base, _INT(offset) if isinstance(offset, int) else offset)
        return base

    def times(self, value: Any, number: int) -> Any:
        return self.builder.mul(value, _INT(number))

    def load(self, address: Any, kind: Any) -> Any:
        return self.builder.load(self.builder.inttoptr(address, kind.as_pointer()), align=1)

    def store(self, value: Any, address: Any) -> None:
        self.builder.store(value, self.builder.inttoptr(address, value.type.as_pointer()), align=1)

    def hidden(self, value: Any) -> Any:
        """Return the value, opaque to LLVM.

        It would compute each row's address from the last one's, and loads would wait.
        """
        return self.builder.asm(ir.FunctionType(_INT, [_INT]), "", "=r,0", [value], False)

    def call(self, name: str, result: Any, *args: Any) -> Any:
        kind = ir.FunctionType(result, [arg.type for arg in args])
        return self.builder.call(cgutils.get_or_insert_function(self.builder.module, kind, name), args)

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        return self.call(f"llvm.fma.v{LANES}f32", _FLOATS, a, b, c)

    def pick(self, a: Any, b: Any, lanes: Sequence[int]) -> Any:
        return self.builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_LANE, len(lanes)), list(lanes)))

    def joined(self, vectors: list[Any]) -> Any:
        """Return vectors of one type one after another; their number is a power of two."""
        if len(vectors) == 1:
            return vectors[0]
        a, b = self.joined(vectors[: len(vectors) // 2]), self.joined(vectors[len(vectors) // 2 :])
        return self.pick(a, b, range(2 * a.type.count))

    def splat(self, value: Any, count: int = LANES) -> Any:
        """Return a vector of one number in all lanes."""
        kind = ir.VectorType(value.type, count)
        alone = self.builder.insert_element(ir.Constant(kind, ir.Undefined), value, _LANE(0))
        return self.pick(alone, alone, [0] * count)

    def gathered(self, rows: list[Any], offset: int, kind: Any) -> Any:
        """Return a vector of the numbers at `offset` bytes of each row."""
        vector = ir.Constant(ir.VectorType(kind, LANES), ir.Undefined)
        for i, row in enumerate(rows):
            vector = self.builder.insert_element(vector, self.load(self.at(row, offset), kind), _LANE(i))
        return vector

    def halves(self, rows: list[Any], offset: int) -> tuple[Any, Any]:
        """Return two neighbouring f16 numbers of each row in f32."""
        both = self.gathered(rows, offset, _LANE)
        shifted = self.builder.lshr(both, constant(_INTS, 16))
        return self._half(both), self._half(shifted)

    def half(self, rows: list[Any], offset: int) -> Any:
        """Return the f16 number of each row in f32."""
        return self._half(self.builder.zext(self.gathered(rows, offset, _SHORT), _INTS))

    def _half(self, bits: Any) -> Any:
        short = self.builder.trunc(bits, ir.VectorType(_SHORT, LANES))
        return self.builder.fpext(self.builder.bitcast(short, ir.VectorType(ir.HalfType(), LANES)), _FLOATS)

    def field(self, words: Any, shift: int, mask: int) -> Any:
        return self.builder.and_(self.builder.lshr(words, constant(_INTS, shift)), constant(_INTS, mask))

    def quads(self, rows: list[Any], offset: int) -> list[Any]:
        """Return 16 bytes of each row as 4 vectors, of which the i-th has the i-th four bytes of all rows."""
        fours = ir.VectorType(_LANE, 4)
        each = [self.load(self.at(row, offset), fours) for row in rows]
        a, b, c, d = (self.joined(each[i::4]) for i in range(4))
        low, high = (
            [4 * part + i + n * LANES for part in range(LANES // 4) for i in half for n in (0, 1)]
            for half in ((0, 1), (2, 3))
        )
        ac, bd, ac_high, bd_high = (self.pick(*two, half) for half in (low, high) for two in ((a, c), (b, d)))
        turned = [self.pick(*two, half) for two in ((ac, bd), (ac_high, bd_high)) for half in (low, high)]
        return [self.builder.bitcast(v, _BYTES) for v in turned]

    def bits(self, vectors: list[Any], shift: int, mask: int, left: int = 0) -> list[Any]:
        """Return (byte >> shift & mask) << left of every byte."""
        b = self.builder
        shifted = [b.lshr(v, constant(_BYTES, shift)) if shift else v for v in vectors]
        found = [b.and_(v, constant(_BYTES, mask)) for v in shifted]
        return [b.shl(v, constant(_BYTES, left)) if left else v for v in found]

    def either(self, first: list[Any], second: list[Any]) -> list[Any]:
        return [self.builder.or_(a, b) for a, b in zip(first, second, strict=True)]

    def scaled(self, vector: Any, number: float) -> Any:
        return self.builder.fmul(vector, constant(_FLOATS, number))

    def raised(self, vectors: list[Any]) -> list[Any]:
        """Return signed codes of 8 bits as `_multiply` takes them."""
        return [self.builder.xor(v, constant(_BYTES, BIAS)) for v in vectors] if BIAS else vectors

    def add_dots(self, sums: Any, codes: Any, x: Any) -> Any:
        """Add the products of the four codes of each lane with four int8 numbers of x [LANES]."""
        b = self.builder
        if VNNI:
            return self.call("llvm.x86.avx512.vpdpbusd.512", _INTS, sums, b.bitcast(codes, _INTS), x)
        x = b.bitcast(x, _BYTES)
        if "avx2" in HAS:
            shorts, ones = ir.VectorType(_SHORT, 2 * LANES), constant(ir.VectorType(_SHORT, 2 * LANES), 1)
            positive = self.call(f"llvm.abs.v{4 * LANES}i8", _BYTES, codes, ir.IntType(1)(0))
            signed = self.call("llvm.x86.avx2.psign.b", _BYTES, x, codes)
            pairs = self.call("llvm.x86.avx2.pmadd.ub.sw", shorts, positive, signed)
            return b.add(sums, self.call("llvm.x86.avx2.pmadd.wd", _INTS, pairs, ones))
        if "dotprod" in HAS:
            parts = [[self.pick(v, v, range(i, i + n)) for i in (0, n)] for v, n in ((sums, 4), (codes, 16), (x, 16))]
            name, four = "llvm.aarch64.neon.sdot.v4i32.v16i8", ir.VectorType(_LANE, 4)
            return self.joined([self.call(name, four, *args) for args in zip(*parts, strict=True)])
        wide = ir.VectorType(_LANE, 4 * LANES)
        products = b.mul(b.sext(codes, wide), b.sext(x, wide))
        for i in range(4):
            sums = b.add(sums, self.pick(products, products, range(i, 4 * LANES, 4)))
        return sums


def constant(kind: Any, number: float) -> Any:
    """Return a vector of one number."""
    return ir.Constant(kind, [number] * kind.count)


# --- formats ----------------------------------------------------------------------------------------------------------
#
# Each function returns groups (scale, offset, codes) of one block; `rows` are the addresses of the block in each row.


def _q4(code: _Code, rows: list[Any], name: str) -> list[Any]:
    """Unpack Q4_0, Q4_1, Q5_0 and Q5_1."""
    bits, has_least = int(name[1]), name[-1] == "1"
    scale, least = code.halves(rows, 0) if has_least else (code.half(rows, 0), None)
    at = 4 if has_least else 2
    quads = code.quads(rows, at + (4 if bits == 5 else 0))
    codes = code.bits(quads, 0, 15) + code.bits(quads, 4, 15)
    if bits == 5:  # four bits of a word, each into a byte
        word, b = code.gathered(rows, at, _LANE), code.builder
        spread = [b.mul(code.field(word, 4 * i, 15), constant(_INTS, 0x204081)) for i in range(8)]
        codes = code.either(codes, code.bits([b.bitcast(v, _BYTES) for v in spread], 0, 1, 4))
    return [(scale, least if has_least else code.scaled(scale, -(1 << bits - 1)), codes)]


def _q8_0(code: _Code, rows: list[Any], _name: str) -> list[Any]:
    scale = code.half(rows, 0)
    return [(scale, code.scaled(scale, -BIAS), code.raised(code.quads(rows, 2) + code.quads(rows, 18)))]


def _q4_k(code: _Code, rows: list[Any], name: str) -> list[Any]:
    """Unpack Q4_K and Q5_K."""
    b, five = code.builder, name == "q5_k"
    scale, least = code.halves(rows, 0)
    first, second, third = (code.gathered(rows, at, _LANE) for at in (4, 8, 12))
    pairs = [(code.field(first, 8 * s, 63), code.field(second, 8 * s, 63)) for s in range(4)]
    for s in range(4):
        high = [b.shl(code.field(word, 8 * s + 6, 3), constant(_INTS, 4)) for word in (first, second)]
        low = code.field(third, 8 * s, 15), code.field(third, 8 * s + 4, 15)
        pairs.append((b.or_(low[0], high[0]), b.or_(low[1], high[1])))
    fifths = code.quads(rows, 16) + code.quads(rows, 32) if five else []
    groups, quads, least = [], [], b.fneg(least)
    for s, pair in enumerate(pairs):
        if s % 2 == 0:
            at = (48 if five else 16) + 16 * s
            quads = code.quads(rows, at) + code.quads(rows, at + 16)
        codes = code.bits(quads, 4 * (s % 2), 15)
        codes = code.either(codes, code.bits(fifths, s, 1, 4)) if five else codes
        own = [b.fmul(whole, b.uitofp(part, _FLOATS)) for whole, part in zip((scale, least), pair, strict=True)]
        groups.append((*own, codes))
    return groups


def _q6_k(code: _Code, rows: list[Any], _name: str) -> list[Any]:
    b, scale, groups = code.builder, code.half(rows, 208), []
    for half in range(2):
        lower = [code.quads(rows, 64 * half + 16 * i) for i in range(4)]
        upper = [code.quads(rows, 128 + 32 * half + 16 * i) for i in range(2)]
        for i in range(8):  # of 16 values each
            quarter, part = i // 2, i % 2
            fours = code.bits(lower[2 * (quarter & 1) + part], 4 * (quarter >> 1), 15)
            word = code.gathered(rows, 192 + 8 * half + i // 4 * 4, _LANE)
            own = b.ashr(b.shl(word, constant(_INTS, 24 - 8 * (i % 4))), constant(_INTS, 24))
            step = b.fmul(scale, b.sitofp(own, _FLOATS))
            codes = code.either(fours, code.bits(upper[part], 2 * quarter, 3, 4))
            groups.append((step, code.scaled(step, -32), codes))
    return groups


def _int8(code: _Code, rows: list[Any], _name: str) -> list[Any]:
    return [(None, None, code.raised(code.quads(rows, 0)))]


def _int4(code: _Code, rows: list[Any], _name: str) -> list[Any]:
    """Unpack two neighbouring values per byte, the first in the lower half."""
    codes, quads = [], code.quads(rows, 0)
    for low, high in zip(code.bits(quads, 0, 15), code.bits(quads, 4, 15), strict=True):
        for part in (0, 2):
            at = [4 * lane + part + i + n * 4 * LANES for lane in range(LANES) for i in (0, 1) for n in (0, 1)]
            codes.append(code.pick(low, high, at))
    return [(None, None, codes)]


# name: (function, values of a block, bytes of it)
FORMATS: dict[str, tuple[Callable[[_Code, list[Any], str], list[Any]], int, int]] = {
    "int8": (_int8, 16, 16), "int4": (_int4, 32, 16),
    "q4_0": (_q4, 32, 18), "q4_1": (_q4, 32, 20), "q5_0": (_q4, 32, 22), "q5_1": (_q4, 32, 24), "q8_0": (_q8_0, 32, 34),
    "q4_k": (_q4_k, 256, 144), "q5_k": (_q4_k, 256, 176), "q6_k": (_q6_k, 256, 210),
}  # fmt: skip


@intrinsic(prefer_literal=True)
def _unpack(
    context: Any, name: Any, source: Any, stride: Any, last: Any, blocks: Any, codes: Any, scales: Any, offsets: Any
):
    """Unpack blocks of LANES rows, the last of which is repeated where there are fewer than `last` + 1.

    Formats whose scales lie elsewhere write codes only.
    """
    blocks_of, _, nbytes = FORMATS[name.literal_value]

    def generate(_context, builder, _signature, args):
        code, (_, source, stride, last, blocks, codes, scales, offsets) = _Code(builder), args
        rows = []
        for i in range(LANES):
            lane = builder.select(builder.icmp_signed("<", last, _INT(i)), last, _INT(i))
            rows.append(code.at(source, builder.mul(stride, lane)))
        with cgutils.for_range(builder, blocks) as loop:
            here = [code.at(row, code.times(loop.index, nbytes)) for row in rows]
            groups = blocks_of(code, here, name.literal_value)
            for i, (scale, offset, vectors) in enumerate(groups):
                at = code.times(code.at(code.times(loop.index, len(groups)), i), 4 * LANES)
                for value, target in ((scale, scales), (offset, offsets)):
                    if value is not None:
                        code.store(value, code.at(target, at))
                for j, vector in enumerate(vectors):
                    code.store(vector, code.at(codes, code.times(at, len(vectors)), 4 * LANES * j))
        return _INT(0)

    return types.int64(name, *[types.int64] * 7), generate


# --- products ---------------------------------------------------------------------------------------------------------


@intrinsic(prefer_literal=True)
def _multiply(
    context: Any, rows: Any, group: Any, exact: Any, x: Any, x_stride: Any, x_scales: Any, s_stride: Any, sums: Any,
    codes: Any, scales: Any, offsets: Any, groups: Any, y: Any, y_stride: Any, adds: Any,
):  # fmt: skip
    """Compute y [rows, LANES], or add to it.

    For int8, `x_scales` has the scales of the groups of each row; `sums` bytes further is each one times the sum of its
    codes.
    """
    each, size, is_f32 = range(rows.literal_value), group.literal_value, exact.literal_value

    def generate(_context, builder, _signature, args):
        code = _Code(builder)
        x, x_stride, x_scales, s_stride, sums, codes, scales, offsets, groups, y, y_stride, adds = args[3:]
        xs, ss, ys = (
            [code.hidden(code.at(base, builder.mul(stride, _INT(r)))) for r in each]
            for base, stride in ((x, x_stride), (x_scales, s_stride), (y, y_stride))
        )
        totals = [cgutils.alloca_once_value(builder, constant(_FLOATS, 0.0)) for _ in each]
        with builder.if_then(builder.icmp_signed("!=", adds, _INT(0))):
            for total, at in zip(totals, ys, strict=True):
                builder.store(code.load(at, _FLOATS), total)
        with cgutils.for_range(builder, groups) as loop:
            at = code.times(loop.index, 4 * LANES)
            values = _Group(
                [code.load(code.at(codes, code.times(at, size // 4), 4 * LANES * j), _BYTES) for j in range(size // 4)],
                *(code.load(code.at(base, at), _FLOATS) for base in (scales, offsets)),
            )
            if is_f32:
                _add_f32(code, values, [code.at(row, code.times(loop.index, 4 * size)) for row in xs], totals)
            else:
                starts, own = (
                    [code.at(row, code.times(loop.index, nbytes)) for row in base]
                    for base, nbytes in ((xs, size), (ss, 4))
                )
                _add_int8(code, values, starts, own, sums, totals)
        for total, at in zip(totals, ys, strict=True):
            code.store(builder.load(total), at)
        return _INT(0)

    return types.int64(rows, group, exact, *[types.int64] * 12), generate


@dataclass(frozen=True)
class _Group:
    """Hold a group of values of a tile: vectors of codes, scale and offset."""

    codes: list[Any]
    scale: Any
    offset: Any


def _add_int8(code: _Code, group: _Group, xs: list[Any], scales: list[Any], sums: Any, totals: list[Any]) -> None:
    """Add the products of a group to the variables `totals`, one for each row of x."""
    b = code.builder
    found = [constant(_INTS, 0)] * len(xs)
    for j, vector in enumerate(group.codes):
        fours = [code.splat(code.load(code.at(x, 4 * j), _LANE)) for x in xs]
        found = [code.add_dots(total, vector, four) for total, four in zip(found, fours, strict=True)]
    for dots, at, total in zip(found, scales, totals, strict=True):
        own, summed = (code.splat(code.load(each, _FLOAT)) for each in (at, code.at(at, sums)))
        value = code.fma(b.sitofp(dots, _FLOATS), b.fmul(group.scale, own), b.load(total))
        b.store(code.fma(group.offset, summed, value), total)


def _add_f32(code: _Code, group: _Group, xs: list[Any], totals: list[Any]) -> None:
    """Add the products of a group to the variables `totals`, one for each row of x."""
    b, sums = code.builder, []
    for k in range(4):  # four sums each: one would wait for itself
        own = [b.load(total) if k == 0 else constant(_FLOATS, 0.0) for total in totals]
        for j, vector in enumerate(group.codes):
            raised = b.shl(b.bitcast(vector, _INTS), constant(_INTS, 24 - 8 * k))
            number = (b.lshr if BIAS else b.ashr)(raised, constant(_INTS, 24))
            value = code.fma(b.sitofp(number, _FLOATS), group.scale, group.offset)
            factors = [code.splat(code.load(code.at(x, 16 * j + 4 * k), _FLOAT)) for x in xs]
            own = [code.fma(value, factor, total) for factor, total in zip(factors, own, strict=True)]
        sums = own if k == 0 else [b.fadd(a, c) for a, c in zip(sums, own, strict=True)]
    for value, total in zip(sums, totals, strict=True):
        b.store(value, total)


@intrinsic(prefer_literal=True)
def _round(context: Any, group: Any, x: Any, groups: Any, codes: Any, scales: Any, sums: Any):
    """Round groups of f32 numbers to int8; `sums` are the scale times the sum of the codes.

    A NaN makes its group's scale NaN.
    """
    size = group.literal_value
    floats, ints = ir.VectorType(_FLOAT, size), ir.VectorType(_LANE, size)

    def generate(_context, builder, _signature, args):
        code, (_, x, groups, codes, scales, sums) = _Code(builder), args
        with cgutils.for_range(builder, groups) as loop:
            values = code.load(code.at(x, code.times(loop.index, 4 * size)), floats)
            sizes = builder.and_(
                builder.bitcast(values, ints), constant(ints, 0x7FFFFFFF)
            )  # in order, NaN the greatest
            most = builder.bitcast(code.call(f"llvm.vector.reduce.umax.v{size}i32", _LANE, sizes), _FLOAT)
            scale, is_some = builder.fmul(most, _FLOAT(1 / 127)), builder.fcmp_ordered(">", most, _FLOAT(1e-30))
            share = builder.select(is_some, builder.fdiv(_FLOAT(127.0), most), _FLOAT(0.0))
            rounded = code.call(f"llvm.rint.v{size}f32", floats, builder.fmul(values, code.splat(share, size)))
            numbers = builder.fptosi(rounded, ints)
            found = builder.trunc(numbers, ir.VectorType(_BYTE, size))
            code.store(found, code.at(codes, code.times(loop.index, size)))
            summed = builder.sitofp(code.call(f"llvm.vector.reduce.add.v{size}i32", _LANE, numbers), _FLOAT)
            code.store(scale, code.at(scales, code.times(loop.index, 4)))
            code.store(builder.fmul(scale, summed), code.at(sums, code.times(loop.index, 4)))
        return _INT(0)

    return types.int64(group, *[types.int64] * 5), generate


# --- compiled, each alone ---------------------------------------------------------------------------------------------
#
# LLVM would compile a function once more in each that calls it: these are called through a table of addresses.

_unpack_of, _multiply_of, _round_of = (cast(Any, each) for each in (_unpack, _multiply, _round))


def _unpacker(name: str) -> Any:
    @cfunc(types.int64(*[types.int64] * 7), cache=True)
    def run(source, stride, last, blocks, codes, scales, offsets):
        return _unpack_of(name, source, stride, last, blocks, codes, scales, offsets)

    return run


def _multiplier(rows: int, group: int, exact: int) -> Any:
    @cfunc(types.int64(*[types.int64] * 12), cache=True)
    def run(x, x_stride, x_scales, s_stride, sums, codes, scales, offsets, groups, y, y_stride, adds):
        return _multiply_of(
            rows, group, exact, x, x_stride, x_scales, s_stride, sums, codes, scales, offsets, groups, y, y_stride, adds
        )

    return run


def _rounder(group: int) -> Any:
    @cfunc(types.int64(*[types.int64] * 5), cache=True)
    def run(x, groups, codes, scales, sums):
        return _round_of(group, x, groups, codes, scales, sums)

    return run


ROWS = (1, 2, MOST)  # of x at a time
ROUND, MULTIPLY = len(FORMATS), len(FORMATS) + 2  # places in the table
_functions = [
    *(_unpacker(name) for name in FORMATS),
    *(_rounder(group) for group in (16, 32)),
    *(_multiplier(rows, group, exact) for exact in (0, 1) for group in (16, 32) for rows in ROWS),
]
_table = np.asarray([function.address for function in _functions], np.int64)
table = symbol("dovetail_packed_tile_table", _table.ctypes.data)  # returns the table's address
