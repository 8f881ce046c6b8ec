"""Meshes and placements: a mesh has axes, tensors have dims, and Rules map logical dims to mesh axes."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from dovetail.core.errors import UserError
from dovetail.core.spec import ParamSpec, tree_map

# From what talks least to what talks most: the last axes get the nearest devices, data alone crosses slices.
MESH_AXES = ("data", "fsdp", "expert", "context", "tensor")


@dataclass(frozen=True)
class Rules:
    """Map logical axes to mesh axes, as a tuple of pairs so that it can be hashed and be a static argument of jit."""

    table: tuple[tuple[str, tuple[str, ...]], ...]

    def axes_of(self, logical: str | None) -> tuple[str, ...]:
        """Return the mesh axes of a logical axis."""
        return dict(self.table).get(logical or "", ())


# Rows are split over every axis but context, which cuts along them, and tensor. Weights are split by their model dim
# over fsdp and context together (a device of either holds other tokens, so none needs to keep a weight whole), and by
# heads or width over tensor.
TRAIN = Rules((
    ("batch", ("data", "fsdp", "expert")), ("length", ("context",)),
    ("embed", ("fsdp", "context")),
    ("heads", ("tensor",)), ("kv_heads", ("tensor",)), ("mlp", ("tensor",)), ("vocab", ("tensor",)),
    ("experts", ("expert",)),
))  # fmt: skip
# A step's tokens are few and every device sees them all; only weights and pages are split.
SERVE = Rules((
    ("heads", ("tensor",)), ("kv_heads", ("tensor",)), ("mlp", ("tensor",)), ("vocab", ("tensor",)),
    ("experts", ("expert",)),
))  # fmt: skip


def make_mesh(axes: dict[str, int], devices: Sequence[Any] | None = None) -> Mesh:
    """Return a mesh with all of MESH_AXES; axes that are not given have size 1.

    On TPUs the axes follow the links between chips. If the devices come from several slices, the data axis is laid over
    the slices first, since the network between slices is far slower than the links within.
    """
    unknown = set(axes) - set(MESH_AXES)
    if unknown:
        raise UserError(f"mesh axes are {', '.join(MESH_AXES)}; got {', '.join(sorted(unknown))}")
    devices = list(devices if devices is not None else jax.devices())
    sizes = [axes.get(name, 1) for name in MESH_AXES]
    if math.prod(sizes) != len(devices):
        raise UserError(f"a mesh of {dict(axes)} needs {math.prod(sizes)} devices; there are {len(devices)}")
    return Mesh(lay_out(sizes, devices), MESH_AXES)


def lay_out(sizes: Sequence[int], devices: Sequence[Any]) -> np.ndarray:
    """Return the devices in an array of shape `sizes`.

    Devices other than TPUs keep their order, which is host by host.
    """
    if devices[0].platform != "tpu" or not _is_box(devices):
        return np.asarray(devices).reshape(sizes)
    slices = num_slices(devices)
    if slices == 1:
        return _along_links(sizes, devices)
    if sizes[0] % slices:
        raise UserError(
            f"the data axis must be a multiple of the {slices} slices, for it alone crosses from one to another; "
            f"got data={sizes[0]}",
            param="data",
        )
    within, across = [sizes[0] // slices, *sizes[1:]], [slices] + [1] * (len(sizes) - 1)
    return mesh_utils.create_hybrid_device_mesh(within, across, devices, allow_split_physical_axes=True)


def _along_links(sizes: Sequence[int], devices: Sequence[Any]) -> np.ndarray:
    try:
        return mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
    except TypeError:  # it loses factors of a side such as 28 = 2 x 2 x 7, one of a whole v5p pod, and finds no way
        return _by_hand(sizes, devices)


def _by_hand(sizes: Sequence[int], devices: Sequence[Any]) -> np.ndarray:
    """Lay out devices as jax does: on each side of the torus the axis with the most traffic gets neighbours."""
    places = {(*device.coords, getattr(device, "core_on_chip", 0)): device for device in devices}
    first = [min(side) for side in zip(*places, strict=True)]
    shape = tuple(max(side) - low + 1 for side, low in zip(zip(*places, strict=True), first, strict=True))
    box = np.empty(shape, object)
    for place, device in places.items():
        box[tuple(at - low for at, low in zip(place, first, strict=True))] = device
    taken = np.array(assign(shape, tuple(sizes)))  # [axis, side]
    axes, sides = taken.shape
    order = [side * axes + axis for axis in range(axes) for side in range(sides)]
    return box.reshape(taken.T.reshape(-1)).transpose(order).reshape(sizes)


def num_slices(devices: Sequence[Any]) -> int:
    """Return the number of TPU slices that these devices come from; 1 for other devices."""
    return len({getattr(device, "slice_index", 0) for device in devices if device.platform == "tpu"}) or 1


def _is_box(devices: Sequence[Any]) -> bool:
    """Return whether the devices of each slice fill a box of chips; a subset of a slice may not."""
    slices: dict[int, set[tuple[int, ...]]] = {}
    for device in devices:
        slices.setdefault(getattr(device, "slice_index", 0), set()).add(tuple(device.coords))
    extents = [[max(side) - min(side) + 1 for side in zip(*chips, strict=True)] for chips in slices.values()]
    return all(math.prod(e) == len(c) for e, c in zip(extents, slices.values(), strict=True))


@dataclass(frozen=True)
class Placement:
    """Hold a mesh and the rules to lay out tensors on it."""

    mesh: Mesh
    rules: Rules

    @property
    def platform(self) -> str:
        """Return the platform of the devices; an AbstractMesh names the one that it stands for."""
        mesh: Any = self.mesh
        return mesh.abstract_device.platform if isinstance(mesh, AbstractMesh) else mesh.devices.flat[0].platform

    def partition(self, axes: Sequence[str | None], shape: Sequence[int]) -> PartitionSpec:
        """Return the partition of a tensor.

        Each mesh axis is used once. A dim that its mesh axes do not divide is not split (2 KV heads on 8 devices).
        """
        used: set[str] = set()
        parts: list[tuple[str, ...] | None] = []
        for logical, dim in zip(axes, shape, strict=True):
            names = tuple(n for n in self.rules.axes_of(logical) if n not in used and self.mesh.shape[n] > 1)
            fits = bool(names) and dim % math.prod(self.mesh.shape[n] for n in names) == 0
            parts.append(names if fits else None)
            used.update(names if fits else ())
        return PartitionSpec(*parts)

    def sharding(self, axes: Sequence[str | None], shape: Sequence[int]) -> NamedSharding:
        """Return the sharding of a tensor with these logical axes and this shape."""
        return NamedSharding(self.mesh, self.partition(axes, shape))

    def shardings(self, specs: Any) -> Any:
        """Return the shardings of a tree of ParamSpecs."""
        return tree_map(lambda s: self.sharding(s.axes, s.shape), specs)

    def size(self, logical: str) -> int:
        """Return the number of devices that a logical axis is split over."""
        return math.prod(self.mesh.shape[n] for n in self.rules.axes_of(logical))

    def __reduce__(self) -> tuple:
        """Pickle devices by their ids: the compiled programs on disk name the placement of quantised weights."""
        if isinstance(self.mesh, AbstractMesh):
            return Placement, (self.mesh, self.rules)
        ids = np.vectorize(lambda device: device.id)(self.mesh.devices)
        return _unpickled, (ids, self.mesh.axis_names, self.mesh.axis_types, self.rules)


def _unpickled(ids: np.ndarray, names: tuple[str, ...], types: tuple, rules: Rules) -> Placement:
    known = {device.id: device for device in jax.devices()}
    return Placement(Mesh(np.vectorize(known.__getitem__, otypes=[object])(ids), names, axis_types=types), rules)


def param_sharding(placement: Placement | None, spec: ParamSpec) -> NamedSharding | None:
    """Return the sharding of a parameter; None without a placement."""
    return placement.sharding(spec.axes, spec.shape) if placement else None


def array_shardings(placement: Placement, spec: ParamSpec, dtype: Any) -> dict[str, NamedSharding]:
    """Return the shardings of the arrays that hold a weight (ParamSpec.arrays).

    A quantised weight is split along its input only between groups or blocks.
    """
    arrays = spec.arrays(dtype)
    if spec.format is None:
        return {"": placement.sharding(spec.axes, spec.shape)}
    out, size = spec.rows
    axes = spec.axes[: len(out) + 1]
    units = placement.partition(axes, (*out, size // spec.format.unit))
    axes = axes if units[-1] else (*axes[:-1], None)
    return {name: placement.sharding(axes, shape) for name, (shape, _) in arrays.items()}


def constrain(x: jax.Array, placement: Placement | None, *axes: str | None) -> jax.Array:
    """Constrain an activation's layout; without a placement (one device) return it unchanged."""
    if placement is None:
        return x
    return jax.lax.with_sharding_constraint(x, placement.sharding(axes, x.shape))


