"""Operations of a thread or a warp on words of bytes, beside warp_ops (MLIR, NVIDIA)."""

from __future__ import annotations

from typing import Any

from jax.experimental.mosaic.gpu import utils
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith

from dovetail.ops.kernels.gpu.warp_ops import CONSTRAINTS, OPERANDS, c, instruction, int32

INSTRUCTION = "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32"


def shuffled(value: Any, distance: int) -> Any:
    """Return the value of the lane whose number differs in this bit."""
    return utils.shfl_bfly(value, distance)


def max_halves(x: Any, y: Any) -> Any:
    """Return the greater ones of the lower and of the upper halves, as integers without a sign."""
    return instruction("max.u16x2 $0, $1, $2;", x, y)


def flipped(word: Any, bits: Any, kept: Any) -> Any:
    """Return (word ^ bits) & kept by one instruction."""
    return instruction("lop3.b32 $0, $1, $2, $3, 0x28;", word, bits, kept)


def unknown(value: int) -> Any:
    """Return a constant of which ptxas does not know: it would load a known one for each of its uses."""
    return arith.ori(arith.shrui(instruction("mov.u32 $0, %smid;"), c(16)), c(value))


def permuted(low: Any, high: Any, selector: Any) -> Any:
    """Return four of the eight bytes of two registers; of those with 8 in the selector, the sign eight times."""
    return instruction("prmt.b32 $0, $1, $2, $3;", low, high, selector)


def float_of(bits: Any) -> Any:
    """Return the number in f32 with these bits."""
    return arith.bitcast(ir.F32Type.get(), bits)


def bits_of(number: Any) -> Any:
    """Return the bits of a number in f32."""
    return arith.bitcast(int32(), number)


def multiply_add_bytes(sums: list, left: list, right: list) -> list:
    """Return a thread's sums, four i32, plus a warp's product of registers with four bytes each."""
    from jaxlib.mlir.dialects import llvm

    kind = llvm.StructType.get_literal([int32()] * 4)
    found: Any = llvm.inline_asm(
        kind, [*left, *right, *sums], f"{INSTRUCTION} {OPERANDS}", CONSTRAINTS.replace("f", "r"), has_side_effects=False
    )
    return [llvm.extractvalue(int32(), found, [i]) for i in range(4)]
