"""Rows of bf16 as two e4m3 numbers each, in one kernel for Hopper (Pallas, Mosaic GPU): a warpgroup per row.

What the numbers are is in ops/kernels/gpu/packed_halves.py. The kernel also gathers the rows of experts' tokens.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, scf

from dovetail.ops.kernels.gpu.mosaic.threads import THREADS, WARP, WARPS, Number, Threads, launch
from dovetail.ops.kernels.gpu.warp_ops import c, int32

EACH = 4  # values that a thread has side by side: a word of e4m3 numbers
STEP = 128  # values of four blocks of mxfp4, whose words are in an order of their own
TOP = 7  # a row's greatest magnitude is in [2^7, 2^8)


@functools.partial(jax.jit, static_argnames=("permutes",))
def split_rows(x: jax.Array, token: jax.Array, permutes: bool) -> tuple[jax.Array, jax.Array]:
    """Return rows x[token] [R, in] as e4m3 numbers [2, R, in], and their greatest magnitudes, f32 [R].

    With `permutes`, rows are padded to a multiple of 128, and in the order of packed_halves.in_order.
    """
    R, (T, size) = len(token), x.shape
    width = pl.cdiv(size, STEP) * STEP if permutes else size
    out = [jax.ShapeDtypeStruct((2, R, width), jnp.float8_e4m3fn), jax.ShapeDtypeStruct((R,), jnp.float32)]
    program = functools.partial(split, R=R, T=T, size=size, width=width, permutes=permutes)
    both, greatest = launch("split_rows", program, [x, token], out, R, shared=(WARPS,), on=Halves())
    return both, greatest


def split(
    on: Any, row: Any, x: Any, token: Any, both: Any, greatest: Any, shared: Any,
    *, R: int, T: int, size: int, width: int, permutes: bool,
) -> None:  # fmt: skip
    """Split a row."""
    source = on.at_most(on.load(token, row), T - 1)  # rows of no token may have any number
    chunks = [on.thread + first for first in range(0, width // EACH, THREADS)]
    words = [on.two_words(x, source, size, on.at_most(chunk, size // EACH - 1)) for chunk in chunks]
    most = on.thread * 0
    for word in itertools.chain(*words):
        most = on.greater(on.greater(most, word & 0x7FFF), word >> 16 & 0x7FFF)
    on.store(shared, on.thread // WARP, on.greatest(most))
    on.barrier()
    for warp in range(WARPS):
        most = on.greater(most, on.load(shared, warp))
    exponent = on.greater(most >> 7, on.thread * 0 + (TOP + 1))
    factor = on.as_float((exponent * -1 + (254 + TOP)) * (1 << 23))
    split = [_halves(on, pair, factor) for pair in words]
    on.store(greatest, row, on.as_float(most * (1 << 16)), on.thread == 0)
    for chunk, halves in zip(chunks, split, strict=True):
        is_inside = chunk < width // EACH
        for which, word in enumerate(halves):
            place = (row + which * R) * (width // EACH) + (_place(chunk) if permutes else chunk)
            own = on.select(chunk < size // EACH, word, 0) if width > size else word
            on.store_word(both, place, own, is_inside)


def _halves(on: Any, words: list, factor: Any) -> list:
    """Return 4 numbers of bf16, in two words, as a word of e4m3 numbers and one of what is left of them."""
    first, second = [], []
    for word in words:
        a, b = on.as_float(word * (1 << 16)) * factor, on.as_float(word & -(1 << 16)) * factor
        pair = on.narrow(a, b)
        first.append(pair)
        wide = on.widen(pair)
        second.append(on.narrow(a - wide[0], b - wide[1]))
    return [low + high * (1 << 16) for low, high in (first, second)]


def _place(chunk: Any) -> Any:
    """Return where packed_halves.in_order has 4 values: from [thread, product, half] to [product, half, thread]."""
    return (chunk >> 5) * 32 + (chunk & 7) * 4 + (chunk >> 3 & 3)


class Halves(Threads):
    """Write the operations of a thread that splits numbers."""

    def two_words(self, ref: Any, row: Number, size: int, chunk: Number) -> list[Number]:
        """Return 4 numbers of bf16 in two words."""
        from jaxlib.mlir.dialects import llvm

        kind = ir.VectorType.get((2,), int32())
        pointer = utils.getelementptr(utils.memref_ptr(ref), [self._index(row, size // EACH, chunk)], kind)
        found = llvm.load(kind, pointer, alignment=8)
        return [Number(llvm.extractelement(found, c(i))) for i in range(2)]

    def store_word(self, ref: Any, place: Number, value: Number, where: Number) -> None:
        """Store 4 e4m3 numbers, in the threads with this condition."""
        from jaxlib.mlir.dialects import llvm

        branch = scf.IfOp(where.value)
        with ir.InsertionPoint(branch.then_block):
            llvm.store(value.value, utils.getelementptr(utils.memref_ptr(ref), [place.value], int32()))
            scf.yield_([])

    def _index(self, row: Number, width: int, column: Number) -> Any:
        return arith.addi(arith.muli(row.value, c(width)), column.value)

    def greater(self, x: Number, y: Number) -> Number:
        """Return the greater one of integers."""
        return Number(arith.maxsi(x.value, y.value))

    def narrow(self, a: Number, b: Number) -> Number:
        """Return two numbers as e4m3, the first one in the lowest byte."""
        text = "{ .reg .b16 h; cvt.rn.satfinite.e4m3x2.f32 h, $2, $1; cvt.u32.u16 $0, h; }"
        return self._ask(text, [self.as_integer(x).value for x in (a, b)], has_result=True, exchanges=False)

    def widen(self, pair: Number) -> list[Number]:
        """Return the numbers of `narrow` in f32."""
        registers = "{ .reg .b16 h, l, u; .reg .b32 d; cvt.u16.u32 h, $1; cvt.rn.f16x2.e4m3x2 d, h; mov.b32 {l, u}, d; "
        asked = [f"{registers}cvt.f32.f16 $0, {which}; }}" for which in "lu"]
        return [self.as_float(self._ask(text, [pair.value], has_result=True, exchanges=False)) for text in asked]
