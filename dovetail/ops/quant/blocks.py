"""Unpack the blocks of GGUF files (llama.cpp's ggml-common.h and ggml-quants.c).

A block of 32 or 256 values has its scales and its codes side by side; a row is one block after another. B blocks.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from dovetail.core.formats import BLOCKS


def unpack_blocks(name: str, rows: jax.Array) -> jax.Array:
    """Return the values [..., size] in f32 of rows of bytes [..., n]."""
    blocks = rows.reshape(*rows.shape[:-1], -1, BLOCKS[name][1])
    values = {"k": _super_block, "0": _small_block, "1": _small_block}[name[-1]](name, blocks)
    return values.reshape(*rows.shape[:-1], -1)


def _small_block(name: str, blocks: jax.Array) -> jax.Array:
    """Return d (q - offset), or d q + m, of blocks of 32 values [..., B, bytes]."""
    scale, rest = _half(blocks[..., :2]), blocks[..., 2:]
    if name == "q8_0":
        return scale * jax.lax.bitcast_convert_type(rest, jnp.int8).astype(jnp.float32)
    least, rest = (_half(rest[..., :2]), rest[..., 2:]) if name[-1] == "1" else (None, rest)
    fifth = 0
    if name.startswith("q5"):
        bits = rest[..., :4, None] >> jnp.arange(8, dtype=jnp.uint8) & 1
        fifth, rest = bits.reshape(*rest.shape[:-1], 32) << 4, rest[..., 4:]
    codes = (jnp.concatenate([rest & 15, rest >> 4], axis=-1) | fifth).astype(jnp.float32)
    return scale * codes + least if least is not None else scale * (codes - (16 if name.startswith("q5") else 8))


def _super_block(name: str, blocks: jax.Array) -> jax.Array:
    return _q6_k(blocks) if name == "q6_k" else _q4_or_q5_k(name, blocks)


def _q4_or_q5_k(name: str, blocks: jax.Array) -> jax.Array:
    """Return d scale q - dmin min, with 8 sub-blocks of 32 values."""
    scale, least = _half(blocks[..., :2]), _half(blocks[..., 2:4])
    scales, leasts = _six_bits(blocks[..., 4:16])
    rest, fifth = blocks[..., 16:], 0
    if name == "q5_k":  # bit s of byte l is the fifth of value l of sub-block s
        fifth = (rest[..., None, :32] >> jnp.arange(8, dtype=jnp.uint8)[:, None] & 1) << 4
        rest = rest[..., 32:]
    pairs = rest.reshape(*rest.shape[:-1], 4, 1, 32)  # of sub-blocks, the first in the lower halves
    codes = jnp.concatenate([pairs & 15, pairs >> 4], axis=-2).reshape(*rest.shape[:-1], 8, 32) | fifth
    return (scale * scales)[..., None] * codes.astype(jnp.float32) - (least * leasts)[..., None]


def _six_bits(packed: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the scales and the minima [..., 8] of 12 bytes; the last four have two bits in the first eight bytes."""
    low, high, last = (packed[..., at : at + 4] for at in (0, 4, 8))
    scales = jnp.concatenate([low & 63, last & 15 | low >> 6 << 4], axis=-1)
    leasts = jnp.concatenate([high & 63, last >> 4 | high >> 6 << 4], axis=-1)
    return scales.astype(jnp.float32), leasts.astype(jnp.float32)


def _q6_k(blocks: jax.Array) -> jax.Array:
    """Return d scale (q - 32), with a scale for each 16 values; codes come in two halves of four quarters of 32."""
    lower = blocks[..., :128].reshape(*blocks.shape[:-1], 2, 2, 32)
    upper = blocks[..., 128:192].reshape(*blocks.shape[:-1], 2, 1, 32)
    scales = jax.lax.bitcast_convert_type(blocks[..., 192:208], jnp.int8).astype(jnp.float32)
    fours = jnp.concatenate([lower & 15, lower >> 4], axis=-2)
    twos = upper >> (2 * jnp.arange(4, dtype=jnp.uint8))[:, None] & 3
    codes = (fours | twos << 4).astype(jnp.float32).reshape(*blocks.shape[:-1], 16, 16) - 32
    return ((_half(blocks[..., 208:]) * scales)[..., None] * codes).reshape(*blocks.shape[:-1], 256)


def _half(two: jax.Array) -> jax.Array:
    """Return the f16 number of two bytes [..., 2] in f32, [..., 1]."""
    return jax.lax.bitcast_convert_type(two, jnp.float16).astype(jnp.float32)[..., None]
