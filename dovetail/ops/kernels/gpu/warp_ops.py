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


def element_of(ref: Any) -> Any:
    """Return the type of an element."""
    return ir.MemRefType(ref.type).element_type


def moved(pointer: Any, count: Any) -> Any:
    """Return the address so many bytes later."""
    return utils.getelementptr(pointer, [count], ir.IntegerType.get_signless(8))


def load_number(ref: Any, row: Any, width: int, column: Any) -> Any:
    """Return an element of 8, 16 or 32 bits of a matrix in global memory that nothing writes meanwhile."""
    from jaxlib.mlir.dialects import llvm

    kind = element_of(ref)
    pointer = llvm.ptrtoint(ir.IntegerType.get_signless(64), address(ref, row, width, column, kind))
    bits = ir.IntegerType.get_signless(max(16, kind.width))  # a register of 16 bits is the smallest
    text, constraint = f"ld.global.nc.b{kind.width} $0, [$1];", {16: "=h", 32: "=r"}[bits.width]
    return number(llvm.inline_asm(bits, [pointer], text, f"{constraint},l", has_side_effects=False), ref)


def number(word: Any, ref: Any) -> Any:
    """Return the lowest bits of a word as an element of `ref`."""
    kind = element_of(ref)
    bits = word if kind.width == word.type.width else arith.trunci(ir.IntegerType.get_signless(kind.width), word)
    return bits if isinstance(kind, ir.IntegerType) else arith.bitcast(kind, bits)


# --- shared memory: `place` and `first` are bytes from the beginning of an array --------------------------------------


def load_shared(ref: Any, place: Any, first: int, count: int) -> list:
    """Return 1, 2 or 4 words of 32 bits."""
    from jaxlib.mlir.dialects import llvm

    pointer = moved(moved(utils.memref_ptr(ref), place), first)
    words: Any = llvm.load(ir.VectorType.get((count,), int32()), pointer, alignment=4 * count)
    return [vector.extract(words, [], [i]) for i in range(count)]


def store_shared(ref: Any, place: Any, words: list) -> None:
    """Store four words of 32 bits."""
    from jaxlib.mlir.dialects import llvm

    found = vector.from_elements(ir.VectorType.get((4,), int32()), words)
    llvm.store(found, moved(utils.memref_ptr(ref), place), alignment=16)


def store_shared_word(ref: Any, place: Any, word: Any) -> None:
    """Store a word of 32 bits."""
    from jaxlib.mlir.dialects import llvm

    llvm.store(word, moved(utils.memref_ptr(ref), place), alignment=4)


def barrier(threads: int) -> None:
    """Wait for all threads of a program."""
    from jaxlib.mlir.dialects import llvm

    number = 1 + threads // utils.WARPGROUP_SIZE  # Mosaic has those before: of the program and of each warpgroup
    text = f"bar.sync {number}, {threads};"
    llvm.inline_asm(ir.Type.parse("!llvm.void"), [], text, "~{memory}", has_side_effects=True)


def instruction(text: str, *given: Any) -> Any:
    """Return the word of 32 bits that an instruction on words finds."""
    from jaxlib.mlir.dialects import llvm

    constraints = ",".join(["=r", *["r"] * len(given)])
    return llvm.inline_asm(int32(), list(given), text, constraints, has_side_effects=False)


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
    bits = least(arith.extui(int32(), code), c(GREATEST_SCALE))
    return arith.addi(times(bits, 0x00800080), c(0x00010001 * scale_bits(0)))


def least(x: Any, y: Any) -> Any:
    """Return the lesser integer without a sign; LLVM would compute with 16 bits of a known range."""
    return instruction("min.u32 $0, $1, $2;", x, y)


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
