"""Describe the contents of a checkpoint in a manifest, the last file written.

Its presence means the checkpoint is complete.

It has the caller's `meta`, the shape, dtype and digest of each array, and the size of each file, under a seal (a hash
of all that), which shows damage to the manifest itself.

A digest is taken on the device, and is the same for every layout over a mesh. Digests of saved and restored arrays are
compared, so that a bit that flips in a file, on the network or in host memory is detected without reading a file twice.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp

from dovetail.core.errors import CheckpointError, FileError

NAME = "manifest.json"
VERSION = 1
UNSIZED = ("_CHECKPOINT_METADATA", "commit_success.txt", NAME)  # Orbax writes the first two once more after us


class Damaged(FileError):
    """Report a checkpoint that is not what was written."""


class NotOurs(CheckpointError):
    """Report a checkpoint of another model or format, which is an error of the user and no damage."""


@dataclass(frozen=True)
class Leaf:
    """Describe one array."""

    shape: tuple[int, ...]
    dtype: str
    digest: int

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class Manifest:
    """Describe the contents of a checkpoint."""

    step: int
    meta: dict[str, Any]
    leaves: dict[str, Leaf]
    files: dict[str, int]  # the path within the folder -> bytes

    def write(self, folder: Any) -> None:
        """Write the manifest into a folder."""
        body = asdict(self) | {"version": VERSION}
        text = json.dumps(body | {"seal": _seal(body)})
        (folder / NAME).write_text(text)

    def check_files(self, folder: Any) -> None:
        """Raise Damaged for a truncated or missing file, before gigabytes of the others are read."""
        there = sizes(folder)
        for name, size in self.files.items():
            if there.get(name) != size:
                raise Damaged(f"{name} has {there.get(name, 'no')} bytes, and {size} were written")

    def check_target(self, target: dict[str, Any]) -> None:
        """Raise NotOurs unless the caller's arrays are the ones in the checkpoint."""
        for name in sorted(self.leaves.keys() ^ target.keys()):
            where, other = ("the checkpoint", "this run") if name in self.leaves else ("this run", "the checkpoint")
            raise NotOurs(_not_ours(self.step, f"{where} has {name} and {other} does not"))
        for name, leaf in self.leaves.items():
            wanted = Leaf(tuple(target[name].shape), str(target[name].dtype), 0)
            if str(leaf) != str(wanted):
                raise NotOurs(_not_ours(self.step, f"{name} is {leaf} in the checkpoint and {wanted} in this run"))

    def check_arrays(self, arrays: dict[str, jax.Array]) -> None:
        """Raise Damaged unless the arrays have the digests that were saved."""
        # One after the other: programs with collectives that run at once can starve each other on XLA's CPU threads.
        wrong = [name for name, array in arrays.items() if int(digest(array)) != self.leaves[name].digest]
        if wrong:
            more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
            raise Damaged(f"the bits of {wrong[0]}{more} are not those that were saved")


def read(folder: Any) -> Manifest:
    """Read the manifest of a folder; raise Damaged, or NotOurs for another format."""
    try:
        body = json.loads((folder / NAME).read_text())
        seal, version = body.pop("seal"), body["version"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged(f"{NAME} cannot be read ({error})") from error
    if seal != _seal(body):
        raise Damaged(f"{NAME} is not as it was written")
    if version != VERSION:
        raise NotOurs(f"{folder} is a checkpoint of format {version}; this dovetail reads format {VERSION}")
    leaves = {name: Leaf(tuple(x["shape"]), x["dtype"], x["digest"]) for name, x in body["leaves"].items()}
    return Manifest(body["step"], body["meta"], leaves, body["files"])


def sizes(folder: Any, within: str = "") -> dict[str, int]:
    """Return the bytes of every file below `folder`, except those that change after the manifest is written."""
    found: dict[str, int] = {}
    for path in folder.iterdir():  # folder by folder: paths that may lie in a bucket have no recursive glob
        if path.is_dir():
            found |= sizes(path, f"{within}{path.name}/")
        elif within + path.name not in UNSIZED:
            found[within + path.name] = path.stat().length
    return dict(sorted(found.items()))


def _seal(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _not_ours(step: int, what: str) -> str:
    return (
        f"the checkpoint of step {step} belongs to another model or optimizer: {what}; go back to the recipe it was "
        "made with, or start in a new run directory"
    )


_UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


def words(x: jax.Array) -> jax.Array:
    """Return the bit patterns of x's elements as uint32; elements of 8 bytes give a last dim of 2."""
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    width = _UNSIGNED.get(x.dtype.itemsize, jnp.uint32)
    return jax.lax.bitcast_convert_type(x, width).astype(jnp.uint32)


@jax.jit
def digest(x: jax.Array) -> jax.Array:
    """Return the sum [] uint32, modulo 2**32, of every word times an odd number that depends on its index.

    An odd factor has an inverse, so that a change of one word always shows; the index in the factor shows words that
    changed places. Other damage goes undetected once in 2**32 times.
    """
    bits = words(x)
    place = jnp.zeros(bits.shape, jnp.uint32)
    for dim in range(bits.ndim):  # a sum of iotas, and not a reshape of one: it needs no data from other devices
        stride = math.prod(bits.shape[dim + 1 :]) % 2**32
        place += jax.lax.broadcasted_iota(jnp.uint32, bits.shape, dim) * jnp.uint32(stride)
    place = (place ^ (place >> 16)) * jnp.uint32(0x7FEB352D)
    place = (place ^ (place >> 15)) * jnp.uint32(0x846CA68B)
    return jnp.sum(bits * ((place ^ (place >> 16)) | 1), dtype=jnp.uint32)
