"""The operations of ops/kernels/gpu/mosaic/row_ops.py on NumPy: a number is an array with an item for each thread.

Programs run one after the other. A read of shared memory is refused where another thread wrote without a barrier since,
and a write where another thread read or wrote another value; a branch or a loop in which threads part is refused.
"""

from __future__ import annotations

import itertools

import jax
import ml_dtypes
import numpy as np

from dovetail.ops.kernels.gpu.mosaic import adjust
from dovetail.ops.kernels.gpu.mosaic.row_ops import THREADS
from dovetail.ops.kernels.gpu.mosaic.threads import WARP


class Shared:
    """Hold a program's shared memory."""

    def __init__(self, size: int, dtype=np.int32) -> None:
        self.values = np.random.default_rng(0).integers(-(2**31), 2**31, size).astype(dtype)
        self.barrier()

    def barrier(self) -> None:
        self.writer, self.reader = (np.full(self.values.shape, -1) for _ in range(2))  # -2: several threads

    def load(self, at):
        thread = np.arange(len(at))
        assert ((self.writer[at] == -1) | (self.writer[at] == thread)).all()
        self.reader[at] = np.where((self.reader[at] == -1) | (self.reader[at] == thread), thread, -2)
        return self.values[at]

    def store(self, at, value, where) -> None:
        at, value, thread = at[where], value[where], np.flatnonzero(where)
        assert ((self.reader[at] == -1) | (self.reader[at] == thread)).all()
        assert ((self.writer[at] == -1) | (self.writer[at] == thread)).all()
        self.values[at], self.writer[at] = value, thread
        assert (self.values[at] == value).all()  # of several threads: alike
        self.writer[at] = np.where(self.writer[at] == thread, thread, -2)


