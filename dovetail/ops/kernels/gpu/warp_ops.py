"""Operations of a thread or a warp on registers, for kernels that write their own (MLIR, NVIDIA)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax.experimental.mosaic.gpu import utils
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, scf, vector

INSTRUCTION = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
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


def bits_of(ref: Any) -> int:
    """Return the bits of an element."""
    return ir.MemRefType(ref.type).element_type.width


def moved(pointer: Any, count: Any) -> Any:
    """Return the address so many bytes later."""
    return utils.getelementptr(pointer, [count], ir.IntegerType.get_signless(8))


def load_now(pointer: Any, first: int, count: int, when: Any = None, cache: str = "") -> list:
    """Return `count` bytes from `first` on, in words of 32 bits; zeros if not `when`.

    The compiler moves such a load neither over another one nor over `pin`.
    """
    from jaxlib.mlir.dialects import llvm

    words, i32 = max(1, count // 4), int32()
    form = {1: "u8", 2: "u16", 4: "b32", 8: "v2.b32", 16: "v4.b32"}[count]
    registers = ", ".join(f"${i}" for i in range(words))
    load = f"ld.global{cache}.{form} {f'{{{registers}}}' if words > 1 else registers}, [${words}+{first}];"
    given = [llvm.ptrtoint(ir.IntegerType.get_signless(64), pointer)]
    constraints = ",".join(["=&r"] * words) + ",l"
    if when is not None:
        zeros = " ".join(f"mov.b32 ${i}, 0;" for i in range(words))
        load = f"{{ .reg .pred p; setp.ne.b32 p, ${words + 1}, 0; {zeros} @p {load} }}"
        given, constraints = [*given, arith.extui(i32, when)], constraints + ",r"
    kind = i32 if words == 1 else llvm.StructType.get_literal([i32] * words)
    found: Any = llvm.inline_asm(kind, given, load, constraints, has_side_effects=True)
    return [found] if words == 1 else [llvm.extractvalue(i32, found, [i]) for i in range(words)]


def pin() -> None:
    """Keep the loads that are written before this place before it."""
    utils.warp_barrier()


def ballot(condition: Any) -> Any:
    """Return a bit for each lane of the warp: whether its condition is true."""
    from jaxlib.mlir.dialects import llvm

    text = "{ .reg .pred p; setp.ne.b32 p, $1, 0; vote.sync.ballot.b32 $0, p, 0xffffffff; }"
    return llvm.inline_asm(int32(), [arith.extui(int32(), condition)], text, "=r,r", has_side_effects=True)


def count_ones(word: Any) -> Any:
    """Return how many bits are set."""
    from jaxlib.mlir.dialects import math

    return math.ctpop(word)


def as_vector(word: Any) -> Any:
    """Return a word as a vector of one."""
    return vector.broadcast(ir.VectorType.get((1,), word.type), word)


def number(word: Any, ref: Any) -> Any:
    """Return the lowest bits of a word as an element of `ref`."""
    kind = ir.MemRefType(ref.type).element_type
    bits = word if kind.width == 32 else arith.trunci(ir.IntegerType.get_signless(kind.width), word)
    return bits if isinstance(kind, ir.IntegerType) else arith.bitcast(kind, bits)


def load_shared(ref: Any, place: Any, first: int) -> list:
    """Return four words of 32 bits from shared memory, so many bytes after its beginning."""
    from jaxlib.mlir.dialects import llvm

    pointer = moved(moved(utils.memref_ptr(ref), place), first)
    words: Any = llvm.load(ir.VectorType.get((4,), int32()), pointer, alignment=16)
    return [vector.extract(words, [], [i]) for i in range(4)]


def store_shared(ref: Any, place: Any, words: list) -> None:
    """Store four words of 32 bits in shared memory, so many bytes after its beginning."""
    from jaxlib.mlir.dialects import llvm

    found = vector.from_elements(ir.VectorType.get((4,), int32()), words)
    llvm.store(found, moved(utils.memref_ptr(ref), place), alignment=16)


def repeat(count: Any, run: Callable[[Any], None]) -> None:
    """Run `run` with the numbers below `count`, in a loop."""
    loop = scf.ForOp(c(0), count, c(1), [])
    with ir.InsertionPoint(loop.body):
        run(loop.induction_variable)
        scf.yield_([])


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


def power_of_two(code: Any) -> Any:
    """Return 2^(code - 127) twice, as the bits of bf16 numbers."""
    bits = arith.extui(int32(), code)
    is_least = arith.cmpi(arith.CmpIPredicate.eq, bits, c(0))  # 2^-127 is subnormal
    return twice(arith.select(is_least, c(0x40), arith.shli(bits, c(7))))


def twice(bits: Any) -> Any:
    """Return 16 bits twice, in one register."""
    return arith.ori(bits, arith.shli(bits, c(16)))


def multiply_add(sums: list, left: list, right: list) -> list:
    """Return a thread's sums, four f32, plus a warp's product of registers with two bf16 numbers each."""
    from jaxlib.mlir.dialects import llvm

    f32 = ir.F32Type.get()
    kind = llvm.StructType.get_literal([f32] * 4)
    given = [*left, *right, *sums]
    found: Any = llvm.inline_asm(kind, given, f"{INSTRUCTION} {OPERANDS}", CONSTRAINTS, has_side_effects=False)
    return [llvm.extractvalue(f32, found, [i]) for i in range(4)]
