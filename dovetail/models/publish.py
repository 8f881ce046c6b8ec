"""Convert weights of a trainer or a checkpoint to the layout of an engine.

They are cast or quantised, laid out for its mesh, and projections of one input are joined, so that their products are
one. Weights in different formats are not joined.

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
from dovetail.core.mesh import Placement, array_shardings
from dovetail.core.spec import ParamSpec, is_spec, leaf_dtype, leaves, path_name, tree_map
from dovetail.core.types import Params
from dovetail.models.config import Layer, ModelConfig
from dovetail.models.formats import Formats, formats_of, with_formats
from dovetail.models.spec import spec
from dovetail.ops.linear import joined_name
from dovetail.ops.quant.weight import is_quantized, rounded

TRAINED_ONLY = ("mtp",)  # branches that an engine does not run
Join = Callable[[list[Any], int], Any]  # weights with the same input, and the parts to keep them in


@functools.lru_cache(maxsize=64)
def serving_spec(cfg: ModelConfig, placement: Placement | None = None, formats: Formats = ()) -> dict[str, Any]:
    """Return the tree of models.spec in the layout of an engine whose weights have these formats."""
    tree = with_formats(spec(cfg), formats)
    layers = zip(cfg.layers, tree["layers"], strict=True)
    return {**tree, "layers": tuple(_join_layer(layer, p, placement, _join_specs) for layer, p in layers)}


def publish(
    params: Params,
    cfg: ModelConfig,
    dtype: Any,
    placement: Placement | None = None,
    take: bool = False,
    formats: Formats | None = None,
) -> Params:
    """Return the weights in the layout of serving_spec, without branches that only a trainer has.

    The result shares no buffer with `params`, so a trainer may donate them to its next step. With `take`, `params` are
    consumed: weights that already fit are used as they are, and each layer's arrays are freed as soon as it is done.

    `formats` are those of the result: other weights are rounded to them, or unpacked. By default they are those of
    `params`.
    """
    _check(params, cfg)
    formats = formats_of(params) if formats is None else formats
    own, specs = with_formats(spec(cfg), formats), serving_spec(cfg, placement, formats)
    layers = list(params["layers"])
    common = {name: params[name] for name in specs if name != "layers"}
    if take:
        params.clear()
    done = []
    for i, layer in enumerate(cfg.layers):
        p, layers[i] = _in_formats(layers[i], own["layers"][i], dtype), None
        done.append(_converted(p, specs["layers"][i], jnp.dtype(dtype), placement, take, layer))
        if take:  # or the host runs ahead, and memory for all layers is taken before the first is let go
            jax.block_until_ready(done[-1])
    rest = {name: one for name, one in specs.items() if name != "layers"}
    common = _in_formats(common, {name: own[name] for name in rest}, dtype)
    return {**_converted(common, rest, jnp.dtype(dtype), placement, take), "layers": tuple(done)}


def _in_formats(p: Params, specs: Any, dtype: Any) -> Params:
    """Return the weights in the formats of their specs."""

    def one(leaf: ParamSpec, x: Any) -> Any:
        if is_quantized(x) and leaf.format and x.format.stored == leaf.format.stored:
            return replace(x, format=leaf.format)
        plain = x.dense() if is_quantized(x) else x
        return plain if leaf.format is None else rounded(leaf, plain).astype(leaf_dtype(leaf, dtype))

    return tree_map(one, specs, p)


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
    if len(names) < 2 or not parts or len({_form(p[name]) for name in names}) > 1:
        return dict(p)
    tree = {key: value for key, value in p.items() if key.removesuffix("_bias") not in names}
    for suffix in ("", "_bias"):
        if all(f"{name}{suffix}" in p for name in names):
            tree[f"{joined_name(names)}{suffix}"] = join([p[f"{name}{suffix}"] for name in names], parts)
    return tree


def _form(weight: Any) -> Any:
    return weight.format if is_spec(weight) or is_quantized(weight) else None


def _join_specs(weights: list[ParamSpec], parts: int) -> ParamSpec:
    first, rows = weights[0], sum(one.shape[0] for one in weights)
    names = tuple(name for one in weights for name in one.stored.names)
    return replace(
        first, shape=(parts, rows // parts, *first.shape[1:]), axes=(first.axes[0], None, *first.axes[1:]),
        stored=replace(first.stored, names=names),
    )  # fmt: skip


def _join_arrays(weights: list[Any], parts: int) -> Any:
    def join(*own: jax.Array) -> jax.Array:
        return jnp.concatenate([w.reshape(parts, w.shape[0] // parts, *w.shape[1:]) for w in own], axis=1)

    return jax.tree.map(join, *weights)  # a quantised weight's arrays each


# --- one compiled function per kind of layer --------------------------------------------------------------------------


def _converted(
    p: Params, specs: Any, dtype: np.dtype, placement: Placement | None, take: bool, layer: Layer | None = None
) -> Params:
    paths, treedef = jax.tree_util.tree_flatten_with_path(specs, is_leaf=is_spec)
    places = [_places(placement, one, dtype) for _, one in paths]
    dtypes = [leaf_dtype(one, dtype) for _, one in paths]
    fits = dict(zip([path for path, _ in paths], zip(dtypes, places, strict=True), strict=True)) if take else {}
    rest = jax.tree_util.tree_map_with_path(
        lambda path, x: None if _fits(x, fits.get(path)) else x, p, is_leaf=is_quantized
    )
    # another set of devices than the weights lie on (the trainer's): they are sent there once they are smaller
    is_there = placement is not None and set(placement.mesh.devices.flat) == _devices(p)
    targets = tuple(zip(dtypes, places if is_there else [()] * len(places), strict=True))
    made = _convert(rest, layer=layer, placement=placement, targets=targets, treedef=treedef, copy=not take)
    own = dict(jax.tree_util.tree_leaves_with_path(p, is_leaf=is_quantized))
    weights = [own[path] if x is None else x for (path, _), x in zip(paths, treedef.flatten_up_to(made), strict=True)]
    placed = [_placed(x, dict(each), placement) for x, each in zip(weights, places, strict=True)]
    return treedef.unflatten(placed)


Places = tuple[tuple[str, Any], ...]  # the sharding of each array of a weight, by the names of ParamSpec.arrays


def _places(placement: Placement | None, leaf: ParamSpec, dtype: np.dtype) -> Places:
    if placement:
        return tuple(array_shardings(placement, leaf, dtype).items())
    alone = SingleDeviceSharding(jax.local_devices()[0])
    return tuple((name, alone) for name in leaf.arrays(dtype))


def _placed(x: Any, places: dict[str, Any], placement: Placement | None) -> Any:
    if not is_quantized(x):
        return jax.device_put(x, places[""])
    return replace(x, arrays=jax.device_put(x.arrays, {name: places[name] for name in x.arrays}), placement=placement)


def _fits(x: Any, target: tuple[np.dtype, Places] | None) -> bool:
    if target is None or x.dtype != target[0]:
        return False
    arrays = x.arrays if is_quantized(x) else {"": x}
    return all(arrays[name].sharding.is_equivalent_to(place, arrays[name].ndim) for name, place in target[1])


@functools.partial(jax.jit, static_argnames=("layer", "placement", "targets", "treedef", "copy"))
def _convert(p: Params, *, layer: Layer | None, placement: Placement | None, targets: tuple, treedef: Any, copy: bool):
    """Cast and place each leaf by `targets`: its dtype, and its shardings, or none to leave it. None stays None."""

    def array(x: jax.Array, place: Any) -> jax.Array:
        x = jnp.copy(x) if copy else x
        return x if place is None else jax.lax.with_sharding_constraint(x, place)

    def one(x: Any, dtype: np.dtype, places: Places) -> Any:
        if x is None:
            return None
        x, found = x.astype(dtype), dict(places)
        if not is_quantized(x):
            return array(x, found.get(""))
        return replace(x, arrays={name: array(each, found.get(name)) for name, each in x.arrays.items()})

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
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_quantized)}