class Rows:
    """Run the threads of a program."""

    def __init__(self, shared: list[Shared], threads: int = THREADS) -> None:
        self.shared, self.thread = shared, np.arange(threads, dtype=np.int32)

    def full(self, x, dtype=None):
        return np.broadcast_to(np.asarray(x, dtype), self.thread.shape)

    def constant(self, value):
        return self.full(value, np.float32)

    def integer(self, value):
        return self.full(value, np.int32)

    def number(self, x):
        return self.full(x).astype(np.float32)

    def one(self, x):
        x = self.full(x)
        assert (x == x[0]).all()
        return x[0]

    # --- numbers ------------------------------------------------------------------------------------------------------

    def select(self, truth, x, y):
        dtype = next(a.dtype for a in (x, y) if isinstance(a, np.ndarray))
        return np.where(truth, x, y).astype(dtype)

    def at_most(self, x, most):
        return np.minimum(self.full(x).astype(np.uint32), np.uint32(most)).astype(np.int32)

    def lesser(self, x, y):
        return np.minimum(x, y)

    def maximum(self, x, y):
        return np.fmax(x, y)

    def exp2(self, x):
        return np.where(x < -126, 0, np.exp2(x)).astype(np.float32)

    def log2(self, x):
        return np.log2(x).astype(np.float32)

    def log(self, x):
        return np.log(x).astype(np.float32)

    def rsqrt(self, x):
        return (1 / np.sqrt(x)).astype(np.float32)

    def split(self, word):
        return self.as_float(word << 16), self.as_float(word & np.int32(-65536))

    def pair(self, x, y, kind):
        assert kind == "bf16"
        both = np.stack([self.full(x), self.full(y)], -1).astype(ml_dtypes.bfloat16)
        return np.ascontiguousarray(both).view(np.int32)[..., 0]

    def as_integer(self, x):
        return np.ascontiguousarray(self.full(x, np.float32)).view(np.int32)

    def as_float(self, x):
        return np.ascontiguousarray(self.full(x, np.int32)).view(np.float32)

    # --- exchanges ----------------------------------------------------------------------------------------------------

    def by_warp(self, reduce, x):
        return np.repeat(reduce(self.full(x).reshape(-1, WARP), axis=-1), WARP).astype(np.int32)

    def total(self, x):
        return self.by_warp(np.sum, x)

    def greatest(self, x):
        return self.by_warp(np.max, x)

    def below(self, x):
        warps = self.full(x).reshape(-1, WARP)
        return (warps.cumsum(axis=-1) - warps).reshape(-1).astype(np.int32)

    def other_lane(self, x, bits):
        return self.full(x)[self.thread ^ bits]

    def barrier(self):
        for each in self.shared:
            each.barrier()

    # --- memory -------------------------------------------------------------------------------------------------------

    def load(self, ref, index):
        at = self.full(index)
        return ref.load(at) if isinstance(ref, Shared) else ref[at]

    def floats(self, ref, index, count):
        assert (index >= 0).all() and (index % count == 0).all()
        return [ref[index + i] for i in range(count)]

    def words(self, ref, row, width, offset, count):
        assert (self.full(offset) % (4 * count) == 0).all()
        first = (self.full(row).astype(np.int64) * width + offset) // 4
        return [ref.view(np.int32)[first + i] for i in range(count)]

    def load_where(self, ref, row, width, column, where, otherwise):
        where, at = self.full(where), self.full(row).astype(np.int64) * width + column
        return self.select(where, ref[np.where(where, at, 0)].astype(otherwise.dtype), otherwise)

    def store_where(self, ref, row, width, column, x, where):
        self.store(ref, self.full(row).astype(np.int64) * width + column, x, where)

    def put(self, ref, row, width, offset, words, where):
        first = (self.full(row).astype(np.int64) * width + offset) // 4
        for i, x in enumerate(words):
            self.store(ref.view(np.int32), first + i, x, where)

    def store_all(self, ref, index, values, where=None):
        per = 4 // ref.itemsize
        for i, x in enumerate(values):
            self.store(ref.view(np.int32), self.full(index) // per + i, x, where)

    def store(self, ref, index, value, where=None):
        where, at, value = self.full(True if where is None else where), self.full(index), self.full(value)
        if isinstance(ref, Shared):
            return ref.store(at, value, where)
        assert (at[where] >= 0).all()
        ref[at[where]] = value[where]
        assert (ref[at[where]] == value[where]).all() or np.isnan(value[where]).any()
        return None

    # --- branches -----------------------------------------------------------------------------------------------------

    def branch(self, truth, body, carry):
        return body(carry) if self.one(truth) else carry

    def loop(self, begin, end, step, body, carry):
        for i in range(self.one(begin), self.one(end), step):
            carry = body(self.integer(i), carry)
        return carry

    def repeat(self, goes_on, body, carry):
        while self.one(goes_on(carry)):
            carry = body(carry)
        return carry


def simulated_adjust(logits: jax.Array, inputs, history: jax.Array) -> jax.Array:
    """Do what adjust.adjust does, in a function that is traced."""

    def run(*given):
        *refs, held = (np.array(x).reshape(-1) for x in given)
        for row, program in itertools.product(range(len(logits)), range(sizes.programs)):
            memory = Shared(adjust.PART, np.float32)
            on = Rows([memory], adjust.THREADS)
            with np.errstate(all="ignore"):
                adjust.change(on, on.integer(row), on.integer(program), *refs, held, memory, sizes=sizes)
        return held.reshape(logits.shape)

    given = adjust.given_of(inputs, history)
    sizes = adjust.sizes_of(logits, inputs, history)
    return jax.pure_callback(run, jax.ShapeDtypeStruct(logits.shape, logits.dtype), *given, logits)


def simulate(name, program, given, out, programs, shared, on, warpgroups) -> list[np.ndarray]:
    """Do what threads.launch does."""
    given = [np.asarray(x).reshape(-1) for x in given]
    outputs = [np.zeros(int(np.prod(x.shape)), x.dtype) for x in out]
    for number in range(programs):
        memory = [Shared(size) for size in shared]
        with np.errstate(all="ignore"):
            program(Rows(memory), np.full(THREADS, number, np.int32), *given, *outputs, *memory)
    return [x.reshape(like.shape) for x, like in zip(outputs, out, strict=True)]


def simulated_launch(name, program, given, out, programs, shared, on, warpgroups) -> list[jax.Array]:
    """Do what threads.launch does, in a function that is traced."""

    def run(*given):
        return simulate(name, program, given, out, programs, shared, on, warpgroups)

    return jax.pure_callback(run, out, *given)
