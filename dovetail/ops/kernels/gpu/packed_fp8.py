"""Products of packed weights by the tensor cores' fp8 (e4m3) on Hopper: the arithmetic of packed_pipeline's programs.

A product of e4m3 numbers takes half the time of one of bf16, so bf16 tokens are multiplied as two of them
(packed_halves). Weights are not unpacked to bf16: codes of fp8 are multiplied as they are, from shared memory, and
those of mxfp4 become e4m3 numbers in registers, about nine instructions for eight codes:

- A table of 8 bytes has e2m1's magnitudes times a power of two, as e4m3 numbers. PRMT takes four of them by four codes.
- The power of two is the block's scale relative to the greatest one of its row, 2^6. The row's multiplies the sums.
- Lane i of a warp holds the table of 2^(6 - i), which a block's threads get by SHFL.

Blocks with scales down to 2^-14 of their row's greatest are exact; smaller numbers are rounded to multiples of 2^-15 of
that scale, or 2^-18 of the greatest number that a row could have.

A thread takes all 16 bytes of a block, and its quad four blocks of a row, so that it reads one scale for 32 values. The
order of a row's values within 128 changes (packed_halves.in_order).

Tensor cores add e4m3 products with about 14 bits. So the sums of each STEP values are added up in f32 by other cores.

N tokens of a tile, G blocks of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, vector

from dovetail.ops.kernels.gpu import packed_product
from dovetail.ops.kernels.gpu.experts import ACC
from dovetail.ops.kernels.gpu.mosaic.threads import ALL, WARP, Number, Threads
from dovetail.ops.kernels.gpu.packed_codes import PER_ROW, PRODUCT, REGISTER, ROWS
from dovetail.ops.kernels.gpu.packed_halves import E4M3, STEP, factor_of
from dovetail.ops.kernels.gpu.warp_ops import c, int32, thread

MOST_TOKENS = 80  # of a tile: each has sums in the accumulators and in other registers
PER_TOKEN = plgpu.Layout.WGMMA.reduce(0)  # of a number for each column of a product
PER_THREAD = plgpu.Layout.WG_STRIDED((128,), vec_size=1)  # of a number for each thread
TOP = 6  # the greatest block's numbers are times 2^TOP: 6 x 2^6 = 384 is below e4m3's 448
MAGNITUDES = (0, 0.5, 1, 1.5, 2, 3, 4, 6)
SIGNS, CODES = 0x80808080, 0x77777777


def tables() -> np.ndarray:
    """Return the magnitudes of a block with a scale of 2^(6 - i) as e4m3 numbers, for i < 32, as words [2, 32]."""
    values = np.outer(2.0 ** (TOP - np.arange(WARP)), MAGNITUDES)
    return values.astype(ml_dtypes.float8_e4m3fn).view(np.uint8).view(np.uint32).T.astype(np.uint32)


# --- registers --------------------------------------------------------------------------------------------------------


def numbers_of_word(on: Any, word: Any, table: Sequence) -> list:
    """Return the 8 codes of a word as two words of 4 e4m3 numbers each.

    Args:
        on: Has `bytes_of(x, y, order)`: by the lowest four codes of `order` four of the 8 bytes of x and y (PRMT).
        word: The codes.
        table: Two words, the magnitudes.
    """
    magnitudes, low = word & CODES, word << 4  # a sign is the greatest bit of a byte of `low` or of `word`
    signs = [on.bytes_of(low, word, order) for order in (0x5140, 0x7362)]
    found = [on.bytes_of(*table, own) for own in (magnitudes, magnitudes >> 16)]
    return [value | sign & SIGNS for value, sign in zip(found, signs, strict=True)]


class Word(Number):
    """Hold a thread's 32 bits."""

    def __lshift__(self, bits: int) -> Word:
        return self._with(bits, arith.shli)  # pyright: ignore[reportReturnType]

    def __or__(self, other: Any) -> Word:
        return self._with(other, arith.ori)  # pyright: ignore[reportReturnType]

    def _with(self, other: Any, of_integers: Any, of_floats: Any = None) -> Word:
        return Word(of_integers(self.value, self.same(other)))

    def same(self, other: Any) -> Any:
        """Return a word or a constant as a value."""
        return other.value if isinstance(other, Number) else c(other - (1 << 32) if other >> 31 else other)


