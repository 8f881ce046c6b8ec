"""Read a Hugging Face folder of safetensors by memory map, and write one shard by shard.

`read` returns a view of the mapped file, so that only slices that are used leave the disk.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import ml_dtypes
import numpy as np

from dovetail.core.errors import CheckpointError, MissingFileError
from dovetail.core.files import umask

DTYPES = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16,
    "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8, "U8": np.uint8, "BOOL": np.bool_,
    "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2, "F8_E8M0": ml_dtypes.float8_e8m0fnu,
}  # fmt: skip
INDEX = "model.safetensors.index.json"


class SafetensorFolder:
    """Read the tensors of a checkpoint folder by Hugging Face's names."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self._where: dict[str, tuple[Path, tuple[int, ...], np.dtype, int]] = {}
        self._maps: dict[Path, mmap.mmap] = {}
        repeated = []
        for path in self._files():
            for name, shape, dtype, offset in _read_header(path):
                if name in self._where:
                    repeated.append(f"{name} (in {self._where[name][0].name} and {path.name})")
                self._where[name] = path, shape, dtype, offset
        if repeated:
            raise CheckpointError(f"{self.folder}: tensors stored twice: {', '.join(sorted(repeated))}")

    def tensors(self) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        """Return (shape, dtype) by name, without reading a tensor."""
        return {name: (shape, dtype) for name, (_, shape, dtype, _) in self._where.items()}

    def read(self, name: str) -> np.ndarray:
        """Return a tensor as a read-only view of the file."""
        path, shape, dtype, offset = self._where[name]
        if path not in self._maps:
            with open(path, "rb") as file:
                self._maps[path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        count = int(np.prod(shape, dtype=np.int64))
        return np.frombuffer(self._maps[path], dtype, count, offset).reshape(shape)

    def _files(self) -> list[Path]:
        """Return the files that the index names; without an index, every safetensors file."""
        index = self.folder / INDEX
        if not index.exists():
            files = sorted(self.folder.glob("*.safetensors"))
            if not files:
                raise MissingFileError(f"{self.folder} holds no *.safetensors file")
            return files
        try:
            names = sorted({str(file) for file in json.loads(index.read_text())["weight_map"].values()})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{index} is not a safetensors index: {error}") from error
        outside = [n for n in names if n in ("", ".", "..") or {"/", "\\", "\0"} & set(n)]
        if outside:
            example = "such as model-00001-of-00002.safetensors"
            raise CheckpointError(f"{index} must name files of its own folder, {example}; got {outside[0]!r}")
        missing = [n for n in names if not (self.folder / n).exists()]
        if missing:
            raise MissingFileError(f"{self.folder}: {INDEX} names files that are not there: {', '.join(missing)}")
        return [self.folder / n for n in names]


def _read_header(path: Path) -> Iterator[tuple[str, tuple[int, ...], np.dtype, int]]:
    """Yield (name, shape, dtype, byte offset) of each tensor; the library checks the file but gives no offsets."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "numpy"), open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
    except (SafetensorError, OSError, ValueError) as error:
        size = path.stat().st_size
        raise CheckpointError(
            f"{path} is not a whole safetensors file ({size:,} bytes: {error}); download or copy it again"
        ) from error
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] not in DTYPES:
            raise CheckpointError(f"{path}: tensor {name} has dtype {entry['dtype']}, which is not supported")
        dtype = np.dtype(DTYPES[entry["dtype"]])
        yield name, tuple(entry["shape"]), dtype, 8 + length + entry["data_offsets"][0]


def write_shards(folder: Path, tensors: Iterable[tuple[str, int, np.ndarray]], max_shard_bytes: int) -> Iterator[str]:
    """Write (name, bytes, array) in order, a shard at a time, and yield each name once it is taken.

    At most one shard is in memory.

    Args:
        folder: The folder, which exists.
        tensors: (name, bytes, array) of each tensor.
        max_shard_bytes: The size of the largest file; if there are several, they have an index.
    """
    from safetensors.numpy import save_file

    shards: list[list[str]] = []
    pending: dict[str, np.ndarray] = {}
    size = total = 0

    def flush() -> None:
        shards.append(list(pending))
        part = _part(folder, len(shards))
        save_file(pending, part, metadata={"format": "pt"})
        part.chmod(0o666 & ~umask())  # the library's is 0600
        pending.clear()

    for name, nbytes, array in tensors:
        if pending and size + nbytes > max_shard_bytes:
            flush()
            size = 0
        pending[name] = np.ascontiguousarray(array).reshape(array.shape)  # it gives a scalar a dim
        size, total = size + nbytes, total + nbytes
        yield name
    flush()
    _name_shards(folder, shards, total)


def _part(folder: Path, number: int) -> Path:
    return folder / f"part-{number:05d}.safetensors"


def _name_shards(folder: Path, shards: list[list[str]], total: int) -> None:
    if len(shards) == 1:
        os.replace(_part(folder, 1), folder / "model.safetensors")
        return
    weight_map = {}
    for i, names in enumerate(shards, 1):
        final = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        os.replace(_part(folder, i), folder / final)
        weight_map |= dict.fromkeys(names, final)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
