"""Operations of kernels whose programs are 16 warps (MLIR, NVIDIA); tests/row_threads.py has the same on NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.experimental.mosaic.gpu import utils
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, scf

from dovetail.ops.kernels.gpu.decode_ops import Warps
from dovetail.ops.kernels.gpu.mosaic.threads import WARP, Number
from dovetail.ops.kernels.gpu.warp_ops import address, byte_address, int32, wide

WARPGROUPS, WARPS, THREADS = 4, 16, 512


class RowThreads(Warps):
    """Write the operations of a thread of 16 warps. What decides on a branch or a loop is the same in all threads."""

    def barrier(self) -> None:
        """Wait for the threads of the program, and for what they wrote to shared memory."""
        self._ask(f"bar.sync {WARPGROUPS + 1}, {THREADS};", [])  # Mosaic has a number for each warpgroup, and 0

    def integer(self, value: int) -> Number:
        """Return an integer of 32 bits."""
        return Number(utils.c(value, ir.IntegerType.get_signless(32)))

    def number(self, x: Number) -> Number:
        """Return an integer as f32."""
        return Number(arith.sitofp(ir.F32Type.get(), x.value))

    def lesser(self, x: Number, y: Number) -> Number:
        """Return the lesser integer."""
        return Number(arith.minsi(x.value, y.value))

    def log(self, x: Number) -> Number:
        """Return the natural logarithm."""
        from jaxlib.mlir.dialects import math

        return Number(math.log(x.value))

    def words(self, ref: Any, row: Number, width: int, offset: Number, count: int = 4) -> list[Number]:
        """Load `count` words as Warps.words does, but here: ptxas moves other loads behind a barrier, to their use."""
        from jaxlib.mlir.dialects import llvm

        pointer = llvm.ptrtoint(
            ir.IntegerType.get_signless(64), byte_address(ref, wide(row.value), width, offset.value)
        )
        registers, results = ",".join(f"${i}" for i in range(count)), ",".join(["=r"] * count)
        registers = f"{{{registers}}}" if count > 1 else registers
        kind = int32() if count == 1 else llvm.StructType.get_literal([int32()] * count)
        text = f"ld.relaxed.gpu.global{'' if count == 1 else f'.v{count}'}.b32 {registers}, [${count}];"
        found: Any = llvm.inline_asm(kind, [pointer], text, f"{results},l", has_side_effects=True)
        return [Number(found if count == 1 else llvm.extractvalue(int32(), found, [i])) for i in range(count)]

    def put(self, ref: Any, row: Number, width: int, offset: Number, words: list[Number], where: Number) -> None:
        """Store words from byte `offset` of a row of `width` bytes on, in the threads with this condition."""
        from jaxlib.mlir.dialects import llvm

        branch = scf.IfOp(where.value)
        with ir.InsertionPoint(branch.then_block):
            found: Any = llvm.mlir_undef(ir.VectorType.get((len(words),), int32()))
            for i, x in enumerate(words):
                found = llvm.insertelement(found, x.value, utils.c(i, int32()))
            llvm.store(found, byte_address(ref, wide(row.value), width, offset.value))
            scf.yield_([])

    def load_where(self, ref: Any, row: Number, width: int, column: Number, where: Number, otherwise: Number) -> Number:
        """Return a number of a matrix with rows of `width`; in threads without the condition, `otherwise`."""
        from jaxlib.mlir.dialects import llvm

        kind = otherwise.value.type
        branch: Any = scf.IfOp(where.value, [kind], has_else=True)
        with ir.InsertionPoint(branch.then_block):
            scf.yield_([llvm.load(kind, address(ref, wide(row.value), width, wide(column.value), kind))])
        with ir.InsertionPoint(branch.else_block):
            scf.yield_([otherwise.value])
        return Number(branch.results[0])

    def store_where(self, ref: Any, row: Number, width: int, column: Number, x: Number, where: Number) -> None:
        """Store a number in a matrix with rows of `width`, in the threads with this condition."""
        from jaxlib.mlir.dialects import llvm

        branch = scf.IfOp(where.value)
        with ir.InsertionPoint(branch.then_block):
            llvm.store(x.value, address(ref, wide(row.value), width, wide(column.value), x.value.type))
            scf.yield_([])

    def rsqrt(self, x: Number) -> Number:
        """Return 1 / sqrt(x)."""
        return self._asm("rsqrt.approx.ftz.f32 $0, $1;", "=f,f", ir.F32Type.get(), x)

    def split(self, word: Number) -> tuple[Number, Number]:
        """Return the lower and the upper bf16 of a word in f32."""
        low, high = arith.shli(word.value, utils.c(16, word.value.type)), word.value
        high = arith.andi(high, utils.c(-65536, word.value.type))
        return self.as_float(Number(low)), self.as_float(Number(high))

    def branch(self, truth: Number, body: Callable, carry: Any) -> Any:
        """Return body(carry), or the carry where not `truth`."""
        leaves, tree = _flatten(carry)
        choice: Any = scf.IfOp(truth.value, [x.value.type for x in leaves], has_else=True)
        for block, run in ((choice.then_block, body), (choice.else_block, lambda x: x)):
            with ir.InsertionPoint(block):
                scf.yield_([x.value for x in _flatten(run(carry))[0]])
        return jax.tree.unflatten(tree, [Number(x) for x in choice.results])

    def repeat(self, goes_on: Callable, body: Callable, carry: Any) -> Any:
        """Return carry = body(carry) as long as goes_on(carry)."""
        leaves, tree = _flatten(carry)
        kinds = [x.value.type for x in leaves]
        loop = scf.WhileOp(kinds, [x.value for x in leaves])
        blocks = [region.blocks.append(*kinds) for region in (loop.before, loop.after)]
        given = [jax.tree.unflatten(tree, [Number(x) for x in block.arguments]) for block in blocks]
        with ir.InsertionPoint(blocks[0]):
            scf.condition(goes_on(given[0]).value, list(blocks[0].arguments))
        with ir.InsertionPoint(blocks[1]):
            scf.yield_([x.value for x in _flatten(body(given[1]))[0]])
        return jax.tree.unflatten(tree, [Number(x) for x in loop.results])


def join_all(on: Any, x: Number, join: Callable, shared: Any) -> Number:
    """Return the numbers of all threads joined, in every thread the same. A barrier must follow before the next use.

    Args:
        on: The operations.
        x: The number of a thread, in f32.
        join: A commutative function of two numbers.
        shared: Shared memory for WARPS numbers.
    """
    for bits in (1, 2, 4, 8, 16):
        x = join(x, on.other_lane(x, bits))
    on.store(shared, on.thread // WARP, on.as_integer(x))  # by all lanes: without a branch
    on.barrier()
    x = on.as_float(on.load(shared, on.thread % WARPS))
    for bits in (1, 2, 4, 8):
        x = join(x, on.other_lane(x, bits))
    return x


def _flatten(carry: Any) -> tuple[list[Number], Any]:
    return jax.tree.flatten(carry, is_leaf=lambda x: isinstance(x, Number))
