"""Declare each weight once, as a ParamSpec; everything known before an array exists follows from the tree of specs.

From a tree of specs come: random weights (`init`), shapes without memory (`abstract`), byte counts (`num_bytes`), FLOPs
per token (`matmul_flops`), shardings (core.mesh) and the table of Hugging Face names (`Stored`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dovetail.core.formats import Format


@dataclass(frozen=True)
class Stored:
    """Say where a Hugging Face checkpoint keeps a weight.

    With several names (one per expert), each tensor is one element of our leading dim. A tensor that holds two of our
    weights (gate and up, say) is cut: viewed as `view`, then indexed by `at`. `transposed` ones are kept [in, out].
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    view: tuple[int, ...] = ()
    at: tuple[slice, ...] = ()
    transposed: bool = False

    def cut(self, tensor: np.ndarray) -> np.ndarray:
        """Return the part of a stored tensor that is this weight: a view, so writing to it writes into the tensor."""
        whole = tensor.reshape(self.view or tensor.shape)
        part = whole[self.at] if self.at else whole  # of a scalar, an index would make a copy
        return part.swapaxes(-1, -2) if self.transposed else part

    def cut_rows(self, packed: np.ndarray) -> np.ndarray:
        """Do as `cut` with an array of a quantised tensor (core.formats).

        Its rows are the weight's outputs, also if the tensor would be `transposed` as a plain one.
        """
        if self.transposed:
            *outer, _, rows = self.at or (slice(None),) * len(self.shape)
            return packed[(*outer, rows)]
        assert len(self.at) < len(self.view or self.shape), "rows are not cut"
        whole = packed.reshape(*self.view[:-1], packed.shape[-1]) if self.view else packed
        return whole[self.at] if self.at else whole


@dataclass(frozen=True)
class ParamSpec:
    """Declare one weight: its shape, a logical axis for each dim, how to initialise it, where a checkpoint keeps it.

    `active` is the share of its elements that one token multiplies (0 for a look-up table or a norm, k/E for experts).
    `format` is how it is held in memory; None for a plain array.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    stored: Stored
    init: str = "normal"
    active: float = 1.0
    dtype: str | None = None  # None: the model's dtype
    format: Format | None = None

    def __post_init__(self):
        assert len(self.shape) == len(self.axes), (self.shape, self.axes)

    @property
    def size(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)

    @property
    def input_dims(self) -> int:
        """Return how many of the last dims are the input's."""
        size, most = self.stored.shape[-1], len(self.shape)
        found = (n for n in range(1, most) if math.prod(self.shape[-n:]) == size)
        return 1 if self.axes[0] == "experts" else next(found, 1)

    @property
    def rows(self) -> tuple[tuple[int, ...], int]:
        """Return the output's dims and the values of a row."""
        cut = len(self.shape) - self.input_dims
        return self.shape[:cut], math.prod(self.shape[cut:])

    def arrays(self, dtype: Any) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        """Return the shapes and dtypes of the arrays that hold the weight in a model of `dtype`, by name.

        A plain array has the name "".
        """
        if self.format is None:
            return {"": (self.shape, leaf_dtype(self, dtype))}
        out, size = self.rows
        return {name: ((*out, length), kind) for name, (length, kind) in self.format.lengths(size).items()}


def in_one_tensor(specs: dict[str, ParamSpec], names: Iterable[str]) -> dict[str, ParamSpec]:
    """Return the specs with those of `names` (and biases) that share a tensor's name cut from it by rows."""
    names, specs = list(names), dict(specs)
    sharing: dict[tuple[str, ...], list[str]] = {}
    for name in [*names, *(f"{name}_bias" for name in names)]:
        if name in specs:
            sharing.setdefault(specs[name].stored.names, []).append(name)
    for members in (found for found in sharing.values() if len(found) > 1):
        rows = [specs[name].stored.shape[0] for name in members]
        for i, name in enumerate(members):
            start, own = sum(rows[:i]), specs[name].stored
            whole = replace(own, shape=(sum(rows), *own.shape[1:]), at=(slice(start, start + rows[i]),))
            specs[name] = replace(specs[name], stored=whole)
    return specs


def is_spec(x: Any) -> bool:
    """Return whether `x` is a ParamSpec, for `is_leaf`."""
    return isinstance(x, ParamSpec)


def tree_map(fn: Callable, specs: Any, *rest: Any) -> Any:
    """Map a function over a tree of specs."""
    return jax.tree.map(fn, specs, *rest, is_leaf=is_spec)


