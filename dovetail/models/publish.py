"""Convert weights of a trainer or a checkpoint to the layout of an engine.

They are cast, laid out for its mesh, and projections of one input are joined, so that their products are one.

The serving layout is declared like the model's own (`serving_spec`), by the function that joins the arrays. On a mesh,
joined weights have as many parts as the tensor axis has devices, one per device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from dovetail.core.errors import CheckpointError
from dovetail.core.mesh import Placement, param_sharding
from dovetail.core.spec import ParamSpec, is_spec, leaf_dtype, leaves, path_name
from dovetail.core.types import Params
from dovetail.models.config import Layer, ModelConfig
from dovetail.models.spec import spec
from dovetail.ops.linear import joined_name

TRAINED_ONLY = ("mtp",)  # branches that an engine does not run
Join = Callable[[list[Any], int], Any]  # weights with the same input, and the parts to keep them in


@functools.lru_cache(maxsize=64)
def serving_spec(cfg: ModelConfig, placement: Placement | None = None) -> dict[str, Any]:
    """Return the tree of models.spec in the layout of an engine."""
    tree = spec(cfg)
    layers = zip(cfg.layers, tree["layers"], strict=True)
    return {**tree, "layers": tuple(_join_layer(layer, p, placement, _join_specs) for layer, p in layers)}


def publish(
    params: Params, cfg: ModelConfig, dtype: Any, placement: Placement | None = None, take: bool = False
) -> Params:
    """Return the weights in the layout of serving_spec, without branches that only a trainer has.

    The result shares no buffer with `params`, so a trainer may donate them to its next step. With `take`, `params` are
    consumed: weights that already fit are used as they are, and each layer's arrays are freed as soon as it is done.
    """
    _check(params, cfg)
    specs = serving_spec(cfg, placement)
    layers = list(params["layers"])
    common = {name: params[name] for name in specs if name != "layers"}
    if take:
        params.clear()
    done = []
    for i, layer in enumerate(cfg.layers):
        p, layers[i] = layers[i], None
        done.append(_converted(p, specs["layers"][i], jnp.dtype(dtype), placement, take, layer))
        if take:  # or the host runs ahead, and memory for all layers is taken before the first is let go
            jax.block_until_ready(done[-1])
    rest = {name: one for name, one in specs.items() if name != "layers"}
    return {**_converted(common, rest, jnp.dtype(dtype), placement, take), "layers": tuple(done)}


# --- joining ----------------------------------------------------------------------------------------------------------


def _join_layer(layer: Layer, p: Mapping[str, Any], placement: Placement | None, join: Join) -> dict[str, Any]:
    parts = functools.partial(_parts, placement)
    heads = layer.attn.projections
    tree = {**p, "attn": _joined(p["attn"], heads, parts("kv_heads", *heads.values()), join)}
    if layer.mlp:
        tree["mlp"] = _joined(p["mlp"], layer.mlp.projections, parts("mlp", layer.mlp.width), join)
    if layer.moe and layer.moe.shared:
        shared = layer.moe.shared
        joined = _joined(p["moe"]["shared"], shared.projections, parts("mlp", shared.width), join)
        tree["moe"] = {**p["moe"], "shared": joined}
    return tree


def _parts(placement: Placement | None, axis: str, *sizes: int) -> int:
    """Return how many devices share each of the weights.

    0 if they cannot be split equally, as 2 key heads on 4 devices.
    """
    devices = placement.size(axis) if placement else 1
    return 0 if any(size % devices for size in sizes) else devices


def _joined(p: Mapping[str, Any], names: Mapping[str, int], parts: int, join: Join) -> dict[str, Any]:
    if len(names) < 2 or not parts:
        return dict(p)
    tree = {key: value for key, value in p.items() if key.removesuffix("_bias") not in names}
    for suffix in ("", "_bias"):
        if all(f"{name}{suffix}" in p for name in names):
            tree[f"{joined_name(names)}{suffix}"] = join([p[f"{name}{suffix}"] for name in names], parts)
    return tree


def _join_specs(weights: list[ParamSpec], parts: int) -> ParamSpec:
    first, rows = weights[0], sum(one.shape[0] for one in weights)
    names = tuple(name for one in weights for name in one.stored.names)
    return replace(
        first, shape=(parts, rows // parts, *first.shape[1:]), axes=(first.axes[0], None, *first.axes[1:]),
        stored=replace(first.stored, names=names),
    )  # fmt: skip


def _join_arrays(weights: list[Any], parts: int) -> Any:
    cut = [w.reshape(parts, w.shape[0] // parts, *w.shape[1:]) for w in weights]
    return jnp.concatenate(cut, axis=1)


# --- one compiled function per kind of layer --------------------------------------------------------------------------


def _converted(
    p: Params, specs: Any, dtype: np.dtype, placement: Placement | None, take: bool, layer: Layer | None = None
) -> Params:
    paths, treedef = jax.tree_util.tree_flatten_with_path(specs, is_leaf=is_spec)
    places = [param_sharding(placement, one) or SingleDeviceSharding(jax.local_devices()[0]) for _, one in paths]
    dtypes = [leaf_dtype(one, dtype) for _, one in paths]
    fits = dict(zip([path for path, _ in paths], zip(dtypes, places, strict=True), strict=True)) if take else {}
    rest = jax.tree_util.tree_map_with_path(lambda path, x: None if _fits(x, fits.get(path)) else x, p)
    # another set of devices than the weights lie on (the trainer's): they are sent there once they are smaller
    is_there = placement is not None and set(placement.mesh.devices.flat) == _devices(p)
    targets = tuple(zip(dtypes, places if is_there else [None] * len(places), strict=True))
    made = _convert(rest, layer=layer, placement=placement, targets=targets, treedef=treedef, copy=not take)
    own = dict(jax.tree_util.tree_leaves_with_path(p))
    arrays = [own[path] if x is None else x for (path, _), x in zip(paths, treedef.flatten_up_to(made), strict=True)]
    return treedef.unflatten(jax.device_put(arrays, places))


def _fits(x: Any, target: tuple[np.dtype, Any] | None) -> bool:
    return target is not None and x.dtype == target[0] and x.sharding.is_equivalent_to(target[1], x.ndim)


@functools.partial(jax.jit, static_argnames=("layer", "placement", "targets", "treedef", "copy"))
def _convert(p: Params, *, layer: Layer | None, placement: Placement | None, targets: tuple, treedef: Any, copy: bool):
    """Cast and place each leaf by `targets`: its dtype, and its sharding or None to leave it. None leaves stay None."""

    def one(x: jax.Array | None, dtype: np.dtype, place: Any) -> jax.Array | None:
        if x is None:
            return None
        x = x.astype(dtype)
        x = jnp.copy(x) if copy else x
        return x if place is None else jax.lax.with_sharding_constraint(x, place)

    joined = _join_layer(layer, p, placement, _join_arrays) if layer else p
    given = treedef.flatten_up_to(joined)
    return treedef.unflatten([one(x, *each) for x, each in zip(given, targets, strict=True)])


def _devices(p: Params) -> set[Any]:
    return {device for x in jax.tree.leaves(p) if isinstance(x, jax.Array) for device in x.devices()}


# --- what cannot be published -----------------------------------------------------------------------------------------


def _check(params: Params, cfg: ModelConfig) -> None:
    """Raise CheckpointError unless the tree is that of models.spec, of any dtype, perhaps with a trainer's branches."""
    wanted = dict(leaves(spec(cfg)))
    try:
        given = _by_name({name: part for name, part in params.items() if name not in TRAINED_ONLY})
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"weights must be a tree as dt.load returns it, got {error!r}") from None
    for name in [*wanted, *given]:
        want = f"{list(wanted[name].shape)}" if name in wanted else "nothing"
        got = f"{list(given[name].shape)}" if name in given else "nothing"
        if want != got:
            raise CheckpointError(f"weights {name} must have shape {want}, got {got}", param=name)


def _by_name(tree: Any) -> dict[str, Any]:
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
