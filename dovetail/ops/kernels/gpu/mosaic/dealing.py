"""Write the rows of tokens to the places of their pairs of token and expert, for Hopper (Pallas, Mosaic GPU).

XLA gathers: it reads a row once for each of its places, in no order. Here a program reads the row of a token once, and
writes it to all of them.

T tokens, k experts per token, M = T k, D columns.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import scf

from dovetail.ops.kernels.gpu.mosaic.threads import THREADS, Number, Threads, launch
from dovetail.ops.kernels.gpu.warp_ops import int32

LINE = 16  # bytes that a thread reads or writes at a time
MOST_LINES = 16  # per thread, whose registers hold them
MOST_COPIES = 32  # whose stores are unrolled


def why_not_deal(x: Any, k: int) -> str | None:
    """Return why the kernel cannot write each row of x [T, D] to k places, or None."""
    lines, rest = divmod(x.shape[1] * jnp.dtype(x.dtype).itemsize, LINE)
    if rest or not lines:
        return f"rows of {x.shape[1]} x {jnp.dtype(x.dtype).name}, not a multiple of {LINE} bytes"
    if lines > MOST_LINES * THREADS:
        return f"rows of more than {MOST_LINES * THREADS * LINE} bytes"
    if k > MOST_COPIES:
        return f"more than {MOST_COPIES} places of a row"
    return "more lines than integers of 32 bits count" if len(x) * k * lines >= 2**31 else None


@functools.partial(jax.jit, static_argnames="k")  # the layers of a model share one lowered function
def deal_rows(x: jax.Array, place: jax.Array, k: int) -> jax.Array:
    """Return [M, D] with row i of x [T, D] at the places place[i k : (i + 1) k], a permutation of M int32."""
    program = functools.partial(deal, k=k, lines=x.shape[1] * x.dtype.itemsize // LINE)
    out = jax.ShapeDtypeStruct((len(x) * k, x.shape[1]), x.dtype)
    (dealt,) = launch("deal_rows", program, [x, place], [out], len(x), on=Lines())
    return dealt


def deal(on: Any, token: Any, x: Any, place: Any, out: Any, *, k: int, lines: int) -> None:
    """Write a token's row to its places."""
    own = [on.thread + i * THREADS for i in range(pl.cdiv(lines, THREADS))]
    parts = [on.load_line(x, token * lines + on.at_most(line, lines - 1)) for line in own]
    places = [on.load(place, token * k + i) for i in range(k)]
    for i, (line, part) in enumerate(zip(own, parts, strict=True)):
        where = None if (i + 1) * THREADS <= lines else line < lines
        for to in places:
            on.store_line(out, to * lines + line, part, where)


class Lines(Threads):
    """Add loads and stores of `LINE` bytes."""

    def load_line(self, ref: Any, index: Number) -> Number:
        """Return the line of this index in an array, which is aligned to lines."""
        from jaxlib.mlir.dialects import llvm

        return Number(llvm.load(ir.VectorType.get((LINE // 4,), int32()), self._line(ref, index)))

    def store_line(self, ref: Any, index: Number, line: Number, where: Number | None = None) -> None:
        """Store a line, in the threads with this condition."""
        from jaxlib.mlir.dialects import llvm

        place = self._line(ref, index)
        if where is None:
            llvm.store(line.value, place)
            return
        branch = scf.IfOp(where.value)
        with ir.InsertionPoint(branch.then_block):
            llvm.store(line.value, place)
            scf.yield_([])

    def _line(self, ref: Any, index: Number) -> Any:
        return utils.getelementptr(utils.memref_ptr(ref), [index.value], ir.Type.parse(f"!llvm.array<{LINE} x i8>"))
