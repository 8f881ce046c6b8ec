"""Unpack the arrays of a quantised weight (core.formats), the definition of each format.

s is the scale of a group of values along a row, q a code:

| format | value |
|---|---|
| int8, w8a8, fp8 | s q, q an int8 or an e4m3 number |
| int4 | s (q - 8), two codes per byte, the first in the lower half |
| uint4 | s (q - zero), likewise |
| nf4 | s VALUES[q], the first code in the upper half (bitsandbytes' order) |
| mxfp4 | 2^(s - 127) e2m1[q], the first code in the lower half |
| nvfp4 | global s e2m1[q], likewise |

GGUF's blocks are in ops.quant.blocks.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from dovetail.core.formats import BLOCKS, Format
from dovetail.ops.quant.blocks import unpack_blocks

# the values as appendix E of arXiv 2305.14314 lists them
NF4_VALUES = np.asarray([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
], np.float32)  # fmt: skip
E2M1_VALUES = np.asarray([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def unpack(form: Format, arrays: Mapping[str, jax.Array]) -> jax.Array:
    """Return the rows [*out, size] in f32."""
    if form.name in BLOCKS:
        return unpack_blocks(form.name, arrays["blocks"])
    codes, scale = arrays["codes"], arrays["scale"]
    if form.name in ("int8", "w8a8", "fp8"):
        values = codes.astype(jnp.float32)
    elif form.name in ("int4", "uint4"):
        values = halves(codes).astype(jnp.float32)
        values = values - (8 if form.name == "int4" else _spread(form, arrays["zero"], values.shape[-1]))
    else:
        table = NF4_VALUES if form.name == "nf4" else E2M1_VALUES
        values = jnp.asarray(table)[halves(codes, upper_first=form.name == "nf4").astype(jnp.int32)]
    scale = power_of_two(scale) if form.name == "mxfp4" else scale.astype(jnp.float32)
    scale = scale * arrays["global"] if form.name == "nvfp4" else scale
    return values * _spread(form, scale, values.shape[-1])


def halves(codes: jax.Array, upper_first: bool = False) -> jax.Array:
    """Return the two 4-bit codes of each byte: [..., n] -> [..., 2 n]."""
    both = (codes >> 4, codes & 15) if upper_first else (codes & 15, codes >> 4)
    return jnp.stack(both, axis=-1).reshape(*codes.shape[:-1], -1)


def power_of_two(exponent: jax.Array) -> jax.Array:
    """Return 2^(exponent - 127) of e8m0 numbers in f32, exactly."""
    bits = exponent.astype(jnp.int32) << 23
    return jax.lax.bitcast_convert_type(jnp.where(exponent == 0, 1 << 22, bits), jnp.float32)


def _spread(form: Format, groups: jax.Array, size: int) -> jax.Array:
    """Return the value of its group for each of `size` values; one for all where the row is the group."""
    groups = groups.astype(jnp.float32)
    return jnp.repeat(groups, form.group, axis=-1)[..., :size] if form.group else groups
