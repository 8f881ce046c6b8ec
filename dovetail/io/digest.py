"""An array's bits as one number, taken on the device: the same however the array is laid out over a mesh.

A checkpoint carries the digest of each array as it was before it left the device; the digest of what was read back is
compared with it. So a bit that flips in a file, on the wire or in the host's memory is noticed, and no file is read
twice.
"""

import math

import jax
import jax.numpy as jnp

_UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


def words(x: jax.Array) -> jax.Array:
    """The bit patterns of x's elements as uint32; elements of 8 bytes give a last dim of 2."""
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    width = _UNSIGNED.get(x.dtype.itemsize, jnp.uint32)
    return jax.lax.bitcast_convert_type(x, width).astype(jnp.uint32)


@jax.jit
def digest(x: jax.Array) -> jax.Array:
    """[] uint32: the sum, modulo 2**32, of every word times an odd number made from its place.

    An odd factor has an inverse, so that a change of one word always shows; the place in the factor shows words that
    changed places. Other damage goes unseen once in 2**32 times.
    """
    bits = words(x)
    place = jnp.zeros(bits.shape, jnp.uint32)
    for dim in range(bits.ndim):  # a sum of iotas, and not a reshape of one: it needs no data from other devices
        stride = math.prod(bits.shape[dim + 1 :]) % 2**32
        place += jax.lax.broadcasted_iota(jnp.uint32, bits.shape, dim) * jnp.uint32(stride)
    place = (place ^ (place >> 16)) * jnp.uint32(0x7FEB352D)
    place = (place ^ (place >> 15)) * jnp.uint32(0x846CA68B)
    return jnp.sum(bits * ((place ^ (place >> 16)) | 1), dtype=jnp.uint32)
