"""Run the warps of ops/kernels/gpu/packed_warp.py on numpy: a register is an array with an item for each thread.

The kernel writes one operation for each register; here the operations compute instead. So its addresses, its order of
values and its scales are those of the card; only what the hardware does (mma, loads, moves of halves) is written again.
"""

from __future__ import annotations

import contextlib
import types

import jax.numpy as jnp
import numpy as np

from dovetail.ops.kernels.gpu import packed_integer, packed_warp, warp_ops
from dovetail.ops.kernels.gpu.packed_few import FEW

bf16 = jnp.bfloat16


def _operations() -> types.SimpleNamespace:
    """Return arith's operations that the kernel uses."""
    binary = {
        "addi": np.add, "subi": np.subtract, "muli": np.multiply, "divui": np.floor_divide, "remui": np.remainder,
        "minui": np.minimum, "minsi": np.minimum, "ori": np.bitwise_or, "shli": np.left_shift, "mulf": np.multiply,
        "addf": np.add, "andi": np.bitwise_and, "shrui": np.right_shift, "maxui": np.maximum,
        "subf": np.subtract, "xori": np.bitwise_xor,
    }  # fmt: skip
    converted = {name: lambda _, x: np.asarray(x).astype(np.int64) for name in ("extui", "index_cast")}
    compare = {"slt": np.less, "eq": np.equal}
    return types.SimpleNamespace(
        **binary,
        **converted,
        select=np.where,
        cmpi=lambda kind, x, y: compare[kind](x, y),
        CmpIPredicate=types.SimpleNamespace(slt="slt", eq="eq"),
    )


class Words:
    """Compute on two words of 16 bits; [threads, 2]."""

    def __init__(self, value):
        self.value = np.asarray(value, np.uint32) & 0xFFFF

    @classmethod
    def of(cls, register):
        register = np.asarray(register, np.uint32)
        return cls(np.stack([register & 0xFFFF, register >> 16], axis=-1))

    def __rshift__(self, bits):
        return Words(self.value >> bits)

    def __lshift__(self, bits):
        return Words(self.value << bits)

    def __and__(self, mask):
        return Words(self.value & mask)

    def __or__(self, other):
        return Words(self.value | (other if isinstance(other, int) else other.value))

    def swapped(self):
        return Words(self.value >> 8 | self.value << 8)

    def __mul__(self, other):
        return Words(self.value * np.uint32(other))


class Pairs:
    """Compute on two bf16 numbers, with f32, which has subnormals of bf16 as numbers; [threads, 2]."""

    def __init__(self, value):
        self.value = value

    @classmethod
    def of(cls, words):
        return cls((words.value << 16).view(np.float32))

    def __sub__(self, other):
        return Pairs((self.value - other.value).astype(bf16).astype(np.float32))

    def __mul__(self, other):
        return Pairs((self.value * other.value).astype(bf16).astype(np.float32))


