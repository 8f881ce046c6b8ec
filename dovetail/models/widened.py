"""An engine's weights beside the tables of models.serving_lora: the tables' `lora_a` lie below the rows of the weights
that they adapt (ops.adapter.Widened), and once more in the tables, for weights that come later.

P parts: devices that share a weight's rows. C ranks of all slots.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from dovetail.core.types import Params
from dovetail.models.lora import on_each
from dovetail.ops.adapter import Adapted, Widened

PER_HEAD = ("k_up", "v_up")  # latent attention multiplies these from either side: they stay as they are


def widen(params: Params, tables: Params) -> Params:
    """Published weights with the tables below them; those given are deleted, one by one: there is room for one copy.
    Abstract weights give abstract weights."""

    def put(name: str, w: Any, pair: dict[str, Any]) -> Any:
        if name in PER_HEAD:
            return w
        parts, place = _parts(w, pair["lora_b"].ndim - 1)
        if isinstance(w, jax.ShapeDtypeStruct):
            rows = jax.eval_shape(lambda w, down: _widen(w, down, parts, None), w, pair["lora_a"])
            return jax.ShapeDtypeStruct(rows.shape, rows.dtype, sharding=place)
        made = jax.block_until_ready(_widen(w, pair["lora_a"], parts, place))
        w.delete()
        return made

    return on_each(params, tables, put)


def with_tables(params: Params, tables: Params, slots: int) -> Params:
    """What a step takes: widened weights, each with its tables."""

    def put(name: str, w: Any, pair: dict[str, Any]) -> Adapted | Widened:
        if name in PER_HEAD:
            return Adapted(w, pair["lora_a"], pair["lora_b"], slots=slots)
        return Widened(w, pair["lora_b"], slots=slots)

    return on_each(params, tables, put)


def rewrite(params: Params, values: Params, slot: int, slots: int) -> Params:
    """Widened weights with an adapter's values (see serving_lora.slot_values) in its slot; those given are used up."""

    def put(name: str, w: jax.Array, pair: dict[str, np.ndarray]) -> jax.Array:
        if name in PER_HEAD:
            return w
        width = pair["lora_a"].shape[0]
        at = w.shape[1] - width * (slots - slot)
        return _rewrite(w, pair["lora_a"], np.int32(at), w.sharding if isinstance(w.sharding, NamedSharding) else None)

    return on_each(params, values, put)


@functools.partial(jax.jit, static_argnames=("parts", "place"))
def _widen(w: jax.Array, down: jax.Array, parts: int, place: Any) -> jax.Array:
    """[P, out / P + C, *in] from w [*out, *in] and down [C, *in]."""
    inner = down.shape[1:]
    own = w.reshape(parts, math.prod(w.shape[: w.ndim - len(inner)]) // parts, *inner)
    rows = jnp.concatenate([own, jnp.broadcast_to(down, (parts, *down.shape))], axis=1)
    return rows if place is None else jax.lax.with_sharding_constraint(rows, place)


@functools.partial(jax.jit, static_argnames=("place",), donate_argnames="rows")
def _rewrite(rows: jax.Array, down: jax.Array, at: jax.Array, place: Any) -> jax.Array:
    down = jnp.broadcast_to(down, (rows.shape[0], *down.shape))
    rows = jax.lax.dynamic_update_slice_in_dim(rows, down, at, 1)
    return rows if place is None else jax.lax.with_sharding_constraint(rows, place)


def _parts(w: jax.Array, cut: int) -> tuple[int, NamedSharding | None]:
    """P, and where the widened rows lie; `cut`: how many dims are the output's."""
    place = w.sharding
    if not isinstance(place, NamedSharding):
        return 1, None
    axes = (*place.spec, *(None,) * (w.ndim - len(place.spec)))
    parts = w.shape[0] // place.shard_shape(w.shape)[0]
    return parts, NamedSharding(place.mesh, PartitionSpec(axes[0], None, *axes[cut:]))
