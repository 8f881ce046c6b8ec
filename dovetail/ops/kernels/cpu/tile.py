"""A tile of a product for CPUs, in vectors of four: ROWS rows of x by COLUMNS rows of a weight.

Written as LLVM instructions, which a loop in numba does not become: 16 sums stay in registers, the weight is read in
place ([out, in], four numbers of a row at a time), and x from a copy in which the tile's rows are adjacent (`turn`
makes it). So the weight, which is much larger than x, is never copied.

Addresses are integers, strides are in bytes, all numbers are f32.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

ROWS, COLUMNS = 8, 8  # 16 sums, 8 vectors of the weight and 2 of x are within the 32 registers of an Arm CPU
_INT, _FLOAT, _LANE = ir.IntType(64), ir.FloatType(), ir.IntType(32)
_FOUR = ir.VectorType(_FLOAT, 4)


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

    def load(self, address: Any, kind: Any = _FOUR) -> Any:
        return self.builder.load(self.builder.inttoptr(address, kind.as_pointer()), align=4)

    def store(self, value: Any, address: Any) -> None:
        self.builder.store(value, self.builder.inttoptr(address, value.type.as_pointer()), align=4)

    def hidden(self, value: Any) -> Any:
        """Return the value, opaque to LLVM.

        It would compute each row's address from the last one's, and loads would wait.
        """
        return self.builder.asm(ir.FunctionType(_INT, [_INT]), "", "=r,0", [value], False)

    def pick(self, a: Any, b: Any, *lanes: int) -> Any:
        return self.builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_LANE, 4), lanes))

    def add_product(self, total: Any, a: Any, b: Any) -> None:
        """Add a * b to the variable `total`."""
        kind = ir.FunctionType(_FOUR, [_FOUR] * 3)
        fma = cgutils.get_or_insert_function(self.builder.module, kind, "llvm.fma.v4f32")
        self.builder.store(self.builder.call(fma, [a, b, self.builder.load(total)]), total)

    def turned(self, a: Any, b: Any, c: Any, d: Any) -> list[Any]:
        """Transpose a square of four vectors."""
        low, high = (0, 4, 1, 5), (2, 6, 3, 7)
        ac, bd, ac_high, bd_high = (self.pick(*two, *half) for half in (low, high) for two in ((a, c), (b, d)))
        return [self.pick(*two, *half) for two in ((ac, bd), (ac_high, bd_high)) for half in (low, high)]


@intrinsic
def _turn(context: Any, source: Any, stride: Any, target: Any, quads: Any) -> Any:
    def generate(_context, builder, _signature, args):
        code, (source, stride, target, quads) = _Code(builder), args
        rows = [code.at(source, code.times(stride, i)) for i in range(4)]
        with cgutils.for_range(builder, quads) as loop:
            four = [code.load(code.at(row, code.times(loop.index, 16))) for row in rows]
            for i, column in enumerate(code.turned(*four)):
                code.store(column, code.at(target, code.times(loop.index, 16 * ROWS), 4 * ROWS * i))
        return _INT(0)

    return types.int64(*[types.int64] * 4), generate


@intrinsic
def _add_tile(context: Any, x: Any, w: Any, w_stride: Any, y: Any, y_stride: Any, depth: Any) -> Any:
    def generate(_context, builder, _signature, args):
        code, (x, w, w_stride, y, y_stride, depth) = _Code(builder), args
        zero = ir.Constant(_FOUR, [0.0] * 4)
        sums = [[cgutils.alloca_once_value(builder, zero) for _ in range(ROWS // 4)] for _ in range(COLUMNS)]
        strips = [code.hidden(code.at(w, code.times(w_stride, j))) for j in range(COLUMNS)]

        def add(k: Any, ofs: int, lanes: list[Any]) -> None:
            """Add the products of one number of each of the tile's rows of x with one of each of the weight's."""
            at = code.at(x, code.times(k, 4 * ROWS), 4 * ROWS * ofs)
            parts = [code.load(code.at(at, 16 * h)) for h in range(ROWS // 4)]
            for column, lane in zip(sums, lanes, strict=True):
                for total, part in zip(column, parts, strict=True):
                    code.add_product(total, part, lane)

        quads = builder.ashr(depth, _INT(2))
        with cgutils.for_range(builder, quads) as loop:
            four = [code.load(code.at(strip, code.times(loop.index, 16))) for strip in strips]
            for i in range(4):
                add(code.times(loop.index, 4), i, [code.pick(v, v, i, i, i, i) for v in four])
        with cgutils.for_range(builder, builder.and_(depth, _INT(3))) as loop:
            k = code.at(code.times(quads, 4), loop.index)
            ones = [code.load(code.at(strip, code.times(k, 4)), _FLOAT) for strip in strips]
            alone = [builder.insert_element(zero, one, _LANE(0)) for one in ones]
            add(k, 0, [code.pick(v, v, 0, 0, 0, 0) for v in alone])
        for h in range(ROWS // 4):
            for j in range(0, COLUMNS, 4):
                four = [builder.load(sums[j + i][h]) for i in range(4)]
                for i, row in enumerate(code.turned(*four)):
                    at = code.at(y, code.times(y_stride, 4 * h + i), 4 * j)
                    code.store(builder.fadd(row, code.load(at)), at)
        return _INT(0)

    return types.int64(*[types.int64] * 6), generate


# They are called without the context.
turn: Any = _turn  # (source, its stride, target, quads): four rows of 4 * quads, into four columns of [.., ROWS]
add_tile: Any = _add_tile  # (x [depth, ROWS], w [COLUMNS, depth], its stride, y, its stride, depth): y += xT wT
