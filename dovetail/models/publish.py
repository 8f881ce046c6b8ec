"""A trainer's weights, or a checkpoint's, in the form that an engine runs: cast, laid out for its mesh, and with the
projections of one input joined, so that their products are one.

The serving form is declared as the model's own is (`serving_spec`), by the very function that joins the arrays. Joined
weights of a mesh are kept in as many parts as its tensor axis has devices, and each device has one.
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

from dovetail.core.errors import UserError
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
    """models.spec's tree as an engine holds it."""
    tree = spec(cfg)
    layers = zip(cfg.layers, tree["layers"], strict=True)
    return {**tree, "layers": tuple(_join_layer(layer, p, placement, _join_specs) for layer, p in layers)}


def publish(
    params: Params, cfg: ModelConfig, dtype: Any, placement: Placement | None = None, take: bool = False
) -> Params:
    """The weights in the form of serving_spec; branches that only a trainer has are left out.

    Nothing of `params` is shared, so a trainer may donate it to its next step. With `take` it is the caller's no more:
    what fits already is used as it is, and each layer's arrays are let go as soon as it is done.
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
    """How many devices share each of the weights; 0 where they cannot be cut alike, as 2 key heads for 4 devices."""
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
    """The tree that models.spec declares, of any dtype, perhaps with the branches that only a trainer has."""
    wanted = dict(leaves(spec(cfg)))
    try:
        given = _by_name({name: part for name, part in params.items() if name not in TRAINED_ONLY})
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"weights come as the tree that dt.load gives; this is none ({error!r})") from None
    for name in [*wanted, *given]:
        want = f"{list(wanted[name].shape)}" if name in wanted else "nothing"
        got = f"{list(given[name].shape)}" if name in given else "nothing"
        if want != got:
            raise UserError(f"weights {name}: the model has {want} there, and {got} came")


def _by_name(tree: Any) -> dict[str, Any]:
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
