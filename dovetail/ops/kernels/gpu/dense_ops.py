"""Operations of the warps of ops/kernels/gpu/dense_warp.py on registers, beside those of attention's (MLIR, NVIDIA)."""

from __future__ import annotations

from typing import Any

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith

from dovetail.ops.kernels.gpu.decode_ops import Warps
from dovetail.ops.kernels.gpu.mosaic.threads import Number
from dovetail.ops.kernels.gpu.warp_ops import byte_address, c, int32, wide


class DenseOps(Warps):
    """Write the operations of a thread of four warps. Pointers are to bytes in global memory."""

    def pointer(self, ref: Any, row: Number, width: int, offset: Number) -> Any:
        """Return the address of byte `offset` of a row of `width` bytes."""
        from jaxlib.mlir.dialects import llvm

        found = byte_address(ref, wide(row.value), width, offset.value)
        return llvm.ptrtoint(ir.IntegerType.get_signless(64), found)

    def copy_words(self, target: Any, index: Number, pointer: Any, first: int, is_shared: bool, when: Any) -> None:
        """Begin to copy four words `first` bytes later, if `when`; other programs read them too if `is_shared`."""
        text = f"cp.async.{'ca' if is_shared else 'cg'}.shared.global.L2::128B [$0], [$1+{first}], 16;"
        given, constraints = [self._pointer(target, index), pointer], "r,l"
        if when is not None:
            text = f"{{ .reg .pred p; setp.ne.b32 p, $2, 0; @p {text} }}"
            given, constraints = [*given, arith.extui(int32(), when.value)], "r,l,r"
        self._do(text, constraints, *given)

    def words_now(self, pointer: Any) -> list[Number]:
        """Load a word where this is written, early."""
        from jaxlib.mlir.dialects import llvm

        return [
            Number(llvm.inline_asm(int32(), [pointer], "ld.global.nc.b32 $0, [$1];", "=r,l", has_side_effects=True))
        ]

    def minimum(self, x: Number, y: Number) -> Number:
        """Return the lesser one."""
        return self._asm("min.f32 $0, $1, $2;", "=f,f,f", ir.F32Type.get(), x, y)

    def inverse_root(self, x: Number) -> Number:
        """Return 1 / sqrt(x)."""
        return self._asm("rsqrt.approx.ftz.f32 $0, $1;", "=f,f", ir.F32Type.get(), x)

    def numbers(self, pair: Number) -> list[Number]:
        """Return the two numbers of a pair of bf16 in f32."""
        return [self.as_float(self.permute(pair, Number(c(0)), order)) for order in (0x1044, 0x3244)]
