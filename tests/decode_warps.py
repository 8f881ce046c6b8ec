"""The operations of ops/kernels/gpu/decode_ops.py on NumPy: a number is an array with an item for each thread.

The programs of decode_warp.py run on them as they are, all programs of a launch at once. What the hardware does is
written again: products and transposed matrices by their layouts in PTX's manual, and copies that arrive late. A read of
shared memory is refused while a copy to it is under way, and where another thread wrote without a barrier since, or one
of the same warp without `meet`; a copy where the warp has read since. Copies have to be of whole lines of 128 bytes by
eight threads, and neither they nor reads may have conflicts of banks.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from dovetail.ops.kernels.gpu.decode_keys import WarpPart, chunks_of
from dovetail.ops.kernels.gpu.decode_warp import attend, skip
from dovetail.ops.kernels.gpu.mosaic.threads import THREADS, WARP, WARPS

KINDS = {"f16": np.float16, "bf16": ml_dtypes.bfloat16, "fp8": ml_dtypes.float8_e4m3fn}

MET = THREADS  # an owner from here on is a warp whose threads have met since they wrote


class Shared:
    """Hold the words of the programs' shared memory."""

    def __init__(self, programs: int, size: int) -> None:
        self.words = np.full((programs, size), 0x7FC0DEAD, np.uint32)
        self.owner = np.full((programs, size), -1)  # thread that wrote since the last barrier; of another warp: _met
        self.reader = np.full((programs, size), -1)  # warp that has read since it met
        self.busy = np.zeros((programs, size), bool)

    def places(self, index, count: int):
        index = np.broadcast_to(index, (len(self.words), THREADS))
        return np.arange(len(self.words))[:, None, None], index[..., None] + np.arange(count)


def without_conflicts(places) -> None:
    """Refuse words [.., count] of threads, 128 bytes of which lie in other banks than those of 32 words."""
    banks = np.sort(places.reshape(-1, 32) % 32, axis=1)
    assert (banks == np.arange(32)).all(), "banks"


class Output:
    """Hold an output, each of whose elements is written at most once."""

    def __init__(self, like) -> None:
        self.values = np.zeros(like.shape, like.dtype).reshape(-1)
        self.times = np.zeros(self.values.size, int)


