"""Run a loop over chunks on XLA's own threads, from a numba function that XLA has called (see ffi).

The caller makes a job, lets XLA's pool call a task with it once per other thread, and works on it too: each takes the
next chunk until there is none. The pool may run a task late, or after the caller has finished. So the caller does not
wait for tasks to begin, only for chunks that were taken, and the last one that may read the job frees it.

A job is 64-bit words: [0] the next chunk, [1] chunks done, [2] how many may read it, [3] chunks; then the caller's. The
pool is reached through XLA's table of functions (xla/ffi/api/c_api.h), which only grows at its end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from dovetail.ops.kernels.cpu.ffi import words

OWN = 4  # the first of a job's words that are its caller's
TASK = types.int64(types.CPointer(types.int64))  # a task's signature
SCHEDULE, NUM_THREADS = 17, 18  # places in XLA's table
_INT, _POINTER = ir.IntType(64), cgutils.voidptr_t


def task_symbol(name: str, function: Any) -> Callable:
    """Return a numba function that returns the address of a compiled task."""
    return symbol(name, function.address)


def symbol(name: str, value: int) -> Callable:
    """Return a numba function that returns this address: by name, so that its callers can be kept compiled."""
    llvm.add_symbol(name, value)

    @intrinsic
    def address(context: Any) -> Any:
        def generate(_context, builder, _signature, _args):
            kind = ir.FunctionType(_INT, [_POINTER])
            return builder.ptrtoint(cgutils.get_or_insert_function(builder.module, kind, name), _INT)

        return types.int64(), generate

    return address


def _external(name: str, result: ir.Type, *arguments: ir.Type) -> Callable:
    """Return a call of a C library's function."""

    def call(builder: Any, args: Any) -> Any:
        kind = ir.FunctionType(result, arguments)
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)

    return call


_malloc_of, _free_of, _yield_of = (
    _external("malloc", _POINTER, _INT), _external("free", ir.VoidType(), _POINTER),
    _external("sched_yield", ir.IntType(32)),
)  # fmt: skip


@intrinsic
def _malloc(context: Any, size: Any) -> Any:
    def generate(_context, builder, _signature, args):
        return builder.ptrtoint(_malloc_of(builder, args), _INT)

    return types.int64(types.int64), generate


@intrinsic
def _free(context: Any, address: Any) -> Any:
    def generate(_context, builder, _signature, args):
        _free_of(builder, [builder.inttoptr(args[0], _POINTER)])
        return _INT(0)

    return types.int64(types.int64), generate


@intrinsic
def _let_others_run(context: Any) -> Any:
    def generate(_context, builder, _signature, _args):
        return builder.sext(_yield_of(builder, []), _INT)

    return types.int64(), generate


@intrinsic
def _add(context: Any, address: Any, value: Any) -> Any:
    """Add atomically and return the previous value."""

    def generate(_context, builder, _signature, args):
        return builder.atomic_rmw("add", builder.inttoptr(args[0], _INT.as_pointer()), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def _call(context: Any, function: Any, argument: Any) -> Any:
    """Call function(argument), both given by address."""

    def generate(_context, builder, _signature, args):
        kind = ir.FunctionType(_INT, [_POINTER]).as_pointer()
        return builder.call(builder.inttoptr(args[0], kind), [builder.inttoptr(args[1], _POINTER)])

    return types.int64(types.int64, types.int64), generate


@intrinsic
def _call_many(context: Any, function: Any, arguments: Any) -> Any:
    """Call a function of integers, given by address, with a tuple of them."""

    def generate(_context, builder, _signature, args):
        count = len(arguments)
        kind = ir.FunctionType(_INT, [_INT] * count).as_pointer()
        values = cgutils.unpack_tuple(builder, args[1], count)
        return builder.call(builder.inttoptr(args[0], kind), values)

    return types.int64(types.int64, types.UniTuple(types.int64, len(arguments))), generate


@intrinsic
def _address_of(context: Any, pointer: Any) -> Any:
    def generate(_context, builder, _signature, args):
        return builder.ptrtoint(args[0], _INT)

    return types.int64(pointer), generate


# They are called without the context.
add: Any = _add
call: Any = _call
call_many: Any = _call_many
malloc: Any = _malloc
free: Any = _free
let_others_run: Any = _let_others_run
address_of: Any = _address_of


@njit(cache=True)
def new_job(chunks, own):
    """Return the address of a new job; its caller fills in `own` words from OWN on."""
    job = malloc(8 * (OWN + own))
    table = words(job, OWN)
    table[0], table[1], table[2], table[3] = 0, 0, 1, chunks
    return job


@njit(cache=True)
def take(job):
    """Return the next chunk, or -1."""
    i = add(job, 1)
    return i if i < words(job, OWN)[3] else -1


@njit(cache=True)
def finish(job):
    """Mark a taken chunk as done."""
    add(job + 8, 1)


@njit(cache=True)
def release(job):
    """Free the job if no one else may read it."""
    if add(job + 16, -1) == 1:
        free(job)


@njit(cache=True)
def invite(frame, job, task):
    """Have XLA's other threads call task(job)."""
    api, arguments, threads = words(frame[2], NUM_THREADS + 1), np.empty(5, np.int64), np.ones(1, np.int64)
    arguments[0], arguments[1], arguments[2], arguments[3] = 32, 0, frame[3], threads.ctypes.data
    call(api[NUM_THREADS], arguments.ctypes.data)
    helpers = min(threads[0], words(job, OWN)[3]) - 1
    add(job + 16, max(0, helpers))
    arguments[0], arguments[3], arguments[4] = 40, task, job
    for _ in range(helpers):
        if call(api[SCHEDULE], arguments.ctypes.data) != 0:  # no pool: the caller does it all
            release(job)


@njit(cache=True)
def await_chunks(job):
    """Wait, after the last chunk was taken, until those of other threads are done."""
    chunks = words(job, OWN)[3]
    while add(job + 8, 0) < chunks:
        let_others_run()


@njit(cache=True)
def run_job(frame, job, task):
    """Work on a job with XLA's other threads, until it is done.

    The caller's own part is a call of the task by its address: LLVM would compile the task once more in each caller.
    """
    invite(frame, job, task)
    add(job + 16, 1)  # the task releases the job once
    call(task, job)
    await_chunks(job)
    release(job)
