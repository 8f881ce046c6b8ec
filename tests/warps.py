"""Run the warps of ops/kernels/gpu/packed_warp.py on numpy: a register is an array with an item for each thread.

The kernel writes one operation for each register; here the operations compute instead. So its addresses, its order of
values and its scales are those of the card; only what the hardware does (mma, loads, moves of halves) is written again.
"""

from __future__ import annotations

import contextlib
import types

import jax.numpy as jnp
import numpy as np

from dovetail.ops.kernels.gpu import (
    packed_integer,
    packed_persistent,
    packed_shared,
    packed_turns,
    packed_warp,
    warp_ops,
)
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


class Copies:
    """Copy to shared memory when a thread waits for it, as late as it may happen."""

    def __init__(self):
        self.groups, self.open = [], []

    def copy_later(self, ref, place, first, pointer, begin, count, when=None):
        data, source = pointer
        when = np.broadcast_to(True if when is None else when, np.shape(place))
        source, place = (np.broadcast_to(x, when.shape)[when] for x in (source + begin, place + first))
        assert not np.any(source % count) and not np.any(place % count), "copies are aligned"
        assert np.all(source + count <= data.nbytes), "copies are inside of the array"
        assert np.all(place + count <= ref.nbytes), "copies are inside of shared memory"
        self.open.append((ref, place, data.reshape(-1).view(np.uint8), source, count))

    def commit(self):
        self.groups.append(self.open)
        self.open = []

    def wait_for_copies(self, left):
        count = max(0, len(self.groups) - left)
        done, self.groups = self.groups[:count], self.groups[count:]
        for ref, place, data, source, count in (copy for group in done for copy in group):
            for i in range(count):
                ref.view(np.uint8)[place + i] = data[source + i]


def _load_shared(ref, place, first, count):
    assert not np.any((place + first) % (4 * count)), "loads are aligned"
    return [ref[(place + first) // 4 + i] for i in range(count)]


def _store_shared(ref, place, words):
    for i, word in enumerate(words):
        ref[place // 4 + i] = word


def _element(array, place):
    return array.reshape(-1).view(array.dtype)[place // array.itemsize]


def _ballot(condition):
    bits = np.asarray(condition).reshape(-1, 32).astype(np.uint64) << np.arange(32, dtype=np.uint64)
    return np.repeat(bits.sum(axis=1).astype(np.int64), 32)


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


class PersistentWarps(packed_persistent.PersistentWarp):
    """Run a persistent program's warps."""

    def steps(self, one, totals):
        for step in range(self.p.steps):
            totals = one(step, totals)
        return totals


def _stand_ins(p) -> dict:
    """Return what computes instead of the operations of the kernel, by name."""
    kinds, copies = types.SimpleNamespace(get=lambda *_: None), Copies()

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
        # of persistent programs
        "copy_later": copies.copy_later, "commit": copies.commit, "wait_for_copies": copies.wait_for_copies,
        "load_shared": _load_shared, "store_shared": _store_shared, "bytes_of": lambda ref: ref.itemsize,
        "load_shared_number": lambda ref, place, first, like: _element(ref.view(like.dtype), place + first),
        "load_now": lambda pointer, first, _count: _element(pointer[0], pointer[1] + first),
        "number": lambda word, _ref: word, "ballot": _ballot,
        "count_ones": lambda x: np.bitwise_count(x).astype(np.int64),
        "repeat": lambda count, run: [run(i) for i in range(int(count))],
    }  # fmt: skip


@contextlib.contextmanager
def on_numpy(monkeypatch, p):
    """Let the operations of a program of plan `p` compute."""
    stand_ins = _stand_ins(p)
    with monkeypatch.context() as patch:
        for module in (packed_warp, packed_integer, packed_persistent, packed_shared, warp_ops):
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


def sums_in_turn(monkeypatch, p, x, inputs, expert: int, rows: list[int], source: int, count: int) -> np.ndarray:
    """Return the sums [block, weight, token, row] of a persistent program that computes the blocks at these rows."""
    rng = np.random.default_rng(0)  # what was in shared memory before
    words = [rng.integers(0, 1 << 32, n, np.uint32) for n in packed_turns.sizes(p)[:-1]]
    partial = np.full((2, p.warps, p.names, FEW, p.rows), np.nan, np.float32)
    found = []
    with on_numpy(monkeypatch, p):
        tokens, ring, scales = words
        memory = packed_persistent.FewMemory(tokens, ring, scales, partial)
        warp = PersistentWarps(p, memory, np.asarray(x), inputs, expert, source, count)
        warp.begin(rows[0])
        for turn, row in enumerate(rows):
            is_last = turn + 1 == len(rows)
            warp.block(row, rows[-1] + p.rows if is_last else rows[turn + 1], not is_last, turn)
            found.append(partial[turn % 2].sum(axis=0))
    return np.stack(found)


def shares(monkeypatch, p, table: np.ndarray, programs: int) -> list[tuple[int, ...]]:
    """Return the tile of each program, which of its programs this is, and how many it has."""
    with on_numpy(monkeypatch, p):
        found = [packed_shared.share(table, table.shape[1], programs, i) for i in range(programs)]
    return [tuple(int(np.ravel(x)[0]) for x in each) for each in found]
