"""Products with packed weights by e4m3 numbers on Hopper: conversion thread by thread, tokens as two numbers, lowering.

tests/ops/test_packed_pipeline.py interprets the kernel around it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from ops.test_routing import Memory, Shared, Simulated

from dovetail.ops.kernels.gpu import packed_fp8 as kernel
from dovetail.ops.kernels.gpu import packed_halves
from dovetail.ops.kernels.gpu.mosaic.halves import split
from dovetail.ops.quant.unpack import E2M1_VALUES

THREADS, ROWS, SIZE = 128, 64, 128
E4M3 = ml_dtypes.float8_e4m3fn


class Arrays:
    """Run the operations of packed_fp8.Registers with a number for each thread."""

    thread = np.arange(THREADS)

    def at_most(self, x, most):
        return np.minimum(np.asarray(x).astype(np.uint32), most).astype(np.int64)

    def greater(self, x, y):
        return np.maximum(x, y)

    def byte(self, ref, at):
        return ref[at].astype(np.int64)

    def words(self, ref, first):
        assert not np.any(first % 16)
        return [ref.view(np.uint32)[first // 4 + i].astype(np.int64) for i in range(4)]

    def of_quad(self, x, distance):
        return x[self.thread ^ distance]

    def of_lane(self, x, lane):
        return x[self.thread // 32 * 32 + lane]

    def bytes_of(self, x, y, order):
        parts = [*(np.asarray(x) >> 8 * i & 255 for i in range(4)), *(np.asarray(y) >> 8 * i & 255 for i in range(4))]
        every, order = np.stack(np.broadcast_arrays(*parts)), np.broadcast_to(order, np.shape(parts[0]))
        picked = [order >> 4 * i & 15 for i in range(4)]
        assert all(np.all(p < 8) for p in picked)  # no signs are asked for
        return sum(np.take_along_axis(every, p[None], 0)[0] << 8 * i for i, p in enumerate(picked))


def table_of_lanes() -> list:
    return [np.tile(words, 4).astype(np.int64) for words in kernel.tables()]


def numbers(words) -> np.ndarray:
    """Return the e4m3 numbers of words as f32 [.., 4]."""
    return np.asarray(words).astype(np.uint32)[..., None].view(E4M3).astype(np.float32)


def test_every_code_of_every_scale_becomes_its_number():
    table = kernel.tables()
    words = np.random.default_rng(0).integers(0, 1 << 32, size=(32, 4096), dtype=np.uint32)
    words[:, :2] = 0x76543210, 0xFEDCBA98
    found = kernel.numbers_of_word(
        Arrays(), words.astype(np.int64), [np.repeat(own[:, None], 4096, 1).astype(np.int64) for own in table]
    )
    got = np.concatenate([numbers(half & 0xFFFFFFFF) for half in found], axis=-1)
    codes = words[..., None] >> 4 * np.arange(8, dtype=np.uint32) & 15
    expected = E2M1_VALUES[codes].astype(np.float32) * (2.0 ** (6 - np.arange(32, dtype=np.float32)))[:, None, None]
    exact = slice(0, 15)  # scales down to 2^-14 of the greatest one
    np.testing.assert_array_equal(got[exact], expected[exact])
    np.testing.assert_array_equal(got, expected.astype(E4M3).astype(np.float32))
    assert np.max(np.abs(got - expected)) <= 2.0**-10


@pytest.mark.parametrize(("size", "step"), [(128, 0), (2880, 3), (2880, 22), (96, 0)])
def test_threads_hold_the_operand_of_a_product(size, step):
    """Thread 4 g + t of a warp holds columns 4 t to 4 t + 3 of each 16, of rows g and g + 8 of the warp's 16."""
    rng, groups = np.random.default_rng(size), size // 32
    scales = rng.integers(110, 130, size=(ROWS, groups)).astype(np.uint8)
    codes = rng.integers(0, 256, size=(ROWS, SIZE // 2)).astype(np.uint8)
    codes[:, max(0, size - step * SIZE) // 2 :] = 0
    on = Arrays()
    greatest = kernel.greatest_of_rows(on, scales.reshape(-1), groups)
    found = kernel.numbers_of_thread(
        on, codes.reshape(-1), scales.reshape(-1), groups, step, greatest, table_of_lanes()
    )
    got = np.zeros((ROWS, SIZE), np.float32)
    for row in range(2):
        for i in range(4):
            for half in range(2):
                values = numbers(found[row][i][half] & 0xFFFFFFFF)
                for thread in range(THREADS):
                    own = thread // 32 * 16 + thread % 32 // 4 + 8 * row
                    column = 32 * i + 16 * half + 4 * (thread % 4)
                    got[own, column : column + 4] = values[thread]
    halves = np.stack([codes & 15, codes >> 4], axis=-1).reshape(ROWS, SIZE)
    blocks = np.minimum(step * 4 + np.arange(SIZE) // 32, groups - 1)
    relative = scales[:, blocks].astype(np.float32) - scales.max(axis=1, keepdims=True)
    expected = (E2M1_VALUES[halves].astype(np.float32) * 2.0 ** (relative + 6)).astype(E4M3).astype(np.float32)
    np.testing.assert_array_equal(got, np.asarray(packed_halves.in_order(jnp.asarray(expected))))


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30])
def test_the_sum_of_both_numbers_is_the_token(scale):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 256)) * 2.0 ** rng.integers(-7, 1, size=(64, 256)) * scale
    x = x.astype(jnp.bfloat16)
    x[0] = 0
    both, greatest = jax.jit(packed_halves.halves, static_argnums=1)(jnp.asarray(x), "fp8")
    factor = np.asarray(jax.jit(packed_halves.factor_of)(greatest))
    assert np.all(np.abs(np.asarray(both).astype(np.float32)) <= 256)
    got = np.asarray(both).astype(np.float32).sum(axis=0) * factor[:, None]
    expected, most = x.astype(np.float32), np.abs(x.astype(np.float32)).max(axis=1, keepdims=True)
    is_exact = np.abs(expected) >= 2.0**-9 * most
    assert is_exact.mean() > 0.85
    np.testing.assert_array_equal(np.where(is_exact, got, 0), np.where(is_exact, expected, 0))
    assert np.all(np.abs(got - expected) <= 2.0**-17 * most)


