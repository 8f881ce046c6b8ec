"""Programs of a warpgroup written thread by thread, for small kernels of integers (Pallas, Mosaic GPU).

Such a program is a function of `on`, the operations of a thread beyond those of Python, and of numbers that each thread
has of its own. With `Threads` the numbers are MLIR values; tests/ops/test_routing.py runs the same function on arrays
of NumPy, with a number for each thread, and finds races between the threads.

What threads exchange (`ballot`, `total`, `below`, `greatest`, `least`, `barrier`) comes before the first branch of a
program, which is a store with a condition: LLVM might otherwise move an exchange into the branch of some threads.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, scf

from dovetail.ops.kernels.gpu.warp_ops import int32, thread

WARP, WARPS, THREADS = 32, 4, 128
ALL = "0xffffffff"  # lanes of a warp


@dataclass(frozen=True, eq=False)
class Number:
    """Hold a thread's integer of 32 bits, f32 or truth value; `//`, `%` and `>>` are those of integers from 0 on."""

    value: Any

    def __add__(self, other: Any) -> Number:
        return self._with(other, arith.addi, arith.addf)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Number:
        return self._with(other, arith.subi, arith.subf)

    def __mul__(self, other: Any) -> Number:
        return self._with(other, arith.muli, arith.mulf)

    def __truediv__(self, other: Any) -> Number:
        return self._with(other, None, arith.divf)

    def __floordiv__(self, other: Any) -> Number:
        return self._with(other, arith.divui)

    def __mod__(self, other: Any) -> Number:
        return self._with(other, arith.remui)

    def __and__(self, other: Any) -> Number:
        return self._with(other, arith.andi)

    def __xor__(self, other: Any) -> Number:
        return self._with(other, arith.xori)

    def __rshift__(self, other: Any) -> Number:
        return self._with(other, arith.shrui)

    def __lt__(self, other: Any) -> Number:
        return self._compare(other, "slt")

    def __gt__(self, other: Any) -> Number:
        return self._compare(other, "sgt")

    def __eq__(self, other: Any) -> Number:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self._compare(other, "eq")

    def same(self, other: Any) -> Any:
        """Return a number or a constant as a value of the same type."""
        return other.value if isinstance(other, Number) else utils.c(other, self.value.type)

    def _with(self, other: Any, of_integers: Any, of_floats: Any = None) -> Number:
        apply = of_floats if self.value.type == ir.F32Type.get() else of_integers
        return Number(apply(self.value, self.same(other)))

    def _compare(self, other: Any, how: str) -> Number:
        return Number(arith.cmpi(getattr(arith.CmpIPredicate, how), self.value, self.same(other)))