def leaves(specs: Any) -> list[tuple[str, ParamSpec]]:
    """Return (path, spec) pairs; a path reads like `layers.0.attn.q`."""
    flat, _ = jax.tree_util.tree_flatten_with_path(specs, is_leaf=is_spec)
    return [(path_name(path), spec) for path, spec in flat]


def path_name(path: tuple) -> str:
    """Return a jax key path as dotted text."""
    return ".".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path)


def leaf_dtype(spec: ParamSpec, dtype: Any) -> np.dtype:
    """Return the dtype of a weight in a model of `dtype`."""
    return jnp.dtype(spec.dtype or dtype)


def abstract(specs: Any, dtype: Any) -> Any:
    """Return the shapes and dtypes of a tree of specs."""
    return tree_map(lambda s: jax.ShapeDtypeStruct(s.shape, leaf_dtype(s, dtype)), specs)


def num_params(specs: Any) -> int:
    """Return the number of parameters."""
    return sum(spec.size for _, spec in leaves(specs))


def num_bytes(specs: Any, dtype: Any) -> int:
    """Return the bytes of the weights in a model of `dtype`."""
    arrays = (array for _, one in leaves(specs) for array in one.arrays(dtype).values())
    return sum(math.prod(shape) * kind.itemsize for shape, kind in arrays)


def held_bytes(arrays: Any) -> int:
    """Return the bytes that a tree of arrays, concrete or abstract, takes on one of its devices."""

    def local(x: Any) -> tuple[int, ...]:
        return x.sharding.shard_shape(x.shape) if x.sharding else x.shape

    return sum(math.prod(local(x)) * x.dtype.itemsize for x in jax.tree.leaves(arrays))


def matmul_flops(specs: Any) -> float:
    """Return the FLOPs of one token's forward pass in the products with weights (a multiply and an add per element)."""
    return sum(2.0 * spec.size * spec.active for _, spec in leaves(specs))


def init(specs: Any, key: jax.Array, dtype: Any, std: float = 0.02, shardings: Any = None) -> Any:
    """Return random weights, laid out as `shardings` says.

    The randomness of a leaf depends only on its index in the tree, not on the other shapes or the layout.
    """
    flat, treedef = jax.tree.flatten(specs, is_leaf=is_spec)
    places = [None] * len(flat) if shardings is None else treedef.flatten_up_to(shardings)
    arrays = [
        _init_leaf(jax.random.fold_in(key, i), spec.shape, leaf_dtype(spec, dtype), spec.init, std, place)
        for i, (spec, place) in enumerate(zip(flat, places, strict=True))
    ]
    return jax.tree.unflatten(treedef, arrays)


# Compiled once per shape: one program for the whole tree took a minute to compile for 32 layers.
@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4, 5))
def _init_leaf(
    key: jax.Array, shape: tuple[int, ...], dtype: np.dtype, kind: str, std: float, sharding: Any = None
) -> jax.Array:
    if kind == "normal":
        leaf = (jax.random.normal(key, shape, jnp.float32) * std).astype(dtype)
    elif kind.startswith("uniform:"):  # between minus and plus the number after the colon
        bound = float(kind.partition(":")[2])
        leaf = jax.random.uniform(key, shape, jnp.float32, -bound, bound).astype(dtype)
    elif kind.startswith("normal:"):  # with the standard deviation after the colon
        leaf = (jax.random.normal(key, shape, jnp.float32) * float(kind.partition(":")[2])).astype(dtype)
    elif kind.startswith("constant:"):
        leaf = jnp.full(shape, float(kind.partition(":")[2]), dtype)
    elif kind == "sincos2d":
        leaf = sincos2d(*shape).astype(dtype)
    else:
        leaf = {"zeros": jnp.zeros, "ones": jnp.ones}[kind](shape, dtype)
    return leaf if sharding is None else jax.lax.with_sharding_constraint(leaf, sharding)


def sincos2d(patches: int, dim: int) -> jax.Array:
    """Return the positions [patches, dim] of a square of patches, row by row.

    A quarter of the numbers each is the sine and the cosine of the column, and of the row, at dim / 4 frequencies from
    1 to 1/10,000.
    """
    side, count = math.isqrt(patches), dim // 4
    assert side**2 == patches and dim % 4 == 0, (patches, dim)
    frequencies = 1 / 10_000 ** (jnp.arange(count) / max(1, count - 1))
    rows, columns = jnp.divmod(jnp.arange(patches), side)
    angles = [axis[:, None] * frequencies for axis in (columns, rows)]
    return jnp.concatenate([turn(angle) for angle in angles for turn in (jnp.sin, jnp.cos)], axis=1)