def test_rows_are_padded_and_in_the_order_of_threads():
    x = jnp.arange(1, 161, dtype=jnp.bfloat16)[None]
    both, greatest = packed_halves.halves(x, "mxfp4")
    assert both.shape == (2, 1, 256)
    got = np.asarray(both).astype(np.float32).sum(axis=0)[0] * np.asarray(packed_halves.factor_of(greatest))
    assert list(got[:16]) == [1, 2, 3, 4, 33, 34, 35, 36, 65, 66, 67, 68, 97, 98, 99, 100]
    assert list(got[16:20]) == [5, 6, 7, 8]
    assert sorted(got)[96:] == list(range(1, 161))


class SimulatedHalves(Simulated):
    """Run the operations of mosaic.halves.Halves."""

    def two_words(self, ref, row, size, chunk):
        return [ref[(row * size // 4 + chunk) * 2 + i] for i in range(2)]

    def store_word(self, ref, place, value, where):
        ref.store(place, value, np.broadcast_to(where, np.shape(place)))

    def greater(self, x, y):
        return np.maximum(x, y)

    def as_float(self, x):
        return np.ascontiguousarray(np.broadcast_to(x, (self.programs, THREADS)).astype(np.int32)).view(np.float32)

    def narrow(self, a, b):
        low, high = (x.astype(E4M3).view(np.uint8).astype(np.int32) for x in (a, b))
        return low | high << 8

    def widen(self, pair):
        return [(pair >> at & 255).astype(np.uint8).view(E4M3).astype(np.float32) for at in (0, 8)]


@pytest.mark.parametrize(("size", "permutes"), [(2880, True), (96, True), (768, False)])
def test_a_kernel_splits_rows(size, permutes):
    rng, T, R = np.random.default_rng(size), 7, 16
    x = (rng.normal(size=(T, size)) * 2.0 ** rng.integers(-7, 1, size=(T, size))).astype(jnp.bfloat16)
    x[2] = 0
    token = rng.integers(0, T, size=R).astype(np.int32)
    token[3] = -5  # of no token
    width = -(-size // 128) * 128 if permutes else size
    both, greatest, shared = Memory(R * width // 2, np.int32), Memory(R, np.float32), Shared(R, 4)
    on = SimulatedHalves(R, [shared])
    row = np.arange(R, dtype=np.int32)[:, None] + 0 * on.thread
    options = {"R": R, "T": T, "size": size, "width": width, "permutes": permutes}
    split(on, row, x.reshape(-1).view(np.int32), token, both, greatest, shared, **options)
    assert (both.times == 1).all() and (greatest.times == 1).all()
    name = "mxfp4" if permutes else "fp8"
    expected = packed_halves.halves(jnp.asarray(x[np.where(token < 0, T - 1, token)]), name)
    got = both.values.view(E4M3).reshape(2, R, width)
    np.testing.assert_array_equal(got.astype(np.float32), np.asarray(expected[0]).astype(np.float32))
    np.testing.assert_array_equal(greatest.values, np.asarray(expected[1]))