class Warps:
    """Run the threads of all programs: a number is an array [programs, THREADS]."""

    thread = np.arange(THREADS, dtype=np.int32)[None]

    def __init__(self, programs: int, shared: list[Shared]) -> None:
        self.shape, self.shared = (programs, THREADS), shared
        self.active = np.ones(self.shape, bool)
        self.groups = np.zeros(self.shape, int)  # of copies that each thread has ended
        self.under_way: list[tuple] = []

    def full(self, x, dtype=None):
        return np.broadcast_to(np.asarray(x, dtype), self.shape)

    def constant(self, value):
        return self.full(value, np.float32)

    def select(self, truth, x, y):
        dtype = next(a.dtype for a in (x, y) if isinstance(a, np.ndarray))
        return np.where(truth, x, y).astype(dtype)

    def at_most(self, x, most):
        assert (np.asarray(x) >= 0).all() and (np.asarray(most) >= 0).all()
        return np.minimum(x, most).astype(np.int32)

    def loop(self, begin, end, step, body, carry):
        leaves, tree = jax.tree.flatten(carry)
        index, outer = self.full(begin).copy(), self.active
        while (running := outer & (index < end)).any():
            warps = running.reshape(-1, WARPS, WARP)
            assert (warps.all(-1) == warps.any(-1)).all()
            self.active = running
            found = jax.tree.leaves(body(index, jax.tree.unflatten(tree, leaves)))
            leaves = [self.select(running, new, np.asarray(old)) for new, old in zip(found, leaves, strict=True)]
            index = index + np.where(running, step, 0).astype(np.int32)
        self.active = outer
        return jax.tree.unflatten(tree, leaves)

    # --- pairs --------------------------------------------------------------------------------------------------------

    def halves(self, pair, kind: str):
        """Return two numbers in f32 [.., 2]."""
        pair = np.ascontiguousarray(self.full(pair)).view(np.uint32)
        return np.stack([pair & 0xFFFF, pair >> 16], -1).astype(np.uint16).view(KINDS[kind]).astype(np.float32)

    def unpack(self, word):
        codes = np.ascontiguousarray(word)[..., None].view(np.uint8).view(KINDS["fp8"]).astype(np.float32)
        return [self.pair(codes[..., i], codes[..., i + 1], "f16") for i in (0, 2)]

    def permute(self, x, y, order: int):
        source = np.concatenate([np.ascontiguousarray(a)[..., None].view(np.uint8) for a in (x, y)], -1)
        chosen = [order >> 4 * i & 15 for i in range(4)]
        return np.ascontiguousarray(source[..., chosen]).view(np.int32)[..., 0]

    def pair(self, x, y, kind: str):
        both = np.stack([self.full(x), self.full(y)], -1).astype(KINDS[kind])
        return np.ascontiguousarray(both).view(np.int32)[..., 0]

    def as_f16(self, pair):
        both = self.halves(pair, "bf16")
        return self.pair(both[..., 0], both[..., 1], "f16")

    def as_integer(self, x):
        return np.ascontiguousarray(self.full(x)).view(np.int32)

    def by_lane(self, x):
        return self.full(x).reshape(-1, WARPS, WARP)

    def multiply(self, sums, left, right, kind: str):
        g, t = np.arange(WARP) // 4, np.arange(WARP) % 4
        a = np.zeros((self.shape[0], WARPS, 16, 16), np.float32)
        b = np.zeros((self.shape[0], WARPS, 16, 8), np.float32)
        for i, register in enumerate(left):
            both = self.halves(register, kind).reshape(-1, WARPS, WARP, 2)
            for half in (0, 1):
                a[:, :, g + i % 2 * 8, 2 * t + i // 2 * 8 + half] = both[..., half]
        for i, register in enumerate(right):
            both = self.halves(register, kind).reshape(-1, WARPS, WARP, 2)
            for half in (0, 1):
                b[:, :, 2 * t + i * 8 + half, g] = both[..., half]
        c = a @ b
        found = [c[:, :, g + i // 2 * 8, 2 * t + i % 2].reshape(self.shape) for i in range(4)]
        return [(x + y).astype(np.float32) for x, y in zip(sums, found, strict=True)]

    def transposed(self, pair):
        both = np.ascontiguousarray(self.full(pair)).view(np.uint16).reshape(-1, WARPS, 8, 8)
        return np.ascontiguousarray(both.swapaxes(-1, -2)).view(np.int32).reshape(self.shape)

    # --- f32 ----------------------------------------------------------------------------------------------------------

    def fma(self, x, y, z):
        return (x * y + z).astype(np.float32)

    def maximum(self, x, y):
        return np.fmax(x, y)

    def exp2(self, x):
        return np.exp2(x).astype(np.float32)

    def log2(self, x):
        return np.log2(x).astype(np.float32)

    def inverse(self, x):
        return (1 / x).astype(np.float32)

    def other_lane(self, x, bits: int):
        return self.by_lane(x)[..., np.arange(WARP) ^ bits].reshape(self.shape)

    # --- global memory ------------------------------------------------------------------------------------------------

    def words(self, ref, row, width: int, offset):
        place = self.address(ref, row, width, offset)
        assert (place % 16 == 0).all(), "loads are aligned"
        words = ref.reshape(-1).view(np.int32)
        return [words[place // 4 + i] for i in range(4)]

    def load(self, ref, index):
        if isinstance(ref, Shared):
            return self.floats(ref, index, 1)[0]
        assert (np.asarray(index) >= 0).all()
        return ref.reshape(-1)[self.full(index)]

    # --- shared memory ------------------------------------------------------------------------------------------------

    def address(self, ref, row, width: int, offset):
        return self.full(row).astype(np.int64) * width + offset

    def copy(self, target: Shared, index, ref, source, begin: int, where) -> None:
        place = source + begin
        assert (place % 16 == 0).all(), "copies are aligned"
        lines = (place // 128).reshape(-1, 8)
        assert (lines == lines[:, :1]).all(), "eight threads copy a line of 128 bytes"
        words = ref.reshape(-1).view(np.int32)
        values = words[np.where(where, place, 0)[..., None] // 4 + np.arange(4)] * self.full(where)[..., None]
        columns = np.broadcast_to(target.places(index, 4)[1], values.shape)
        without_conflicts(columns[np.broadcast_to(self.active[..., None], values.shape)])
        self.begin_copy(target, index, values)

    def begin_copy(self, target: Shared, index, values) -> None:
        rows, columns = np.broadcast_arrays(*target.places(index, 4))
        on = np.broadcast_to(self.active[..., None], values.shape)
        assert not target.busy[rows[on], columns[on]].any(), "a copy waits for the one before"
        assert (target.reader[rows[on], columns[on]] == -1).all(), "a copy waits until the warp has met"
        target.busy[rows[on], columns[on]] = True
        target.words[rows[on], columns[on]] = 0xFFFFFFFF
        self.under_way.append((target, rows, columns, values, on.copy(), self.groups.copy()))

    def end_copies(self) -> None:
        self.groups = self.groups + self.active

    def await_copies(self, most: int) -> None:
        for target, rows, columns, values, on, group in self.under_way:
            done = on & (self.active & (group < self.groups - most))[..., None]
            thread = np.broadcast_to(self.thread[..., None], done.shape)
            target.words[rows[done], columns[done]] = values.view(np.uint32)[done]
            target.owner[rows[done], columns[done]] = thread[done]
            target.busy[rows[done], columns[done]] = False
            on[done] = False
        self.under_way = [each for each in self.under_way if each[4].any()]

    def copied(self, ref: Shared, index, count: int):
        rows, columns = np.broadcast_arrays(*ref.places(index, count))
        on = np.broadcast_to(self.active[..., None], rows.shape)
        thread = np.broadcast_to(self.thread[..., None], rows.shape)
        owner = ref.owner[rows, columns]
        assert not ref.busy[rows[on], columns[on]].any()
        assert ((owner == thread) | (owner == MET + thread // WARP))[on].all()
        without_conflicts(columns[on].reshape(-1, count))
        ref.reader[rows[on], columns[on]] = (thread // WARP)[on]
        return [ref.words[rows, columns].view(np.int32)[..., i] for i in range(count)]

    def floats(self, ref, index, count: int):
        if not isinstance(ref, Shared):
            return [self.load(ref, index + i) for i in range(count)]
        rows, columns = np.broadcast_arrays(*ref.places(index, count))
        thread = np.broadcast_to(self.thread[..., None], rows.shape)
        owner = ref.owner[rows, columns]
        assert ((owner == -1) | (owner == thread)).all(), "a barrier comes before"
        return [ref.words[rows, columns].view(np.float32)[..., i] for i in range(count)]

    def store(self, ref, index, value, where=None) -> None:
        self.store_all(ref, index, [value], where)

    def store_all(self, ref, index, values, where=None) -> None:
        where = self.full(True if where is None else where)
        words = np.stack([np.ascontiguousarray(self.full(x)).view(np.uint32) for x in values], -1)
        if isinstance(ref, Output):
            numbers = np.ascontiguousarray(words).view(ref.values.dtype)
            place = self.full(index)[where][:, None] + np.arange(numbers.shape[-1])
            assert (place[:, 0] % numbers.shape[-1] == 0).all() and (place >= 0).all()
            np.add.at(ref.times, place, 1)
            ref.values[place] = numbers[where]
            return
        rows, columns = np.broadcast_arrays(*ref.places(index, len(values)))
        warp = np.broadcast_to(self.thread[..., None] // WARP, rows.shape)
        owner = ref.owner[rows, columns]
        assert not ref.busy[rows, columns].any()
        assert ((owner == -1) | (owner // WARP == warp) | (owner == MET + warp)).all()
        ref.words[rows, columns] = words
        ref.owner[rows, columns] = np.broadcast_to(self.thread[..., None], rows.shape)
        assert (ref.words[rows, columns] == words).all(), "threads of a place store the same number"

    def barrier(self) -> None:
        for each in self.shared:
            assert not each.busy.any()
            each.owner[:] = each.reader[:] = -1

    def meet(self) -> None:
        warps = np.append(self.active[:, ::WARP], np.zeros((len(self.active), 1), bool), axis=1)  # -1: none
        program = np.arange(len(warps))[:, None]
        for each in self.shared:
            own = (each.owner >= 0) & (each.owner < MET)
            own &= warps[program, np.where(own, each.owner // WARP, -1)]
            each.owner[own] = MET + each.owner[own] // WARP
            each.reader[warps[program, each.reader]] = -1


def call_warps(tiles, tables, q, pages, sinks, *, shape):
    """Do what decode._call_warps does."""
    K, tiles = shape.kv_heads, np.asarray(tiles)
    tile, head, split = (x.reshape(-1) for x in np.mgrid[: len(tiles), :K, : shape.splits])
    out = Output(jax.ShapeDtypeStruct((shape.splits, *q.shape) if shape.splits > 1 else q.shape,
                                      np.float32 if shape.splits > 1 else q.dtype))  # fmt: skip
    lse = Output(jax.ShapeDtypeStruct((shape.splits, *q.shape[:2]), np.float32))
    given = [np.asarray(x) for x in (tables, q.view(jnp.uint16), pages.view(jnp.uint8))]
    given.append(None if sinks is None else np.asarray(sinks))
    begin, end = (np.asarray(x) for x in chunks_of(tiles[tile, 3], tiles[tile, 2], split, shape))
    part = WarpPart(*(x.astype(np.int32)[:, None] for x in (head, *tiles[tile].T, split, begin, end)))
    some, none = (
        WarpPart(*(x[chosen] for x in part)) for chosen in (begin < end, (begin >= end) & (tiles[tile, 2] > 0))
    )
    count = len(some.head)
    held, stats = Shared(count, WARPS * shape.warp_words), Shared(count, 2 * WARPS * shape.columns)
    with np.errstate(invalid="ignore", over="ignore"):
        attend(Warps(count, [held, stats]), some, [*given, out, lse, held, stats], shape)
    skip(Warps(len(none.head), []), none, lse, shape)
    assert lse.times.max() <= 1
    assert out.times.max() == 1
    whole = (shape.splits, *q.shape) if shape.splits > 1 else q.shape
    return jnp.asarray(out.values.reshape(whole)), jnp.asarray(lse.values.reshape(shape.splits, *q.shape[:2]))


def launch(name, program, given, out, programs, on=None):
    """Do what threads.launch does, without shared memory."""
    outputs = [Output(x) for x in out]
    number = np.arange(programs, dtype=np.int32)[:, None]
    program(Warps(programs, []), number, *(np.asarray(x) for x in given), *outputs)
    assert all((x.times == 1).all() for x in outputs)
    return [jnp.asarray(x.values.reshape(like.shape)) for x, like in zip(outputs, out, strict=True)]
