"""Operations of a thread or a warp on registers, for kernels that write their own (MLIR, NVIDIA)."""

from __future__ import annotations

from typing import Any

from jax.experimental.mosaic.gpu import utils
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, vector

from dovetail.ops.kernels.gpu.packed_codes import GREATEST_SCALE, scale_bits

INSTRUCTION = "mma.sync.aligned.m16n8k16.row.col.f32.{0}.{0}.f32"
OPERANDS = "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};"
CONSTRAINTS = "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f"


def int32() -> Any:
    """Return the type of integers of 32 bits."""
    return ir.IntegerType.get_signless(32)


def c(value: int) -> Any:
    """Return a constant of 32 bits."""
    return utils.c(value, int32())


def c64(value: int) -> Any:
    """Return a constant of 64 bits."""
    return utils.c(value, ir.IntegerType.get_signless(64))


def times(value: Any, times: int) -> Any:
    """Return a product with a constant."""
    return arith.muli(value, c(times))


def thread() -> Any:
    """Return the number of the thread in its program."""
    return utils.thread_idx()


def wide(value: Any) -> Any:
    """Return a positive integer in 64 bits."""
    return arith.extui(ir.IntegerType.get_signless(64), value)


def address(ref: Any, row: Any, width: int, column: Any, kind: Any) -> Any:
    """Return the address of an element of a matrix with rows of `width`, in global memory."""
    return utils.getelementptr(utils.memref_ptr(ref), [arith.addi(arith.muli(row, c64(width)), column)], kind)


def byte_address(ref: Any, row: Any, width: int, offset: Any) -> Any:
    """Return the address of a byte of a matrix."""
    return address(ref, row, width, wide(offset), ir.IntegerType.get_signless(8))


def load_words(pointer: Any, count: int, cache: str = "") -> list:
    """Return `count` words of 32 bits from global memory that nothing writes meanwhile."""
    from jaxlib.mlir.dialects import llvm

    i32, i64 = int32(), ir.IntegerType.get_signless(64)
    each = min(count, 4)
    hint, kind = cache, (f".v{each}" if each > 1 else "")
    registers = ", ".join(f"${i}" for i in range(each))
    registers = f"{{{registers}}}" if each > 1 else registers
    base = llvm.ptrtoint(i64, pointer)
    found = []
    for first in range(0, count, each):
        own = arith.addi(base, c64(4 * first))
        text = f"ld.global.nc{hint}{kind}.b32 {registers}, [${each}];"
        result = i32 if each == 1 else llvm.StructType.get_literal([i32] * each)
        words: Any = llvm.inline_asm(result, [own], text, ",".join(["=r"] * each) + ",l", has_side_effects=False)
        found += [words] if each == 1 else [llvm.extractvalue(i32, words, [i]) for i in range(each)]
    return found


def halves(low: Any, high: Any, which: int) -> Any:
    """Return the lower (0) or upper (1) halves of two registers in one."""
    from jaxlib.mlir.dialects import llvm

    text = f"prmt.b32 $0, $1, $2, {('0x5410', '0x7632')[which]};"
    return llvm.inline_asm(low.type, [low, high], text, "=r,r,r", has_side_effects=False)


def register(pair: Any) -> Any:
    """Return a pair of bf16 numbers as a register."""
    return vector.extract(vector.bitcast(ir.VectorType.get((1,), int32()), pair), [], [0])


def as_f32(value: Any) -> Any:
    """Return a number of at most 32 bits in f32."""
    f32 = ir.F32Type.get()
    return value if value.type == f32 else arith.extf(f32, value)


def fma(x: Any, y: Any, z: Any) -> Any:
    """Return x y + z."""
    from jaxlib.mlir.dialects import math

    return math.fma(x, y, z)


def scale_pair(code: Any) -> Any:
    """Return the factor of mxfp4's numbers under a scale (packed_codes) twice, as the bits of bf16 numbers."""
    bits = arith.minui(arith.extui(int32(), code), c(GREATEST_SCALE))
    return twice(arith.shli(arith.addi(bits, c(scale_bits(0) >> 7)), c(7)))


def twice(bits: Any) -> Any:
    """Return 16 bits twice, in one register."""
    return arith.ori(bits, arith.shli(bits, c(16)))


def multiply_add(sums: list, left: list, right: list, of: str = "bf16") -> list:
    """Return a thread's sums, four f32, plus a warp's product of registers with two numbers each."""
    from jaxlib.mlir.dialects import llvm

    f32 = ir.F32Type.get()
    kind = llvm.StructType.get_literal([f32] * 4)
    given = [*left, *right, *sums]
    text = f"{INSTRUCTION.format(of)} {OPERANDS}"
    found: Any = llvm.inline_asm(kind, given, text, CONSTRAINTS, has_side_effects=False)
    return [llvm.extractvalue(f32, found, [i]) for i in range(4)]
