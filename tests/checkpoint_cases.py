"""Helpers of the checkpoint tests, shared with their child processes: a state made from its step, and damage."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dovetail.io.checkpoint import Checkpoints


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    params: dict
    moments: tuple
    step: Any


def state(step: int, rows: int = 64) -> State:
    """Every value follows from the step, so that what is read back says which step wrote it."""
    wave = np.sin(np.arange(rows * 32, dtype=np.float32) + step).reshape(rows, 32)
    layers = tuple({"q": wave * (i + 1), "norm": wave[:, 0].astype(ml_dtypes.bfloat16)} for i in range(2))
    made = State({"layers": layers, "on": wave[0] > 0}, (wave + 1, None, ()), np.int32(step))
    return jax.tree.map(jnp.asarray, made)


def mesh_of(devices: int) -> Mesh:
    return Mesh(np.asarray(jax.devices()[:devices]), ("x",))


def target(like: Any, devices: int = 1) -> Any:
    """The same tree to restore into, its rows split over so many devices."""
    mesh = mesh_of(devices)

    def place(x):
        spec = PartitionSpec("x") if x.ndim and x.shape[0] % devices == 0 else PartitionSpec()
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(place, like)


def exact(a: Any, b: Any) -> bool:
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return jax.tree.structure(a) == jax.tree.structure(b) and all(
        x.dtype == y.dtype and np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in pairs
    )


def saved(checkpoints: Checkpoints, *steps: int, **options) -> Checkpoints:
    for step in steps:
        checkpoints.save(step, state(step), {"cursor": step * 10}, **options)
    checkpoints.wait()
    return checkpoints


def data_files(folder: Path) -> list[Path]:
    """The array data of a checkpoint, largest first."""
    return sorted(folder.glob("ocdbt.process_*/d/*"), key=lambda path: -path.stat().st_size)


def cut(folder: Path) -> None:
    with data_files(folder)[0].open("r+b") as file:
        file.truncate(file.seek(0, 2) // 2)


def flip(folder: Path) -> None:
    path = data_files(folder)[0]
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)