class Registers(Threads):
    """Write the operations of a thread that converts codes."""

    @property
    def thread(self) -> Word:
        """Return the number of the thread in its program."""
        return Word(thread())

    def at_most(self, x: Number, most: int) -> Word:
        """Return the lesser one of integers without a sign: of a negative x, `most`."""
        return Word(arith.minui(x.value, c(most)))

    def greater(self, x: Word, y: Word) -> Word:
        """Return the greater one of integers without a sign."""
        return Word(arith.maxui(x.value, y.value))

    def bytes_of(self, x: Word, y: Word, order: Word | int) -> Word:
        """Return four of the bytes of x and y."""
        return self._word("prmt.b32 $0, $1, $2, $3;", [x, y, order], exchanges=False)

    def of_lane(self, x: Word, lane: Word) -> Word:
        """Return the word of another lane of the warp."""
        return self._word(f"shfl.sync.idx.b32 $0, $1, $2, 0x1f, {ALL};", [x, lane])

    def of_quad(self, x: Word, distance: int) -> Word:
        """Return the word of the lane whose number differs by this bit."""
        return self._word(f"shfl.sync.bfly.b32 $0, $1, {distance}, 0x1f, {ALL};", [x])

    def words(self, ref: Any, first: Any) -> list[Word]:
        """Return 4 words of shared memory, from a byte on whose address is a multiple of 16."""
        from jaxlib.mlir.dialects import llvm

        pointer = self._pointer(ref, first)
        kind = ir.VectorType.get((4,), int32())
        found = llvm.load(kind, pointer, alignment=16)
        return [Word(vector.extract(found, [], [i])) for i in range(4)]

    def byte(self, ref: Any, at: Any) -> Word:
        """Return a byte of shared memory."""
        return Word(arith.extui(int32(), self.load(ref, at).value))

    def _word(self, text: str, given: list, exchanges: bool = True) -> Word:
        values = [each.value if isinstance(each, Number) else c(each) for each in given]
        return Word(self._ask(text, values, has_result=True, exchanges=exchanges).value)


def rows_of(on: Any) -> tuple[Any, list]:
    """Return a thread's number in its quad, and its two rows of 64, as a product expects them."""
    row = (on.thread >> 5 & 3) * 16 + (on.thread >> 2 & 7)
    return on.thread & 3, [row, row + 8]


def greatest_of_rows(on: Any, scales: Any, groups: int) -> list:
    """Return the greatest scale of each of a thread's rows."""
    lane, rows = rows_of(on)
    found = []
    for row in rows:
        most = None
        for at in range(0, groups, 4):
            place = on.at_most(lane + at, groups - 1) if at + 4 > groups else lane + at
            own = on.byte(scales, row * groups + place)
            most = own if most is None else on.greater(most, own)
        for distance in (1, 2):
            most = on.greater(most, on.of_quad(most, distance))
        found.append(most)
    return found


def numbers_of_thread(on: Any, codes: Any, scales: Any, groups: int, step: Any, greatest: list, table: list) -> list:
    """Return what a thread holds of `fragment`: for each row, product of 32 values and half of it a word."""
    lane, rows = rows_of(on)
    block = on.at_most(step * 4 + lane, groups - 1)
    found = []
    for row, most in zip(rows, greatest, strict=True):
        below = on.at_most(most - on.byte(scales, row * groups + block), WARP - 1)
        own = on.of_lane(table[0], below), on.of_lane(table[1], below)
        words = on.words(codes, row * (STEP // 2) + lane * 16)
        found.append([numbers_of_word(on, word, own) for word in words])
    return found


# --- in a kernel ------------------------------------------------------------------------------------------------------


def lane_tables(ref: Any) -> list[jax.Array]:
    """Return each lane's table, two words, from `tables` as a list in global memory."""
    kind = plgpu.ShapeDtypeStruct((128,), jnp.int32, layout=PER_THREAD)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=[kind, kind])
    def load(_: Any, ref: Any) -> Any:
        on = Registers()
        words = [on.load(ref, (on.thread & WARP - 1) + at).value for at in (0, WARP)]
        registers = [np.array([_vector_of(word)], dtype=object) for word in words]
        layout = PER_THREAD.to_mgpu()
        return [mgpu.FragmentedArray(_registers=own, _layout=layout, _is_signed=True) for own in registers]

    return load(ref)  # pyright: ignore[reportCallIssue]


def greatest_scales(ref: Any, groups: int) -> jax.Array:
    """Return the greatest of each row's scales [64, G] in shared memory, as int32 [64]."""

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),), return_type=plgpu.ShapeDtypeStruct((ROWS,), jnp.int32, layout=PER_ROW)
    )
    def find(_: Any, ref: Any) -> Any:
        found = [_vector_of(most.value) for most in greatest_of_rows(Registers(), ref, groups)]
        layout = PER_ROW.to_mgpu()
        registers = np.array(found, dtype=object).reshape(layout.registers_shape((ROWS,)))
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=True)

    return find(ref)  # pyright: ignore[reportCallIssue]


