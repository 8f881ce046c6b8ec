"""Round rows of a weight to a storage format (core.formats.ROUNDED)."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from dovetail.core.formats import Format
from dovetail.ops.quant.unpack import E2M1_VALUES, NF4_VALUES

FP8_MOST = 448.0  # the greatest e4m3 number
_NF4_BOUNDS = (NF4_VALUES[1:] + NF4_VALUES[:-1]) / 2  # from here on the next value is the nearer one
_E2M1_BOUNDS = (E2M1_VALUES[1:8] + E2M1_VALUES[:7]) / 2


def pack(form: Format, rows: jax.Array) -> dict[str, jax.Array]:
    """Return the arrays of rows [*out, size]."""
    rows = rows.astype(jnp.float32)
    size, group = rows.shape[-1], form.group or rows.shape[-1]
    padded = jnp.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(0, -size % group)])
    groups = padded.reshape(*rows.shape[:-1], -1, group)
    arrays = PACKERS[form.name](form, groups)
    codes = arrays.pop("codes").reshape(padded.shape)[..., :size]
    if form.name in ("int4", "uint4", "nf4", "mxfp4"):
        codes = _pairs(codes.astype(jnp.uint8), upper_first=form.name == "nf4")
    return {"codes": codes} | arrays


def _int8(form: Format, groups: jax.Array) -> dict[str, jax.Array]:
    scale = (_greatest(groups) / 127).astype(form.scale)
    return {"codes": jnp.round(_shares(groups, scale)).astype(jnp.int8), "scale": scale}


def _fp8(form: Format, groups: jax.Array) -> dict[str, jax.Array]:
    scale = (_greatest(groups) / FP8_MOST).astype(form.scale)
    shares = jnp.clip(_shares(groups, scale), -FP8_MOST, FP8_MOST)
    return {"codes": shares.astype(jnp.float8_e4m3fn), "scale": scale}


def _int4(form: Format, groups: jax.Array) -> dict[str, jax.Array]:
    scale = (_greatest(groups) / 7.5).astype(form.scale)
    return {"codes": jnp.clip(jnp.round(_shares(groups, scale)), -8, 7) + 8, "scale": scale}


def _uint4(form: Format, groups: jax.Array) -> dict[str, jax.Array]:
    least, most = (jnp.minimum(jnp.min(groups, -1), 0), jnp.maximum(jnp.max(groups, -1), 0))
    scale = ((most - least) / 15).astype(form.scale)
    zero = jnp.clip(jnp.round(-_shares(least[..., None], scale)[..., 0]), 0, 15)
    codes = jnp.clip(jnp.round(_shares(groups, scale)) + zero[..., None], 0, 15)
    return {"codes": codes, "scale": scale, "zero": zero.astype(jnp.uint8)}


def _nf4(form: Format, groups: jax.Array) -> dict[str, jax.Array]:
    scale = _greatest(groups).astype(form.scale)
    return {"codes": jnp.searchsorted(jnp.asarray(_NF4_BOUNDS), _shares(groups, scale), side="left"), "scale": scale}


def _mxfp4(form: Format, groups: jax.Array) -> dict[str, jax.Array]:
    """Round to e2m1 under a power of two: the greatest value's exponent less that of e2m1's greatest, 6 = 1.5 2^2."""
    _, exponent = jnp.frexp(_greatest(groups))  # the greatest is m 2^exponent, m in [0.5, 1)
    exponent = jnp.where(_greatest(groups) == 0, 0, jnp.clip(exponent - 3, -126, 127))
    shares = jnp.ldexp(groups, -exponent[..., None])
    codes = jnp.searchsorted(jnp.asarray(_E2M1_BOUNDS), jnp.abs(shares), side="left")
    return {"codes": codes + 8 * (shares < 0), "scale": (exponent + 127).astype(jnp.uint8)}


def _greatest(groups: jax.Array) -> jax.Array:
    return jnp.max(jnp.abs(groups), axis=-1)


def _shares(groups: jax.Array, scale: jax.Array) -> jax.Array:
    scale = scale.astype(jnp.float32)
    return groups / jnp.where(scale == 0, 1, scale)[..., None]


def _pairs(codes: jax.Array, upper_first: bool) -> jax.Array:
    """Return [..., n / 2] bytes of codes [..., n]."""
    first, second = jnp.moveaxis(codes.reshape(*codes.shape[:-1], -1, 2), -1, 0)
    return first << 4 | second if upper_first else second << 4 | first


PACKERS: dict[str, Callable[[Format, jax.Array], dict[str, jax.Array]]] = {
    "int8": _int8, "w8a8": _int8, "fp8": _fp8, "int4": _int4, "uint4": _uint4, "nf4": _nf4, "mxfp4": _mxfp4,
}  # fmt: skip
