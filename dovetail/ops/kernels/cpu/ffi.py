"""Register numba functions as XLA calls.

They find their arrays in XLA's call frame (xla/ffi/api/c_api.h) themselves, so that no Python runs, no lock is taken,
and programs with such calls can be kept compiled.

The frame is read as 64-bit words: [1] extensions, [9] the pointers to the arguments, [14] those to the results. Of a
buffer, [3] is its data, [4] its rank and [5] its dims.
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

_BUFFER = types.int64[::1]
_OF_FRAME = [_BUFFER(frame, types.int64) for frame in (types.CPointer(types.int64), _BUFFER)]
FRAME = types.int64(types.CPointer(types.int64))  # a handler's signature; what it returns is an error, 0 for none


@functools.cache
def register(name: str, function: Any) -> None:
    """Register a cfunc of that signature with XLA."""
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    jax.ffi.register_ffi_target(name, new(function.address, None, None), platform="cpu")


@intrinsic
def _as_pointer(context: Any, address: Any) -> Any:
    def generate(_context, builder, _signature, args):
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(address), generate


pointer: Any = _as_pointer  # called without the context


# The signatures are given: numba would compile each function again for every constant that it is called with.


@njit(_BUFFER(types.int64, types.int64), cache=True)
def words(address, count):
    """Return `count` words at an address as an array."""
    return carray(pointer(address), count, np.int64)


@njit(_OF_FRAME, cache=True)
def argument(frame, i):
    """Return the i-th argument's buffer."""
    return words(words(frame[9], i + 1)[i], 6)


@njit(_OF_FRAME, cache=True)
def result(frame, i):
    """Return the i-th result's buffer."""
    return words(words(frame[14], i + 1)[i], 6)


@njit(types.voidptr(_BUFFER), cache=True)
def data(buffer):
    """Return the address of a buffer's data."""
    return pointer(buffer[3])


@njit(_BUFFER(_BUFFER), cache=True)
def dims(buffer):
    """Return the dims of a buffer."""
    return words(buffer[5], buffer[4])


@njit
def is_question(frame):
    """Return whether XLA only asks for the version (an extension of kind 1), and answer it."""
    if frame[1] == 0 or words(frame[1], 2)[1] & 0xFFFFFFFF != 1:
        return False
    metadata = words(words(frame[1], 4)[3], 5)
    metadata[3] = 1 << 32  # 0.1: two ints
    return True
