"""Numba functions as XLA calls: they find their arrays in XLA's call frame (xla/ffi/api/c_api.h) by themselves, so that
no Python runs, no lock is taken, and programs with such calls can be kept compiled.

The frame is read as 64-bit words: [1] extensions, [9] where the pointers to the arguments are, [14] those to the
results. Of a buffer, [3] is its data, [4] its rank and [5] where its dims are.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import jax
import numpy as np
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.numpy_support import carray

FRAME = types.int64(types.CPointer(types.int64))  # a handler's signature; what it returns is an error, 0 for none


@functools.cache
def register(name: str, function: Any) -> None:
    """Make a cfunc of that signature known to XLA."""
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    jax.ffi.register_ffi_target(name, new(function.address, None, None), platform="cpu")


@intrinsic
def _as_pointer(context: Any, address: Any) -> Any:
    def generate(_context, builder, _signature, args):
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(address), generate


pointer: Any = _as_pointer  # called without the context


@njit
def words(address, count):
    return carray(pointer(address), count, np.int64)


@njit
def argument(frame, i):
    return words(words(frame[9], i + 1)[i], 6)


@njit
def result(frame, i):
    return words(words(frame[14], i + 1)[i], 6)


@njit
def data(buffer):
    return pointer(buffer[3])


@njit
def dims(buffer):
    return words(buffer[5], buffer[4])


@njit
def is_question(frame):
    """Whether XLA only asks for the version (an extension of kind 1); then it is answered."""
    if frame[1] == 0 or words(frame[1], 2)[1] & 0xFFFFFFFF != 1:
        return False
    metadata = words(words(frame[1], 4)[3], 5)
    metadata[3] = 1 << 32  # 0.1: two ints
    return True
