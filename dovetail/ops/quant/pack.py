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
    return {"codes": packed_codes(form, codes)} | arrays


def _linear(form: Format, groups: jax.Array) -> dict[str, jax.Array]:
    scale, zero = scales_of(form, groups)
    codes = codes_of(form, groups, scale[..., None], None if zero is None else zero[..., None])
    return {"codes": codes, "scale": scale} | ({} if zero is None else {"zero": zero.astype(jnp.uint8)})


# --- formats whose values are a scale times a number: LINEAR ----------------------------------------------------------

LINEAR = ("int8", "w8a8", "fp8", "int4", "uint4")


def scales_of(form: Format, groups: jax.Array, share: float | jax.Array = 1.0) -> tuple[jax.Array, jax.Array | None]:
    """Return the scale and the zero point (None but for uint4) of each group of a LINEAR format.

    Args:
        form: The format.
        groups: Values [..., n, group] in f32.
        share: The share of the groups' range that is covered; values beyond it become its ends.
    """
    if form.name == "uint4":
        least, most = (jnp.minimum(jnp.min(groups, -1), 0) * share, jnp.maximum(jnp.max(groups, -1), 0) * share)
        scale = ((most - least) / 15).astype(form.scale)
        return scale, jnp.clip(jnp.round(-_shares(least, scale)), 0, 15)
    most = {"fp8": FP8_MOST, "int4": 7.5}.get(form.name, 127.0)
    return (_greatest(groups) * share / most).astype(form.scale), None


def codes_of(form: Format, values: jax.Array, scale: jax.Array, zero: jax.Array | None) -> jax.Array:
    """Return the codes of values under scales and zero points of the same shape, or that broadcast to it."""
    shares = _shares(values, scale)
    if form.name == "fp8":
        return jnp.clip(shares, -FP8_MOST, FP8_MOST).astype(jnp.float8_e4m3fn)
    if form.name == "int4":
        return jnp.clip(jnp.round(shares), -8, 7) + 8
    if form.name == "uint4":
        assert zero is not None
        return jnp.clip(jnp.round(shares) + zero, 0, 15)
    return jnp.clip(jnp.round(shares), -127, 127).astype(jnp.int8)


def values_of(form: Format, codes: jax.Array, scale: jax.Array, zero: jax.Array | None) -> jax.Array:
    """Return the values of codes in f32."""
    middle = {"int4": 8, "uint4": zero}.get(form.name, 0)
    return (codes.astype(jnp.float32) - middle) * scale.astype(jnp.float32)


def packed_codes(form: Format, codes: jax.Array) -> jax.Array:
    """Return codes [..., size] as a format stores them."""
    halves = form.name in ("int4", "uint4", "nf4", "mxfp4")
    return _pairs(codes.astype(jnp.uint8), upper_first=form.name == "nf4") if halves else codes


# --- formats with a table of values -----------------------------------------------------------------------------------


def _nf4(form: Format, groups: jax.Array) -> dict[str, jax.Array]:
    scale = _greatest(groups).astype(form.scale)
    shares = _shares(groups, scale[..., None])
    return {"codes": jnp.searchsorted(jnp.asarray(_NF4_BOUNDS), shares, side="left"), "scale": scale}


def _mxfp4(form: Format, groups: jax.Array) -> dict[str, jax.Array]:
    """Round to e2m1 under a power of two: the greatest value's exponent less that of e2m1's greatest, 6 = 1.5 2^2."""
    _, exponent = jnp.frexp(_greatest(groups))  # the greatest is m 2^exponent, m in [0.5, 1)
    exponent = jnp.where(_greatest(groups) == 0, 0, jnp.clip(exponent - 3, -126, 127))
    shares = jnp.ldexp(groups, -exponent[..., None])
    codes = jnp.searchsorted(jnp.asarray(_E2M1_BOUNDS), jnp.abs(shares), side="left")
    return {"codes": codes + 8 * (shares < 0), "scale": (exponent + 127).astype(jnp.uint8)}


def _greatest(groups: jax.Array) -> jax.Array:
    return jnp.max(jnp.abs(groups), axis=-1)


def _shares(values: jax.Array, scale: jax.Array) -> jax.Array:
    scale = scale.astype(jnp.float32)
    return values / jnp.where(scale == 0, 1, scale)


def _pairs(codes: jax.Array, upper_first: bool) -> jax.Array:
    """Return [..., n / 2] bytes of codes [..., n]."""
    first, second = jnp.moveaxis(codes.reshape(*codes.shape[:-1], -1, 2), -1, 0)
    return first << 4 | second if upper_first else second << 4 | first


PACKERS: dict[str, Callable[[Format, jax.Array], dict[str, jax.Array]]] = {
    **dict.fromkeys(LINEAR, _linear), "nf4": _nf4, "mxfp4": _mxfp4,
}  # fmt: skip
