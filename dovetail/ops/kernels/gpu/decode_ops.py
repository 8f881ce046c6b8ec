"""Operations of the warps of ops/kernels/gpu/decode_warp.py on registers (MLIR, NVIDIA).

A word is a register of 32 bits: four numbers of fp8, or two of bf16 or f16, which are a pair. tests/ops/decode_warps.py
has the same operations on arrays of NumPy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.experimental.mosaic.gpu import utils
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, scf

from dovetail.ops.kernels.gpu.mosaic.threads import ALL, Number, Threads
from dovetail.ops.kernels.gpu.warp_ops import byte_address, fma, int32, multiply_add, wide


class Warps(Threads):
    """Write the operations of a thread of four warps."""

    def words(self, ref: Any, row: Number, width: int, offset: Number) -> list[Number]:
        """Load four words from byte `offset` of a row of `width` bytes, here: LLVM would wait for one after another."""
        from jaxlib.mlir.dialects import llvm

        kind, text = llvm.StructType.get_literal([int32()] * 4), "ld.relaxed.cta.global.v4.b32 {$0,$1,$2,$3}, [$4];"
        given = [self.address(ref, row, width, offset).value]
        found: Any = llvm.inline_asm(kind, given, text, "=r,=r,=r,=r,l", has_side_effects=True)
        return [Number(llvm.extractvalue(int32(), found, [i])) for i in range(4)]

    def constant(self, value: float) -> Number:
        """Return a number in f32."""
        return Number(utils.c(float(value), ir.F32Type.get()))

    def loop(self, begin: Number, end: Number, step: int, body: Callable, carry: Any) -> Any:
        """Return what is carried through body(i, carry) for i from `begin` to `end`, which a warp's threads share."""
        leaves, tree = jax.tree.flatten(carry, is_leaf=lambda x: isinstance(x, Number))
        loop = scf.ForOp(begin.value, end.value, utils.c(step, int32()), [x.value for x in leaves])
        with ir.InsertionPoint(loop.body):
            given = jax.tree.unflatten(tree, [Number(x) for x in loop.inner_iter_args])
            found = body(Number(loop.induction_variable), given)
            scf.yield_([x.value for x in jax.tree.leaves(found, is_leaf=lambda x: isinstance(x, Number))])
        return jax.tree.unflatten(tree, [Number(x) for x in loop.results])

    # --- pairs --------------------------------------------------------------------------------------------------------

    def unpack(self, word: Number) -> tuple[Number, Number]:
        """Return the lower and the upper two numbers of fp8 as pairs of f16."""
        text = "{{ .reg .b16 l, h; mov.b32 {{l, h}}, $1; cvt.rn.f16x2.e4m3x2 $0, {}; }}"
        low, high = (self._asm(text.format(half), "=r,r", int32(), word) for half in "lh")
        return low, high

    def permute(self, x: Number, y: Number, order: int) -> Number:
        """Return four of the bytes of x (0 to 3) and y (4 to 7), the lowest one first in the digits from the right."""
        return self._asm(f"prmt.b32 $0, $1, $2, {order:#x};", "=r,r,r", int32(), x, y)

    def pair(self, x: Number, y: Number, kind: str) -> Number:
        """Return two f32 as a pair of "f16" or "bf16"."""
        return self._asm(f"cvt.rn.{kind}x2.f32 $0, $2, $1;", "=r,f,f", int32(), x, y)

    def as_f16(self, pair: Number) -> Number:
        """Return a pair of bf16 as one of f16."""
        high = arith.andi(pair.value, utils.c(-65536, int32()))
        low = arith.shli(pair.value, utils.c(16, int32()))
        return self.pair(self.as_float(Number(low)), self.as_float(Number(high)), "f16")

    def multiply(self, sums: list[Number], left: list[Number], right: list[Number], kind: str) -> list[Number]:
        """Return the sums plus the product of [16, 16] and [16, 8] numbers (mma)."""
        totals, rows, columns = ([x.value for x in each] for each in (sums, left, right))
        return [Number(x) for x in multiply_add(totals, rows, columns, kind)]

    def transposed(self, pair: Number) -> Number:
        """Return a matrix [8, 8] of pairs transposed."""
        return self._asm("movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r", int32(), pair, exchanges=True)

    # --- f32 ----------------------------------------------------------------------------------------------------------

    def fma(self, x: Number, y: Number, z: Number) -> Number:
        """Return x y + z."""
        return Number(fma(x.value, y.value, z.value))

    def maximum(self, x: Number, y: Number) -> Number:
        """Return the greater one."""
        return self._asm("max.f32 $0, $1, $2;", "=f,f,f", ir.F32Type.get(), x, y)  # arith's is a comparison

    def exp2(self, x: Number) -> Number:
        """Return 2^x."""
        return self._asm("ex2.approx.ftz.f32 $0, $1;", "=f,f", ir.F32Type.get(), x)

    def log2(self, x: Number) -> Number:
        """Return the logarithm to base 2."""
        return self._asm("lg2.approx.ftz.f32 $0, $1;", "=f,f", ir.F32Type.get(), x)

    def inverse(self, x: Number) -> Number:
        """Return 1 / x."""
        return self._asm("rcp.approx.ftz.f32 $0, $1;", "=f,f", ir.F32Type.get(), x)

    def other_lane(self, x: Number, bits: int) -> Number:
        """Return the number of the lane whose number differs in these bits."""
        text = f"shfl.sync.bfly.b32 $0, $1, {bits}, 0x1f, {ALL};"
        return self._asm(text, "=f,f", ir.F32Type.get(), x, exchanges=True)

    # --- memory -------------------------------------------------------------------------------------------------------

    def address(self, ref: Any, row: Number, width: int, offset: Number) -> Number:
        """Return the address of a byte of a row of `width` bytes."""
        from jaxlib.mlir.dialects import llvm

        pointer = byte_address(ref, wide(row.value), width, offset.value)
        return Number(llvm.ptrtoint(ir.IntegerType.get_signless(64), pointer))

    def copy(self, target: Any, index: Number, ref: Any, source: Number, begin: int, where: Number) -> None:
        """Copy 16 bytes, `begin` after an address in `ref`, to shared memory without waiting; zeros if not `where`."""
        size = arith.select(where.value, utils.c(16, int32()), utils.c(0, int32()))
        text = f"cp.async.cg.shared.global.L2::128B [$0], [$1+{begin}], 16, $2;"
        self._do(text, "r,l,r", self._pointer(target, index), source.value, size)

    def end_copies(self) -> None:
        """Make a group of the copies since the last one."""
        self._do("cp.async.commit_group;", "")

    def await_copies(self, most: int) -> None:
        """Wait until at most so many of the thread's last groups of copies are under way."""
        self._do(f"cp.async.wait_group {most};", "")

    def copied(self, ref: Any, index: Number, count: int) -> list[Number]:
        """Return two or four words that threads of the warp have copied into shared memory."""
        from jaxlib.mlir.dialects import llvm

        registers, results = ",".join(f"${i}" for i in range(count)), ",".join(["=r"] * count)
        text = f"ld.volatile.shared.v{count}.b32 {{{registers}}}, [${count}];"
        kind = llvm.StructType.get_literal([int32()] * count)
        found: Any = llvm.inline_asm(kind, [self._pointer(ref, index)], text, f"{results},r", has_side_effects=True)
        return [Number(llvm.extractvalue(int32(), found, [i])) for i in range(count)]

    def meet(self) -> None:
        """Wait for the threads of the warp."""
        self._ask(f"bar.warp.sync {ALL};", [])

    def floats(self, ref: Any, index: Number, count: int) -> list[Number]:
        """Return two or four f32 from a multiple of `count` on."""
        from jaxlib.mlir.dialects import llvm

        f32, i32 = ir.F32Type.get(), int32()
        found: Any = llvm.load(ir.VectorType.get((count,), f32), self._pointer(ref, index))
        return [Number(llvm.extractelement(found, utils.c(i, i32))) for i in range(count)]

    def store_all(self, ref: Any, index: Number, values: list[Number], where: Number | None = None) -> None:
        """Store f32 or words from a multiple of their number on, in the threads with this condition."""
        from jaxlib.mlir.dialects import llvm

        if where is not None:
            branch = scf.IfOp(where.value)
            with ir.InsertionPoint(branch.then_block):
                self.store_all(ref, index, values)
                scf.yield_([])
            return
        kind = ir.VectorType.get((len(values),), values[0].value.type)
        found: Any = llvm.mlir_undef(kind)
        for i, x in enumerate(values):
            found = llvm.insertelement(found, x.value, utils.c(i, int32()))
        llvm.store(found, self._pointer(ref, index))

    def _asm(self, text: str, constraints: str, kind: Any, *given: Number, exchanges: bool = False) -> Number:
        from jaxlib.mlir.dialects import llvm

        options: Any = {"convergent": exchanges} if hasattr(llvm.InlineAsmOp, "convergent") else {}
        values = [x.value for x in given]
        return Number(llvm.inline_asm(kind, values, text, constraints, has_side_effects=exchanges, **options))

    def _do(self, text: str, constraints: str, *values: Any) -> None:
        from jaxlib.mlir.dialects import llvm

        constraints = f"{constraints},~{{memory}}".lstrip(",")
        llvm.inline_asm(ir.Type.parse("!llvm.void"), list(values), text, constraints, has_side_effects=True)