def _multiply_add(sums: list, left: list, right: list) -> list:
    """Return the sums plus A [16, 16] times B [16, 8] of each warp, as PTX lays them over threads."""
    lanes = np.arange(len(left[0])).reshape(-1, 32)
    out = [np.broadcast_to(np.asarray(x, np.float32), len(left[0])).copy() for x in sums]
    row, quad = np.arange(32) // 4, np.arange(32) % 4
    for own in lanes:
        a, b = np.zeros((16, 16), np.float32), np.zeros((16, 8), np.float32)
        for i, (down, right_of) in enumerate([(0, 0), (8, 0), (0, 8), (8, 8)]):
            for half in (0, 1):
                a[row + down, 2 * quad + right_of + half] = left[i][own, half]
        for i in (0, 1):
            pair = Pairs.of(Words.of(right[i][own])).value
            for half in (0, 1):
                b[2 * quad + 8 * i + half, row] = pair[:, half]
        c = a @ b
        for i in range(4):
            out[i][own] += c[row + i // 2 * 8, 2 * quad + i % 2]
    return out


def _halves(low, high, which):
    shift = np.uint32(16 * which)
    return (np.uint32(low) >> shift & 0xFFFF) | ((np.uint32(high) >> shift & 0xFFFF) << 16)


def _permuted(low, high, selector):
    """Do as PTX's prmt: bit 3 of a selector repeats the sign of the byte."""
    low, high, selector = (np.uint64(np.asarray(x) & 0xFFFFFFFF) for x in (low, high, selector))
    both, out = low | high << np.uint64(32), np.uint64(0)
    for i in range(4):
        which = selector >> np.uint64(4 * i) & np.uint64(0xF)
        byte = both >> (which & np.uint64(7)) * np.uint64(8) & np.uint64(0xFF)
        sign = (byte >> np.uint64(7)) * np.uint64(0xFF)
        out = out | np.where(which >> np.uint64(3) == 1, sign, byte) << np.uint64(8 * i)
    return out.astype(np.uint32)


def _multiply_add_bytes(sums: list, left: list, right: list) -> list:
    """Return the sums plus A [16, 32] times B [32, 8] of each warp, of bytes with a sign."""
    count = len(left[0])
    left, right = ([np.broadcast_to(x, count).astype(np.uint32).view(np.int8).reshape(-1, 4) for x in given]
                   for given in (left, right))  # fmt: skip
    out = [np.broadcast_to(np.uint32(x), count).view(np.int32).copy() for x in sums]
    row, quad = np.arange(32) // 4, np.arange(32) % 4
    for own in np.arange(count).reshape(-1, 32):
        a, b = np.zeros((16, 32), np.int32), np.zeros((32, 8), np.int32)
        for i, (down, right_of) in enumerate([(0, 0), (8, 0), (0, 16), (8, 16)]):
            for byte in range(4):
                a[row + down, 4 * quad + right_of + byte] = left[i][own, byte]
        for i, byte in np.ndindex(2, 4):
            b[4 * quad + 16 * i + byte, row] = right[i][own, byte]
        c = a @ b
        for i in range(4):
            out[i][own] += c[row + i // 2 * 8, 2 * quad + i % 2]
    return [x.view(np.uint32) for x in out]


def _max_halves(x, y):
    return np.maximum(x & 0xFFFF, y & 0xFFFF) | np.maximum(x >> 16, y >> 16) << 16


def _float_of(bits):
    return (np.asarray(bits).astype(np.int64) & 0xFFFFFFFF).astype(np.uint32).view(np.float32)


def _load_words(pointer, count, _cache=""):
    data, place = pointer
    assert np.all(place % (4 * min(count, 4)) == 0), "loads are aligned"
    assert np.all(place + 4 * count <= data.nbytes), "loads are inside of the array"
    words = data.reshape(-1).view(np.uint32)
    return [words[place // 4 + i] for i in range(count)]


def _load_shared(ref, place, first, count):
    assert not np.any((place + first) % (4 * count)), "loads are aligned"
    return [ref[(place + first) // 4 + i] for i in range(count)]


def _store_shared(ref, place, words):
    for i, word in enumerate(words):
        ref[place // 4 + i] = word


class Warps(packed_warp.Warp):
    """Run a program's warps; a loop runs its rounds."""

    def loop(self, rounds, totals, ahead, tokens):
        for i in range(rounds):
            totals, ahead, tokens = self.round(i * self.p.ahead, totals, ahead, tokens)
        return totals, ahead, tokens

    def scalar(self, kind, i, row, group=None):
        ref = self.inputs[kind][i]
        return ref.reshape(-1, 1 if group is None else ref.shape[-1])[row, 0 if group is None else group]


class IntegerWarps(packed_integer.IntegerWarp, Warps):
    """Run a program's warps in integers."""

    scalar = Warps.scalar


def _stand_ins(p) -> dict:
    """Return what computes instead of the operations of the kernel, by name."""
    kinds = types.SimpleNamespace(get=lambda *_: None)

    def store(value, ref, place):
        ref[tuple(place)] = value

    return {
        "arith": _operations(), "Words": Words, "Pairs": Pairs, "multiply_add": _multiply_add, "halves": _halves,
        "load_words": _load_words, "int32": lambda: None, "c": int, "c64": int, "register": lambda pair: pair,
        "thread": lambda: np.arange(32 * p.warps), "as_f32": lambda x: np.asarray(x).astype(np.float32),
        "wide": lambda x: np.asarray(x, np.int64), "fma": lambda x, y, z: x * y + z,
        "address": lambda ref, row, width, column, _kind: (ref, (row * width + column) * ref.itemsize),
        "byte_address": lambda ref, row, width, offset: (ref, row * width + offset),
        "utils": types.SimpleNamespace(c=lambda value, _: value), "memref": types.SimpleNamespace(store=store),
        "ir": types.SimpleNamespace(F32Type=kinds, BF16Type=kinds, IndexType=kinds),
        # of products in integers
        "float_of": _float_of, "bits_of": lambda x: x.view(np.uint32), "permuted": _permuted, "barrier": lambda _: None,
        "max_halves": _max_halves, "flipped": lambda word, bits, kept: (word ^ np.uint32(bits)) & np.uint32(kept),
        "unknown": np.uint32, "least": np.minimum,
        "multiply_add_bytes": _multiply_add_bytes, "store_shared_word": lambda r, at, x: _store_shared(r, at, [x]),
        "shuffled": lambda x, distance: np.broadcast_to(x, 32 * p.warps)[np.arange(32 * p.warps) ^ distance],
        "load_shared": _load_shared, "store_shared": _store_shared,
    }  # fmt: skip


@contextlib.contextmanager
def on_numpy(monkeypatch, p):
    """Let the operations of a program of plan `p` compute."""
    stand_ins = _stand_ins(p)
    with monkeypatch.context() as patch:
        for module in (packed_warp, packed_integer, warp_ops):
            for name in set(stand_ins) & set(vars(module)):
                patch.setattr(module, name, stand_ins[name])
        yield


def sums(monkeypatch, p, x, inputs, expert: int, row: int, source: int, count: int) -> np.ndarray:
    """Return the sums [weight, token, row] of a program of plan `p`."""
    partial = np.full((p.warps, p.names, FEW, p.rows), np.nan, np.float32)
    kind, memory = Warps, []
    if p.in_integers:
        rng = np.random.default_rng(0)  # what was in shared memory before
        kind, memory = IntegerWarps, [rng.integers(0, 1 << 32, n, np.uint32) for n in packed_integer.sizes(p)]
    with on_numpy(monkeypatch, p):
        kind(p, partial, *memory, np.asarray(x), inputs, expert, row, source, count).run()
    return partial.sum(axis=0)
