"""Many adapters on one engine's weights: tables that hold the ranks of all of them side by side, a slot for each.

The tables follow the tree of models.publish, where projections of one input may be joined. A joined weight's members
have ranks of their own, and `lora_b` is zero where the rows are another member's. Of each slot the product is computed
for every token, and a token's own is kept (ops.adapter.choose): 8 adapters of rank 16 are 128 columns beside thousands.

W ranks in a slot: those of each member, padded to the engine's greatest. A slots.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from dovetail.core.errors import UserError
from dovetail.core.mesh import Placement, param_sharding
from dovetail.core.spec import ParamSpec, is_spec, path_name, tree_map
from dovetail.core.types import Params
from dovetail.models.config import ModelConfig
from dovetail.models.lora import OUTER, Lora, input_dims, is_projection
from dovetail.models.publish import serving_spec
from dovetail.models.spec import spec

Pair = dict[str, np.ndarray]  # lora_a and lora_b
Members = dict[str, ParamSpec]  # the weights that are joined in one, or that one alone


@dataclass(frozen=True)
class SlotLayout:
    """What an engine has room for."""

    cfg: ModelConfig
    slots: int  # A
    rank: int  # of each adapter, at most
    placement: Placement | None = None


def empty_tables(layout: SlotLayout, dtype: Any) -> Params:
    """lora_a [A W, *in] and lora_b [*out, A W] of every projection."""

    def zeros(leaf: ParamSpec) -> jax.Array:
        return jnp.zeros(leaf.shape, dtype, device=param_sharding(layout.placement, leaf))

    return tree_map(zeros, tables_spec(layout))


def tables_spec(layout: SlotLayout) -> dict[str, Any]:
    return _layers(layout, lambda _, leaf, members: _pair_spec(layout, leaf, len(members)))


def slot_values(layout: SlotLayout, adapters: Params, lora: Lora, dtype: Any) -> Params:
    """What an adapter (see models.lora) writes into its slot: lora_a [W, *in] and lora_b [*out, W] of every projection,
    zero where it has none."""
    check_served(adapters, lora, layout.rank)

    def one(path: str, leaf: ParamSpec, members: Members) -> Pair:
        above = path.rpartition(".")[0]
        pairs = [(given.get(f"{above}.{name}"), part.shape[0]) for name, part in members.items()]
        return {key: x.astype(dtype) for key, x in _values(layout.rank, leaf, pairs, lora.scale).items()}

    given = _by_weight(adapters)
    return _layers(layout, one)


def write_slot(tables: Params, values: Params, slot: int) -> Params:
    """The tables with these values in a slot; those given are used up."""

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
    """make(its path, its spec, the weights that are joined in it) for each projection of the serving tree, but none of
    experts'."""

    def part(tree: Mapping[str, Any], own: Mapping[str, Any], above: str) -> dict[str, Any]:
        made = {}
        for name, leaf in tree.items():
            if not is_spec(leaf):
                made[name] = part(leaf, own[name], f"{above}.{name}")
            elif is_projection(name, leaf) and input_dims(leaf):
                made[name] = make(f"{above}.{name}", leaf, {member: own[member] for member in name.split("+")})
        return {name: one for name, one in made.items() if one}

    layers = zip(serving_spec(layout.cfg, layout.placement)["layers"], spec(layout.cfg)["layers"], strict=True)
    return {"layers": tuple(part(*both, f"layers.{i}") for i, both in enumerate(layers))}


def _pair_spec(layout: SlotLayout, leaf: ParamSpec, members: int) -> dict[str, ParamSpec]:
    cut = len(leaf.shape) - input_dims(leaf)
    ranks = layout.slots * layout.rank * members
    return {
        "lora_a": replace(leaf, shape=(ranks, *leaf.shape[cut:]), axes=(None, *leaf.axes[cut:])),
        "lora_b": replace(leaf, shape=(*leaf.shape[:cut], ranks), axes=(*leaf.axes[:cut], None)),
    }


def _values(rank: int, leaf: ParamSpec, pairs: list[tuple[Pair | None, int]], scale: float) -> Pair:
    """Of a weight whose members have these pairs, and so many rows."""
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
    """By the path of the weight."""
    found: dict[str, Pair] = {}
    for path, x in jax.tree_util.tree_leaves_with_path(adapters):
        weight, _, key = path_name(path).rpartition(".")
        found.setdefault(weight, {})[key] = x
    return found


def greatest_rank(adapters: Params) -> int:
    return max((pair["lora_a"].shape[0] for pair in _by_weight({"layers": adapters["layers"]}).values()), default=1)


def check_served(adapters: Params, lora: Lora, most: int) -> None:
    """Raise ValueError for an adapter that an engine with room for ranks up to `most` cannot serve."""
    if lora.use_dora:
        raise UserError("the adapter is DoRA's, which is not served beside others: merge it into the model first")
    if outer := [OUTER[name] for name in OUTER if name in adapters]:
        raise UserError(f"the adapter is for {' and '.join(outer)} too, which is not served: merge it into the model")
    for weight, pair in _by_weight(adapters).items():
        if ".experts." in weight or weight.endswith(".router"):
            raise UserError(f"the adapter is for experts too ({weight}), which is not served: merge it into the model")
        if (rank := pair["lora_a"].shape[0]) > most:
            raise UserError(f"the adapter's rank is {rank}, and there is room for {most}: raise max_lora_rank")