def fragment(codes: Any, scales: Any, groups: int, step: Any, greatest: jax.Array, table: list) -> jax.Array:
    """Return mxfp4's codes [64, 64] in shared memory as e4m3 numbers [64, 128] in the order of packed_halves.in_order.

    Args:
        codes: Row after row.
        scales: The scales [64, G].
        groups: G. Past the last one codes are 0.
        step: The index of the 128 values.
        greatest: Those of `greatest_scales`.
        table: Those of `lane_tables`.
    """

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.RefType(), plgpu.Layout.WG_SPLAT(()), PER_ROW, [PER_THREAD, PER_THREAD]),
        return_type=plgpu.ShapeDtypeStruct((ROWS, STEP), E4M3, layout=REGISTER),
    )
    def convert(_: Any, codes: Any, scales: Any, step: Any, greatest: Any, table: list) -> Any:
        most = [_word_of(register) for register in greatest.registers.flat]
        own = [_word_of(each.registers.flat[0]) for each in table]
        layout = REGISTER.to_mgpu()
        out = np.empty(layout.registers_shape((ROWS, STEP)), dtype=object)
        found = numbers_of_thread(Registers(), codes, scales, groups, Word(step.registers.flat[0]), most, own)
        for (row, i, half), word in np.ndenumerate(np.array(found, dtype=object)):
            kind = ir.VectorType.get((4,), ir.Float8E4M3FNType.get())
            out[0, 2 * i + half, 0, 0, row] = vector.bitcast(kind, _vector_of(word.value))
        return mgpu.FragmentedArray(_registers=out, _layout=layout, _is_signed=None)

    return convert(codes, scales, step, greatest, table)  # pyright: ignore[reportCallIssue]


def _vector_of(value: Any) -> Any:
    return vector.broadcast(ir.VectorType.get((1,), value.type), value)


def _word_of(register: Any) -> Word:
    return Word(vector.extract(register, [], [0]))


def sums(p: Any, shared: Any, own: Any, slot: Any, table: list, release: Callable, following: Callable) -> tuple:
    """Return the products of each of a worker's parts with the tokens, [64, N] f32, and its rows' greatest scales.

    A part's products run while the codes of the next one become numbers.

    Args:
        p: The plan (packed_product.Plan).
        shared: The shared memory (packed_pipeline.PipelineMemory).
        own: What the worker reads (packed_pipeline.WorkerView).
        slot: The first one.
        table: Those of `lane_tables`.
        release: A function that releases the slot before one.
        following: A function from a slot to the next one.
    """
    groups, is_mxfp4 = p.size // p.group, p.form.name == "mxfp4"
    scales = own.vectors["scale"]
    greatest = [greatest_scales(ref, groups) for ref in scales] if is_mxfp4 else []

    def left(n: int, slot: Any, step: Any) -> Any:
        codes = shared.codes.at[slot, own.first + n]
        return fragment(codes, scales[n], groups, step, greatest[n], table) if is_mxfp4 else codes

    def step(i: Any, carry: tuple) -> tuple:
        slot, totals = carry[0], list(carry[1])
        release(slot)
        plgpu.barrier_wait(shared.loaded.at[slot])
        weights = left(0, slot, i)
        for n in range(p.parts):

            def multiply(acc: Any, n: int = n, weights: Any = weights) -> tuple:
                for half in range(2):
                    packed_product.add_product(acc, weights, shared.x.at[slot, half])
                following = left(n + 1, slot, i) if is_mxfp4 and n + 1 < p.parts else None
                return acc[...], following

            found, weights = pl.run_scoped(multiply, ACC((ROWS, p.N), jnp.float32))
            weights = left(n + 1, slot, i) if weights is None and n + 1 < p.parts else weights
            totals[n] += found * packed_product.spread(p, own, "scale", n, i, found) if p.scales_sums else found
        return following(slot), tuple(totals)

    zeros = plgpu.layout_cast(jnp.zeros((ROWS, p.N), jnp.float32), PRODUCT)
    return list(lax.fori_loop(0, p.steps, step, (slot, (zeros,) * p.parts))[1]), greatest


def finished(p: Any, totals: list[jax.Array], greatest: list[jax.Array], vectors: dict[str, list]) -> list[jax.Array]:
    """Return the sums [64, N] with what is applied at the end: powers of two, scales of rows, biases."""

    def spread(vector: jax.Array, dim: int) -> jax.Array:
        return lax.broadcast_in_dim(vector.astype(jnp.float32), (ROWS, p.N), [dim])

    def of_rows(ref: Any) -> jax.Array:
        return spread(plgpu.layout_cast(ref[...], PER_ROW), 0)

    factor = spread(factor_of(plgpu.layout_cast(vectors["token"][0][pl.ds(0, p.N)], PER_TOKEN)), 1)
    if p.form.name == "mxfp4":  # scales below 2^-120 give 0
        powers = [lax.bitcast_convert_type(jnp.maximum(g - TOP, 0) << 23, jnp.float32) for g in greatest]
        totals = [x * spread(own, 0) for x, own in zip(totals, powers, strict=True)]
    elif not p.form.group:
        totals = [x * of_rows(scale) for x, scale in zip(totals, vectors["scale"], strict=True)]
    totals = [x * factor for x in totals]
    return [x + of_rows(b) for x, b in zip(totals, vectors["bias"], strict=True)] if "bias" in vectors else totals
