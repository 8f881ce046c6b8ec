"""Multiply unpacked numbers by few tokens on Hopper, for the kernel of ops/kernels/gpu/packed_product.py.

Products of a warp (mma) of 16 rows, 8 tokens and 16 values take both operands from registers and are done when they
return. The left one lies as `packed_codes.numbers` leaves it. The right one is read from shared memory in the order of
the input: the 4 bytes of codes that a thread unpacks are 4 or 8 values of a row, and it reads these values of a token.

A warpgroup's products (wgmma) are as fast with up to 8 tokens, but need the tokens in another order, which was a kernel
of 1 to 2 us before each product. From 16 tokens on they are faster: 28.1 instead of 33.9 us for 28,672 x 4,096 in int4.

T tokens, N their number rounded up to a multiple of 8.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, vector

from dovetail.core.formats import CODES
from dovetail.ops.kernels.gpu.packed_codes import PRODUCT, ROWS

TOKENS = 8  # of a warp's product
INSTRUCTION = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
OPERANDS = "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};"
CONSTRAINTS = "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f"


def add_few(sums: jax.Array, weights: jax.Array, tokens: Any, first: int, name: str, T: int) -> jax.Array:
    """Return sums [64, N] plus weights [64, n] times tokens [N, ..] at the values from `first` on.

    Args:
        sums: The sums, in f32.
        weights: Numbers of `packed_codes.numbers`.
        tokens: The tokens in shared memory, in the order of the input.
        first: The first value of a token.
        name: The format of the codes.
        T: The tokens; the sums of others are undefined.
    """

    @plgpu.inline_mgpu(
        arg_types=(PRODUCT, PRODUCT, plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct(sums.shape, jnp.float32, layout=PRODUCT),
    )
    def multiply(_: Any, sums: Any, weights: Any, tokens: Any) -> Any:
        planes = 2 * CODES[name][1]  # the codes of a word
        chunk = 8 * planes  # values of 4 threads with 4 bytes each
        totals = sums.registers.copy()
        for block in range(sums.shape[1] // TOKENS):
            for at in range(weights.shape[1] // chunk):
                pairs = _pairs(tokens, block, first + at * chunk, planes, T)
                for plane in range(0, planes, 2):
                    left = weights.registers[0, at * planes + plane :][:2].reshape(-1)
                    total = totals[0, block].reshape(-1)
                    totals[0, block] = _product(total, left, pairs[plane : plane + 2]).reshape(totals[0, block].shape)
        return mgpu.FragmentedArray(_registers=totals, _layout=sums.layout, _is_signed=None)

    return multiply(sums, weights, tokens)  # pyright: ignore[reportCallIssue]


def zeros(N: int) -> jax.Array:
    """Return sums [64, N] to begin with."""
    return plgpu.layout_cast(jnp.zeros((ROWS, N), jnp.float32), PRODUCT)


def _pairs(tokens: Any, block: int, first: int, planes: int, T: int) -> list[Any]:
    """Return the values of a thread's token that are multiplied with its codes: a pair for each plane, in a register.

    Of 2 * planes values in a row, plane p has p and planes + p.
    """
    from jaxlib.mlir.dialects import llvm

    i32, bf16 = ir.IntegerType.get_signless(32), ir.BF16Type.get()
    lane = arith.remui(utils.thread_idx(), utils.c(32, i32))
    row = arith.divui(lane, utils.c(4, i32))
    row = arith.minui(arith.addi(row, utils.c(block * TOKENS, i32)), utils.c(T - 1, i32))  # lanes without a token share
    column = arith.muli(arith.remui(lane, utils.c(4, i32)), utils.c(2 * planes, i32))
    width = ir.MemRefType(tokens.type).shape[-1]
    place = arith.addi(arith.muli(row, utils.c(width, i32)), column)
    pointer = utils.getelementptr(utils.memref_ptr(tokens), [place], bf16)
    pointer = utils.getelementptr(pointer, [first], bf16)
    words = llvm.load(ir.VectorType.get((planes,), i32), pointer, alignment=4 * planes)
    values = vector.bitcast(ir.VectorType.get((2 * planes,), bf16), words)
    pick = lambda p: vector.shuffle(values, values, [p, planes + p])  # noqa: E731
    return [vector.bitcast(ir.VectorType.get((1,), i32), pick(p)) for p in range(planes)]


def _product(sums: np.ndarray, left: np.ndarray, right: list[Any]) -> np.ndarray:
    """Return the sums of a thread, pairs of f32, plus a warp's product."""
    from jaxlib.mlir.dialects import llvm

    i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
    word = lambda x: vector.extract(vector.bitcast(ir.VectorType.get((1,), i32), x), [], [0])  # noqa: E731
    scalars = [vector.extract(pair, [], [at]) for pair in sums for at in range(2)]
    given = [*map(word, left), *map(word, right), *scalars]
    found: Any = llvm.inline_asm(
        llvm.StructType.get_literal([f32] * 4), given, f"{INSTRUCTION} {OPERANDS}", CONSTRAINTS, has_side_effects=False
    )
    out = [llvm.extractvalue(f32, found, [at]) for at in range(4)]
    pairs = [vector.from_elements(ir.VectorType.get((2,), f32), out[at : at + 2]) for at in (0, 2)]
    result = np.empty(len(pairs), dtype=object)
    result[:] = pairs
    return result
