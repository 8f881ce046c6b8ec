"""Unpack registers of codes into bf16 numbers on Hopper, for the kernel of ops/kernels/gpu/packed_product.py.

A thread has 4 consecutive bytes of a row in a register: two words of 16 bits, each with 2 codes of 8 bits or 4 of 4
bits. A few operations on the register take one code of each word to a pair of bf16 numbers, exactly: the bits of the
code become those of a number, from which a constant is subtracted, or which is multiplied by a power of two. The pairs
lie as a product (wgmma) expects its left operand, so that no values move between threads. Only the order of a row's
values changes, alike in all formats: of 8 words the first codes come first, then the second ones. `in_order` brings
activations into the same order.

bf16 has 8 bits of exponent and 7 of mantissa: 0x4300 is 128, and the lowest bits of a number from 128 on count ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, memref, vector

from dovetail.core.formats import CODES

ROWS = 64  # of a weight that a warpgroup multiplies at once
WORDS = 8  # of 16 bits, side by side in 4 threads
REGISTER = plgpu.Layout.WGMMA_8BIT  # of bytes
PRODUCT = plgpu.Layout.WGMMA  # of the numbers
PER_ROW = plgpu.Layout.WGMMA.reduce(1)  # of a number for each row
# Of mxfp4 (`scale_bits`): greater codes are taken for this one, and sums are multiplied by the second
GREATEST_SCALE, SUMS = 161, 2.0**32


class Bits(NamedTuple):
    """Describe the bits of a bf16 number: some of the word, shifted to the right (< 0: left), and a constant.

    Or those that are `kept` of a multiple of them: of bits at two places with one multiplication.
    """

    parts: tuple[tuple[int, int], ...] = ()  # (shift, mask)
    base: int = 0
    multiple: int = 1
    kept: int = 0xFFFF
    is_swapped: bool = False  # of the word with its bytes exchanged


class Plane(NamedTuple):
    """Describe one code of each word as a number: (bits - minus) * times."""

    bits: Bits
    minus: Bits | None = None
    times: int | None = None


def planes_of(name: str) -> list[Plane]:
    """Return the codes of a word in this format, in their order.

    Without a scale: int4 gives q - 8, uint4 gives q, for which a zero point is subtracted later, and mxfp4 gives 2^-126
    of its numbers (`scale_bits`).
    """
    if name == "int8":  # 128 + the lower 7 bits - (128, or 256 if the sign is set)
        return [Plane(Bits(((at, 0x7F),), 0x4300), Bits(((at, 0x80),), 0x4300)) for at in (0, 8)]
    if name == "fp8":  # e4m3's bias is 7 instead of 127: times 2^120
        return [Plane(Bits(((at - 8, 0x8000), (at - 4, 0x07F0))), times=0x7B80) for at in (0, 8)]
    if name == "mxfp4":  # e2m1's bias is 1, that of bf16 127; numbers below 1 are subnormal in both
        factors = {at: 1 << 12 - at | 1 << 6 - at for at in (0, 4)}
        both = [(swap, at) for swap in (False, True) for at in factors]
        return [Plane(Bits(((0, 0xF << at),), 0, factors[at], 0x81C0, swap)) for swap, at in both]
    middle = {"int4": 0x4308, "uint4": 0x4300}[name]
    return [Plane(Bits(((at, 0x000F),), 0x4300), Bits(base=middle)) for at in (0, 4, 8, 12)]


def decoded(word: Any, plane: Plane, number: Callable[[Any], Any]) -> Any:
    """Return the numbers of a plane.

    Args:
        word: Registers of words, with operators whose integers are meant for each word of 16 bits.
        plane: Which code.
        number: A function from the bits of bf16 numbers to these.
    """

    def of(own: Bits) -> Any:
        total: Any = own.base if own.parts else word & 0 | own.base  # LLVM knows the constant
        source = _swapped(word) if own.is_swapped else word
        for shift, mask in own.parts:
            moved = source >> shift if shift > 0 else source << -shift if shift < 0 else source
            total = _masked(moved, mask, total)
        return number(total if own.multiple == 1 else total * own.multiple & own.kept)

    value = of(plane.bits)
    value = value if plane.minus is None else value - of(plane.minus)
    return value if plane.times is None else value * of(Bits(base=plane.times))


def _masked(word: Any, mask: int, base: Any) -> Any:
    """Return word & mask | base, for which ptxas takes two instructions where both are constants."""
    if not isinstance(base, int) or not isinstance(word, Words):
        return word & mask | base
    return word.masked(mask, base) if base else word & mask


def _swapped(word: Any) -> Any:
    """Return words with their bytes exchanged."""
    return word.swapped() if isinstance(word, Words) else word >> 8 | (word & 0xFF) << 8


def scale_bits(code: Any) -> Any:
    """Return the bits of a bf16 number, 2^(126 - 32) times mxfp4's scale 2^(code - 127), for codes up to 161.

    2^126 is what mxfp4's planes lack, and with it a scale above 2 would be too large. SUMS makes up for 2^-32. A scale
    above 2^33, with code 161, gives inf; products with scales below 2^-100 lose bits.
    """
    return (code + (126 - 32)) << 7


def in_order(x: jax.Array, name: str) -> jax.Array:
    """Return x [.., in] with its last dim in the order of unpacked codes."""
    each = 2 * CODES[name][1]
    return x.reshape(*x.shape[:-1], -1, WORDS, each).swapaxes(-1, -2).reshape(x.shape)


# --- in a kernel ------------------------------------------------------------------------------------------------------


def numbers(codes: jax.Array, name: str) -> jax.Array:
    """Return bytes of codes [64, n], as REGISTER holds them, as bf16 numbers in the order of `in_order`."""
    planes = planes_of(name)
    size = codes.shape[1] // 2 * len(planes)

    @plgpu.inline_mgpu(
        arg_types=(REGISTER,), return_type=plgpu.ShapeDtypeStruct((len(codes), size), jnp.bfloat16, layout=PRODUCT)
    )
    def unpack(_: Any, found: Any) -> Any:
        layout = PRODUCT.to_mgpu()
        out = np.empty(layout.registers_shape((len(codes), size)), dtype=object)
        for index, register in np.ndenumerate(found.registers):
            word = Words.of(register)
            for at, plane in enumerate(planes):
                row, column, *rest = index
                out[row, column * len(planes) + at, *rest] = decoded(word, plane, Pairs.of).value
        return mgpu.FragmentedArray(_registers=out, _layout=layout, _is_signed=None)

    return unpack(codes)  # pyright: ignore[reportCallIssue]


def column(rows: Any, at: jax.Array, size: int, dtype: Any) -> jax.Array:
    """Return column `at` of a matrix [64, size] in shared memory, as PER_ROW holds it.

    Args:
        rows: The matrix as [.., n], row after row, as a copy of so many bytes needs it.
        at: The column.
        size: The columns.
        dtype: The dtype of the matrix.
    """
    width = rows.shape[-1]
    signed = jnp.issubdtype(dtype, jnp.signedinteger) if jnp.issubdtype(dtype, jnp.integer) else None

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT(())),
        return_type=plgpu.ShapeDtypeStruct((ROWS,), dtype, layout=PER_ROW),
    )
    def load(_: Any, ref: Any, at: Any) -> Any:
        layout, index = PER_ROW.to_mgpu(), ir.IndexType.get()
        first, step, row = (arith.index_cast(index, at.registers.flat[0]), *_indices(size, width))
        found = []
        for (number,) in layout.thread_idxs((ROWS,)):
            place = arith.addi(arith.muli(number, step), first)
            value = memref.load(ref, [arith.divui(place, row), arith.remui(place, row)])
            found.append(vector.broadcast(ir.VectorType.get((1,), value.type), value))
        registers = np.array(found, dtype=object).reshape(layout.registers_shape((ROWS,)))
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=signed)

    return load(rows, at)  # pyright: ignore[reportCallIssue]


def _indices(*values: int) -> list[Any]:
    return [arith.constant(ir.IndexType.get(), value) for value in values]


class Words(NamedTuple):
    """Hold two words of 16 bits in a register of 32."""

    value: Any

    @classmethod
    def of(cls, register: Any) -> Words:
        """Return the words of a register, an integer or a vector."""
        kind = _vector(1, ir.IntegerType.get_signless(32))
        of = vector.bitcast if isinstance(register.type, ir.VectorType) else vector.broadcast
        return cls(of(kind, register))

    def __rshift__(self, bits: int) -> Words:
        return Words(arith.shrui(self.value, _constant(bits)))

    def __lshift__(self, bits: int) -> Words:
        return Words(arith.shli(self.value, _constant(bits)))

    def __and__(self, mask: int) -> Words:
        return Words(arith.andi(self.value, _twice(mask)))

    def __or__(self, other: Words | int) -> Words:
        bits = _twice(other) if isinstance(other, int) else other.value
        return Words(arith.ori(self.value, bits))

    def __mul__(self, other: int) -> Words:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return a multiple, of which no word has more than 16 bits."""
        return Words(arith.muli(self.value, _constant(other)))

    def masked(self, mask: int, base: int) -> Words:
        """Return self & mask | base by one instruction."""
        return self._found("lop3.b32 $0, $1, $2, $3, 0xEA;", _twice(mask), _twice(base))

    def swapped(self) -> Words:
        """Return the words with their bytes exchanged."""
        return self._found("prmt.b32 $0, $1, $1, 0x2301;")

    def _found(self, text: str, *others: Any) -> Words:
        from jaxlib.mlir.dialects import llvm

        kind = ir.IntegerType.get_signless(32)
        given = [vector.extract(each, [], [0]) for each in (self.value, *others)]
        constraints = ",".join(["=r", *["r"] * len(given)])
        found: Any = llvm.inline_asm(kind, given, text, constraints, has_side_effects=False)
        return Words(vector.broadcast(_vector(1, kind), found))


class Pairs(NamedTuple):
    """Hold two bf16 numbers in a register."""

    value: Any

    @classmethod
    def of(cls, words: Words) -> Pairs:
        """Return the numbers with these bits."""
        return cls(vector.bitcast(_vector(2, ir.BF16Type.get()), words.value))

    def __sub__(self, other: Pairs) -> Pairs:
        return Pairs(arith.subf(self.value, other.value))

    def __mul__(self, other: Pairs) -> Pairs:  # pyright: ignore[reportIncompatibleMethodOverride]
        return Pairs(arith.mulf(self.value, other.value))


def _twice(bits: int) -> Any:
    return _constant(bits << 16 | bits)


def _vector(size: int, kind: Any) -> Any:
    return ir.VectorType.get((size,), kind)


def _constant(bits: int) -> Any:
    kind = ir.IntegerType.get_signless(32)
    value = ir.IntegerAttr.get(kind, bits - (1 << 32) if bits >> 31 else bits)
    return arith.constant(_vector(1, kind), ir.DenseElementsAttr.get_splat(_vector(1, kind), value))
