"""Multiply unpacked numbers by few tokens on Hopper, for the kernel of ops/kernels/gpu/packed_product.py.

A warpgroup's product (wgmma) takes as long for 8 tokens as for 64. A product of one warp (mma) of 16 rows, 8 tokens
and 16 values takes its operands from registers, is as fast as the tokens are few, and waits for nothing. Its left
operand lies as `packed_codes.numbers` leaves it. The right one is read from shared memory in the order of the input:
the 4 bytes of codes that a thread unpacks are 4 or 8 values of a row, so it reads the same values of a token.

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
from jaxlib.mlir.dialects import llvm

from dovetail.core.formats import CODES
from dovetail.ops.kernels.gpu.packed_codes import PRODUCT, ROWS

TOKENS = 8  # of a warp's product
INSTRUCTION = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
OPERANDS = "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};"
CONSTRAINTS = "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f"


ONES = 0x3F803F80  # two of them in bf16


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
    return _multiply((sums,), weights, tokens, first, name, T)[0]


def few_and_sums(weights: jax.Array, tokens: Any, first: int, name: str, T: int, N: int) -> tuple[jax.Array, jax.Array]:
    """Return the products [64, N] of `add_few`, and the sums of the tokens' values, [64, N] with equal rows."""
    return _multiply((zeros(N), zeros(N)), weights, tokens, first, name, T)


def _multiply(sums: tuple, weights: jax.Array, tokens: Any, first: int, name: str, T: int) -> tuple:
    """Return sums, the first of them with products of the weights added, and the second with those of ones."""
    out = plgpu.ShapeDtypeStruct(sums[0].shape, jnp.float32, layout=PRODUCT)

    @plgpu.inline_mgpu(arg_types=((PRODUCT,) * len(sums), PRODUCT, plgpu.RefType()), return_type=(out,) * len(sums))
    def multiply(_: Any, sums: Any, weights: Any, tokens: Any) -> Any:
        planes = 2 * CODES[name][1]  # the codes of a word
        chunk = 8 * planes  # values of 4 threads with 4 bytes each
        totals = [each.registers.copy() for each in sums]
        ones = [utils.c(ONES, ir.IntegerType.get_signless(32))] * 4
        for block in range(sums[0].shape[1] // TOKENS):
            for at in range(weights.shape[1] // chunk):
                pairs = _pairs(tokens, block, first + at * chunk, planes, T)
                for plane in range(0, planes, 2):
                    left = map(_word, weights.registers[0, at * planes + plane :][:2].reshape(-1))
                    for total, rows in zip(totals, (list(left), ones), strict=False):
                        place = total[0, block]
                        found = _product(place.reshape(-1), rows, pairs[plane : plane + 2])
                        total[0, block] = found.reshape(place.shape)
        return tuple(
            mgpu.FragmentedArray(_registers=total, _layout=each.layout, _is_signed=None)
            for total, each in zip(totals, sums, strict=True)
        )

    return multiply(sums, weights, tokens)  # pyright: ignore[reportCallIssue]


def zeros(N: int) -> jax.Array:
    """Return sums [64, N] to begin with."""
    return plgpu.layout_cast(jnp.zeros((ROWS, N), jnp.float32), PRODUCT)


def _pairs(tokens: Any, block: int, first: int, planes: int, T: int) -> list[Any]:
    """Return the values of a thread's token that are multiplied with its codes: a pair for each plane, in a register.

    Of 2 * planes values in a row, plane p has p and planes + p.
    """
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
    return [_word(pick(p)) for p in range(planes)]


def _word(pair: Any) -> Any:
    """Return a pair of bf16 numbers as the word that a product takes."""
    i32 = ir.IntegerType.get_signless(32)
    return vector.extract(vector.bitcast(ir.VectorType.get((1,), i32), pair), [], [0])


def _product(sums: np.ndarray, left: list[Any], right: list[Any]) -> np.ndarray:
    """Return the sums of a thread, pairs of f32, plus a warp's product of words."""
    f32 = ir.F32Type.get()
    scalars = [vector.extract(pair, [], [at]) for pair in sums for at in range(2)]
    given = [*left, *right, *scalars]
    found = llvm.inline_asm(
        llvm.StructType.get_literal([f32] * 4), given, f"{INSTRUCTION} {OPERANDS}", CONSTRAINTS, has_side_effects=False
    )
    out = [llvm.extractvalue(f32, found, [at]) for at in range(4)]
    pairs = [vector.from_elements(ir.VectorType.get((2,), f32), out[at : at + 2]) for at in (0, 2)]
    result = np.empty(len(pairs), dtype=object)
    result[:] = pairs
    return result