def state_shardings(optimizer: Any, params: Any, shardings: Any) -> Any:
    """Return shardings for the tree of `optimizer.init(params)`.

    A leaf that belongs to a weight, by the end of its path, is sharded as that weight; a factor of it, which lacks one
    dim, by the remaining dims; counters and everything else are replicated.

    Args:
        optimizer: The optimizer (optax.GradientTransformation).
        params: The weights, concrete or abstract.
        shardings: The weights' shardings.
    """
    placed = {
        path: (leaf.shape, sharding)
        for (path, leaf), sharding in zip(
            jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(shardings), strict=True
        )
    }
    mesh = next(iter(placed.values()))[1].mesh

    def place(path: tuple, leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        owner = next((placed[path[i:]] for i in range(len(path)) if path[i:] in placed), None)
        return NamedSharding(mesh, _partition(leaf.shape, *owner) if owner else PartitionSpec())

    return jax.tree_util.tree_map_with_path(place, jax.eval_shape(optimizer.init, params))


def _partition(shape: tuple[int, ...], of_shape: tuple[int, ...], sharding: NamedSharding) -> PartitionSpec:
    parts = (*sharding.spec, *(None,) * (len(of_shape) - len(sharding.spec)))
    if shape == of_shape:
        return sharding.spec
    for gone in range(len(of_shape)):
        if shape == of_shape[:gone] + of_shape[gone + 1 :]:
            return PartitionSpec(*parts[:gone], *parts[gone + 1 :])
    return PartitionSpec()


@functools.lru_cache(maxsize=8192)
def assign(shape: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Return, for each mesh axis, how many devices it takes along each side of a torus of `shape`.

    It follows jax's mesh_utils: the axis with the most traffic first, whole sides before parts of them. Meshes are made
    and plans are timed by this one decision.
    """
    whole = _assign_whole(shape, sizes)
    if whole is not None:
        return whole
    taken = [(1,) * len(shape)] * len(sizes)
    for i in reversed(range(len(sizes))):
        before = tuple(math.prod(later[side] for later in taken[i + 1 :]) for side in range(len(shape)))
        free = tuple(side // used for side, used in zip(shape, before, strict=True))
        ways = list(_ways(free, sizes[i]))
        if not ways:
            raise UserError(f"a mesh of {' x '.join(map(str, sizes))} cannot be laid along sides {shape}")
        taken[i] = max(ways, key=functools.partial(_preference, shape, before))
    return tuple(taken)


def _assign_whole(shape: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[tuple[int, ...], ...] | None:
    """Assign without splitting a side, the axis with the most traffic first; None if that is not possible."""
    free, taken = set(range(len(shape))), [(1,) * len(shape)] * len(sizes)
    for i in reversed(range(len(sizes))):
        found = next(
            (
                chosen
                for many in range(len(free), 0, -1)
                for chosen in itertools.combinations(sorted(free), many)
                if math.prod(shape[side] for side in chosen) == sizes[i]
            ),
            None,
        )
        if found is None and sizes[i] > 1:
            return None
        free -= set(found or ())
        taken[i] = tuple(shape[side] if side in (found or ()) else 1 for side in range(len(shape)))
    return tuple(taken)


def _ways(free: tuple[int, ...], size: int) -> Iterator[tuple[int, ...]]:
    """Yield all parts of the free sides whose product is `size`."""
    if not free:
        if size == 1:
            yield ()
        return
    for part in range(1, free[0] + 1):
        if free[0] % part == 0 and size % part == 0:
            for rest in _ways(free[1:], size // part):
                yield (part, *rest)


def _preference(shape: tuple[int, ...], before: tuple[int, ...], way: tuple[int, ...]) -> tuple:
    """Return jax's sort key: product of whole sides, their number, sides split already, first sides."""
    whole = [part for part, side in zip(way, shape, strict=True) if part == side]
    cut = math.prod(part for part, used in zip(way, before, strict=True) if used > 1)
    return math.prod(whole), sum(part > 1 for part in whole), cut, way
