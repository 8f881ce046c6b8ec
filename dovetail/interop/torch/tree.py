"""Make pytrees of what Hugging Face models take and return, and convert leaves between torch and jax.

A `ModelOutput` keeps its class, so `outputs.logits` works on either side of `jax.jit`. A cache is flattened into the
tensors of its layers; everything else of it (lengths, flags, dtypes) is static.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dovetail.interop.torch.environment import environment

_registered: set[type] = set()


def to_torch(tree: Any) -> Any:
    """Return the tree with its arrays, and torch tensors of the CPU, as tensors of torchax."""
    import torch
    from torchax.tensor import Tensor, View

    env = environment()

    def convert(leaf: Any) -> Any:
        if isinstance(leaf, jax.Array):
            return Tensor(leaf, env)
        if isinstance(leaf, np.ndarray | np.generic):
            return Tensor(jnp.asarray(leaf), env)
        if isinstance(leaf, torch.Tensor) and not isinstance(leaf, Tensor | View):
            return Tensor(env.t2j_copy(leaf), env)
        return leaf

    return jax.tree.map(convert, tree)


def to_jax(tree: Any) -> Any:
    """Return the tree with its tensors as jax arrays."""
    import torch
    from torchax.tensor import Tensor, View

    env = environment()

    def convert(leaf: Any) -> Any:
        if isinstance(leaf, Tensor | View):
            return leaf.jax()
        return env.t2j_copy(leaf) if isinstance(leaf, torch.Tensor) else leaf

    register_hugging_face()
    return jax.tree.map(convert, tree)


def register_hugging_face() -> None:
    """Register the outputs and caches of transformers as pytrees of jax, once it has been imported."""
    if "transformers" not in sys.modules:
        return
    from transformers.cache_utils import Cache
    from transformers.utils.generic import ModelOutput

    for base, flatten, unflatten in ((ModelOutput, _flatten_output, _unflatten_output), (Cache, *_CACHE)):
        for kind in _kinds(base):
            if kind not in _registered:
                jax.tree_util.register_pytree_node(kind, flatten, _bind(unflatten, kind))
                _registered.add(kind)


def _kinds(base: type) -> Iterator[type]:
    yield base
    for kind in base.__subclasses__():
        yield from _kinds(kind)


def _bind(unflatten: Any, kind: type) -> Any:
    return lambda aux, children: unflatten(kind, aux, children)


def _flatten_output(output: Any) -> tuple[tuple[Any, ...], tuple[str, ...]]:
    return tuple(output.values()), tuple(output.keys())


def _unflatten_output(kind: Any, keys: tuple[str, ...], children: Any) -> Any:
    output = kind.__new__(kind)  # `__init__` checks that the leaves are tensors, and while tracing they need not be
    OrderedDict.__init__(output)
    for name in getattr(kind, "__dataclass_fields__", ()):
        object.__setattr__(output, name, None)
    for key, value in zip(keys, children, strict=True):
        OrderedDict.__setitem__(output, key, value)
        object.__setattr__(output, key, value)
    return output


def _flatten_cache(cache: Any) -> tuple[Any, Any]:
    layers = [(type(layer), *_split(vars(layer))) for layer in cache.layers]
    static = {name: value for name, value in vars(cache).items() if name != "layers"}
    aux = (_frozen(static), tuple((kind, _frozen(attributes)) for kind, _, attributes in layers))
    return tuple(tensors for _, tensors, _ in layers), aux


def _unflatten_cache(kind: Any, aux: Any, children: Any) -> Any:
    static, kinds = aux
    cache = kind.__new__(kind)
    vars(cache).update(static)
    cache.layers = []
    for (layer_kind, attributes), tensors in zip(kinds, children, strict=True):
        layer = layer_kind.__new__(layer_kind)
        vars(layer).update(attributes)
        vars(layer).update(tensors)
        cache.layers.append(layer)
    return cache


_CACHE = (_flatten_cache, _unflatten_cache)


def _split(attributes: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a layer's tensors, and its other attributes."""
    import torch

    tensors = {name: value for name, value in attributes.items() if isinstance(value, jax.Array | torch.Tensor)}
    return tensors, {name: value for name, value in attributes.items() if name not in tensors}


def _frozen(attributes: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Return the attributes as a static part of a pytree, which jax compares and hashes."""
    return tuple(sorted(attributes.items()))