class Threads:
    """Write a thread's operations. A reference is addressed as a list of numbers, row after row."""

    @property
    def thread(self) -> Number:
        """Return the number of the thread in its program."""
        return Number(thread())

    def load(self, ref: Any, index: Number | int) -> Number:
        """Return a number of the memory."""
        from jaxlib.mlir.dialects import llvm

        kind = ir.MemRefType(ref.type).element_type
        return Number(llvm.load(kind, self._pointer(ref, index)))

    def store(self, ref: Any, index: Number, value: Number | int, where: Number | None = None) -> None:
        """Store a number, in the threads with this condition."""
        from jaxlib.mlir.dialects import llvm

        if where is not None:
            branch = scf.IfOp(where.value)
            with ir.InsertionPoint(branch.then_block):
                self.store(ref, index, value)
                scf.yield_([])
            return
        kind = ir.MemRefType(ref.type).element_type
        llvm.store(value.value if isinstance(value, Number) else utils.c(value, kind), self._pointer(ref, index))

    def increment(self, ref: Any, index: Number) -> None:
        """Add one to a number in shared memory, at once with other threads."""
        self._ask("red.shared.add.u32 [$0], 1;", [self._pointer(ref, index)], exchanges=False)

    def barrier(self) -> None:
        """Wait for the threads of the program, and for what they wrote to shared memory."""
        self._ask(f"bar.sync 1, {THREADS};", [])  # of number 1, as Mosaic's own of a first warpgroup

    def ballot(self, truth: Number) -> Number:
        """Return a bit for each lane of the warp."""
        text = f"{{ .reg .pred p; setp.ne.b32 p, $1, 0; vote.sync.ballot.b32 $0, p, {ALL}; }}"
        return self._ask(text, [arith.extui(int32(), truth.value)], has_result=True)

    def total(self, x: Number) -> Number:
        """Return the sum over the warp."""
        return self._ask(f"redux.sync.add.s32 $0, $1, {ALL};", [x.value], has_result=True)

    def greatest(self, x: Number) -> Number:
        """Return the greatest integer of the warp."""
        return self._ask(f"redux.sync.max.s32 $0, $1, {ALL};", [x.value], has_result=True)

    def least(self, x: Number) -> Number:
        """Return the least integer of the warp."""
        return self._ask(f"redux.sync.min.s32 $0, $1, {ALL};", [x.value], has_result=True)

    def below(self, x: Number) -> Number:
        """Return the sum over the lanes of a lower number."""
        total = x
        for lanes in (1, 2, 4, 8, 16):
            moved = f"shfl.sync.up.b32 t|p, $1, {lanes}, 0, {ALL}; @!p mov.b32 t, 0;"
            text = f"{{ .reg .pred p; .reg .b32 t; {moved} add.s32 $0, $1, t; }}"
            total = self._ask(text, [total.value], has_result=True)
        return total - x

    def ones(self, x: Number) -> Number:
        """Return how many bits are set."""
        return self._ask("popc.b32 $0, $1;", [x.value], has_result=True, exchanges=False)

    def lanes_below(self, lane: Number) -> Number:
        """Return a bit for each lane of a lower number."""
        one = utils.c(1, int32())
        return Number(arith.subi(arith.shli(one, lane.value), one))

    def select(self, truth: Number, x: Any, y: Any) -> Number:
        """Return x or y, of which one may be a constant."""
        known = x if isinstance(x, Number) else y
        return Number(arith.select(truth.value, known.same(x), known.same(y)))

    def at_most(self, x: Number, most: int) -> Number:
        """Return the lesser one of integers without a sign: of a negative x, `most`."""
        return Number(arith.minui(x.value, x.same(most)))

    def exp(self, x: Number) -> Number:
        """Return e^x."""
        from jaxlib.mlir.dialects import math

        return Number(math.exp(x.value))

    def as_integer(self, x: Number) -> Number:
        """Return the bits of an f32 as an integer."""
        return Number(arith.bitcast(int32(), x.value))

    def as_float(self, x: Number) -> Number:
        """Return the f32 with these bits."""
        return Number(arith.bitcast(ir.F32Type.get(), x.value))

    def _pointer(self, ref: Any, index: Number | int) -> Any:
        place = index.value if isinstance(index, Number) else index
        return utils.getelementptr(utils.memref_ptr(ref), [place], ir.MemRefType(ref.type).element_type)

    def _ask(self, text: str, given: list, has_result: bool = False, exchanges: bool = True) -> Any:
        """Write an instruction of PTX."""
        from jaxlib.mlir.dialects import llvm

        # from jaxlib 0.11.2 on; earlier, what has effects is neither moved nor copied into a branch that follows
        options: Any = {"convergent": exchanges} if hasattr(llvm.InlineAsmOp, "convergent") else {}
        kinds = [*["=r"] * has_result, *["r"] * len(given), *["~{memory}"] * (not has_result)]
        kind = int32() if has_result else ir.Type.parse("!llvm.void")
        has_effects = exchanges or not has_result
        found = llvm.inline_asm(kind, given, text, ",".join(kinds), has_side_effects=has_effects, **options)
        return Number(found) if has_result else None


def launch(
    name: str, program: Any, given: Any, out: list, programs: int, shared: tuple[int, ...] = (), on: Any = None
) -> list:
    """Run a program of a warpgroup `programs` times.

    Args:
        name: The kernel's name.
        program: A function of `on`, the program's number, and the references: inputs, outputs and shared memory.
        given: The inputs.
        out: The shapes and dtypes of the outputs.
        programs: How many there are.
        shared: The sizes of int32 arrays in shared memory.
        on: The operations, if the program has others than those of `Threads`.
    """

    def entry(*refs: Any) -> None:
        def body(*memory: Any) -> None:
            every = [*refs, *memory]

            @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WG_SPLAT(()), [plgpu.RefType()] * len(every)))
            def run(_: Any, number: Any, every: list) -> None:
                program(on or Threads(), Number(number.registers.flat[0]), *every)

            run(lax.axis_index("program"), every)  # pyright: ignore[reportCallIssue]

        if shared:
            pl.run_scoped(body, *[plgpu.SMEM((size,), jnp.int32) for size in shared])
        else:
            body()

    kernel = plgpu.kernel(
        entry,
        out_type=out,
        grid=(programs,),
        grid_names=("program",),
        kernel_name=name,
        # the default in jax 0.12, and not in 0.10
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )
    # jax 0.12 has a mode that interprets all kernels, and cannot interpret this one; its callers have a reference
    interpreted: Any = getattr(plgpu, "force_gpu_interpret_mode", None)
    with interpreted(None) if interpreted else contextlib.nullcontext():
        return kernel(*given)
