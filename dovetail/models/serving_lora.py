"""Serve many adapters on one engine's weights: tables hold the ranks of all of them side by side, a slot for each.

The tables follow the tree of models.publish, where projections of one input may be joined. Each member of a joined
weight has its own ranks, and `lora_b` is zero in the rows of other members. The product of every slot is computed for
every token, and a token's own is selected (ops.adapter.choose): 8 adapters of rank 16 are 128 columns beside thousands.

The tables' `lora_a` are appended as rows to the weights that they adapt (ops.adapter.Widened), and are kept in the
tables too, for weights that are loaded later. A quantised weight is left as it is, with the tables beside it.

W ranks in a slot: those of each member, padded to the engine's maximum. A slots. P parts: devices that share a weight's
rows. C ranks of all slots.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from dovetail.core.errors import CheckpointError
from dovetail.core.mesh import Placement, param_sharding
from dovetail.core.spec import ParamSpec, is_spec, path_name, tree_map
from dovetail.core.types import Params
from dovetail.models.config import ModelConfig
from dovetail.models.formats import Formats
from dovetail.models.lora import OUTER, Lora, input_dims, is_projection, on_each
from dovetail.models.publish import serving_spec
from dovetail.models.spec import spec
from dovetail.ops.adapter import Adapted, Widened
from dovetail.ops.quant.weight import is_quantized

Pair = dict[str, np.ndarray]  # lora_a and lora_b
Members = dict[str, ParamSpec]  # the weights that are joined in one, or that one alone


@dataclass(frozen=True)
class SlotLayout:
    """Describe how many adapters an engine has room for."""

    cfg: ModelConfig
    slots: int  # A
    rank: int  # of each adapter, at most
    placement: Placement | None = None
    formats: Formats = ()  # of the model's weights, which decide what is joined


def empty_tables(layout: SlotLayout, dtype: Any) -> Params:
    """Return zero tables: lora_a [A W, *in] and lora_b [*out, A W] of every projection."""

    def zeros(leaf: ParamSpec) -> jax.Array:
        return jnp.zeros(leaf.shape, dtype, device=param_sharding(layout.placement, leaf))

    return tree_map(zeros, tables_spec(layout))


def tables_spec(layout: SlotLayout) -> dict[str, Any]:
    """Return the specs of the tables."""
    return _layers(layout, lambda _, leaf, members: _pair_spec(layout, replace(leaf, format=None), len(members)))


def slot_values(layout: SlotLayout, adapters: Params, lora: Lora, dtype: Any) -> Params:
    """Return an adapter's values for its slot: lora_a [W, *in] and lora_b [*out, W] of every projection.

    They are zero where the adapter (see models.lora) has none.
    """
    check_served(adapters, lora, layout.rank)

    def one(path: str, leaf: ParamSpec, members: Members) -> Pair:
        above = path.rpartition(".")[0]
        pairs = [(given.get(f"{above}.{name}"), part.shape[0]) for name, part in members.items()]
        return {key: x.astype(dtype) for key, x in _values(layout.rank, leaf, pairs, lora.scale).items()}

    given = _by_weight(adapters)
    return _layers(layout, one)


def write_slot(tables: Params, values: Params, slot: int) -> Params:
    """Return the tables with these values in a slot; the given tables are donated."""

    def one(path: tuple, table: jax.Array, value: np.ndarray) -> jax.Array:
        axis = 0 if path[-1].key == "lora_a" else table.ndim - 1
        place = table.sharding if isinstance(table.sharding, NamedSharding) else None
        return _write(table, value, np.int32(slot * value.shape[axis]), axis, place)

    return jax.tree_util.tree_map_with_path(one, tables, values)


@functools.partial(jax.jit, static_argnames=("axis", "place"), donate_argnames="table")
def _write(table: jax.Array, value: jax.Array, at: jax.Array, axis: int, place: Any) -> jax.Array:
    table = jax.lax.dynamic_update_slice_in_dim(table, value, at, axis)
    return table if place is None else jax.lax.with_sharding_constraint(table, place)


# --- one weight -------------------------------------------------------------------------------------------------------


def _layers(layout: SlotLayout, make: Callable[[str, ParamSpec, Members], Any]) -> dict[str, Any]:
    """Return make(path, spec, joined weights) for each projection of the serving tree except those of experts."""

    def part(tree: Mapping[str, Any], own: Mapping[str, Any], above: str) -> dict[str, Any]:
        made = {}
        for name, leaf in tree.items():
            if not is_spec(leaf):
                made[name] = part(leaf, own[name], f"{above}.{name}")
            elif is_projection(name, leaf) and input_dims(leaf):
                made[name] = make(f"{above}.{name}", leaf, {member: own[member] for member in name.split("+")})
        return {name: one for name, one in made.items() if one}

    served = serving_spec(layout.cfg, layout.placement, layout.formats)["layers"]
    layers = enumerate(zip(served, spec(layout.cfg)["layers"], strict=True))
    return {"layers": tuple(part(*both, f"layers.{i}") for i, both in layers)}


def _pair_spec(layout: SlotLayout, leaf: ParamSpec, members: int) -> dict[str, ParamSpec]:
    cut = len(leaf.shape) - input_dims(leaf)
    ranks = layout.slots * layout.rank * members
    return {
        "lora_a": replace(leaf, shape=(ranks, *leaf.shape[cut:]), axes=(None, *leaf.axes[cut:])),
        "lora_b": replace(leaf, shape=(*leaf.shape[:cut], ranks), axes=(*leaf.axes[:cut], None)),
    }


def _values(rank: int, leaf: ParamSpec, pairs: list[tuple[Pair | None, int]], scale: float) -> Pair:
    """Return the values of a weight whose members have these pairs and numbers of rows."""
    cut, width = len(leaf.shape) - input_dims(leaf), rank * len(pairs)
    down = np.zeros((width, *leaf.shape[cut:]), np.float32)
    up = np.zeros((*leaf.shape[:cut], width), np.float32)
    parts, row = (leaf.shape[0], 0) if len(pairs) > 1 else (1, 0)
    joined = up if len(pairs) > 1 else up[None]  # [parts, rows, ..., W]: each part has its share of every member
    for i, (pair, rows) in enumerate(pairs):
        if pair is not None:
            ranks = slice(i * rank, i * rank + pair["lora_a"].shape[0])
            down[ranks] = pair["lora_a"]
            own = np.asarray(pair["lora_b"], np.float32) * scale
            joined[:, row : row + rows // parts, ..., ranks] = own.reshape(parts, rows // parts, *own.shape[1:])
        row += rows // parts
    return {"lora_a": down, "lora_b": up}


def _by_weight(adapters: Params) -> dict[str, Pair]:
    """Return the pairs by the path of the weight."""
    found: dict[str, Pair] = {}
    for path, x in jax.tree_util.tree_leaves_with_path(adapters):
        weight, _, key = path_name(path).rpartition(".")
        found.setdefault(weight, {})[key] = x
    return found


def greatest_rank(adapters: Params) -> int:
    """Return the maximum rank of an adapter."""
    return max((pair["lora_a"].shape[0] for pair in _by_weight({"layers": adapters["layers"]}).values()), default=1)


def check_served(adapters: Params, lora: Lora, most: int) -> None:
    """Raise CheckpointError for an adapter that an engine with room for ranks up to `most` cannot serve."""
    if lora.use_dora:
        raise CheckpointError("a DoRA adapter cannot be served with others: merge it into the model first")
    if outer := [OUTER[name] for name in OUTER if name in adapters]:
        raise CheckpointError(
            f"the adapter is for {' and '.join(outer)} too, which is not served: merge it into the model"
        )
    for weight, pair in _by_weight(adapters).items():
        if ".experts." in weight or weight.endswith(".router"):
            raise CheckpointError(
                f"the adapter is for experts too ({weight}), which is not served: merge it into the model"
            )
        if (rank := pair["lora_a"].shape[0]) > most:
            raise CheckpointError(
                f"the adapter's rank is {rank}, and there is room for {most}: raise max_lora_rank",
                param="max_lora_rank",
            )


PER_HEAD = ("k_up", "v_up")  # latent attention multiplies these from either side: they stay as they are


def widen(params: Params, tables: Params) -> Params:
    """Return published weights with the tables' rows appended; the given ones are deleted one by one, to hold one copy.

    Abstract weights give abstract weights.
    """

    def put(name: str, w: Any, pair: dict[str, Any]) -> Any:
        if name in PER_HEAD or is_quantized(w):
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
    """Return what a step takes: widened weights, each with its tables."""

    def put(name: str, w: Any, pair: dict[str, Any]) -> Adapted | Widened:
        if name in PER_HEAD or is_quantized(w):
            return Adapted(w, pair["lora_a"], pair["lora_b"], slots=slots)
        return Widened(w, pair["lora_b"], slots=slots)

    return on_each(params, tables, put)


def rewrite(params: Params, values: Params, slot: int, slots: int) -> Params:
    """Return widened weights with an adapter's values (see `slot_values`) in its slot.

    The given weights are donated.
    """

    def put(name: str, w: Any, pair: dict[str, np.ndarray]) -> Any:
        if name in PER_HEAD or is_quantized(w):
            return w
        width = pair["lora_a"].shape[0]
        at = w.shape[1] - width * (slots - slot)
        return _rewrite(w, pair["lora_a"], np.int32(at), w.sharding if isinstance(w.sharding, NamedSharding) else None)

    return on_each(params, values, put)


@functools.partial(jax.jit, static_argnames=("parts", "place"))
def _widen(w: jax.Array, down: jax.Array, parts: int, place: Any) -> jax.Array:
    """Return [P, out / P + C, *in] from w [*out, *in] and down [C, *in]."""
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
    """Return P and the sharding of the widened rows; `cut` is the number of output dims."""
    place = w.sharding
    if not isinstance(place, NamedSharding):
        return 1, None
    axes = (*place.spec, *(None,) * (w.ndim - len(place.spec)))
    parts = w.shape[0] // place.shard_shape(w.shape)[0]
    return parts, NamedSharding(place.mesh, PartitionSpec(axes[0], None, *axes[cut:]))
