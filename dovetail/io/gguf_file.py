"""Read the bytes of a `.gguf` file: its metadata, its table of tensors, and a tensor's raw rows by memory map.

The `gguf` package has its own reader, but it makes several numpy views for every token of the vocabulary (seconds for a
small model, where this takes milliseconds) and raises a numpy traceback for a damaged file.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dovetail.core.errors import CheckpointError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMS = 4
QUANT_TYPES = (
    "F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1",
    "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS",
)  # fmt: skip

_STRING, _ARRAY = 8, 9
_SCALARS = dict(enumerate(("<u1", "<i1", "<u2", "<i2", "<u4", "<i4", "<f4", "?"))) | {10: "<u8", 11: "<i8", 12: "<f8"}


@dataclass(frozen=True)
class TensorInfo:
    """Describe one tensor. `shape` is row-major, [out, in]: GGUF itself writes it reversed."""

    name: str
    type: str
    shape: tuple[int, ...]
    row_bytes: int
    offset: int

    @property
    def nbytes(self) -> int:
        """Return the bytes of the tensor."""
        return math.prod(self.shape[:-1]) * self.row_bytes


class GgufFile:
    """Hold `metadata`, `tensors` and `raw(name)`; every error is a CheckpointError that names the file."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._data = _map(self.path)
        cursor = _Cursor(self._data, self.path, at=len(MAGIC))
        _check_version(self.path, cursor.u32())
        tensors, pairs = cursor.u64(), cursor.u64()
        self.metadata: dict[str, Any] = {}
        for _ in range(pairs):
            key = cursor.text()
            self.metadata[key] = cursor.value(cursor.u32())
        table = [_tensor_info(cursor) for _ in range(tensors)]
        start = _align(cursor.at, self._alignment())
        self.tensors = {info.name: info for info in table}
        self._start = start
        self._check(table)

    def raw(self, name: str) -> np.ndarray:
        """Return the stored bytes, uint8 [..., row_bytes], as a read-only view; quantised blocks lie along a row."""
        info = self.tensors[name]
        start = self._start + info.offset
        return self._data[start : start + info.nbytes].reshape(*info.shape[:-1], info.row_bytes)

    def _alignment(self) -> int:
        value = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(value, int) or value <= 0 or value & (value - 1):
            raise CheckpointError(f"{self.path}: general.alignment must be a power of two; it is {value!r}.")
        return value

    def _check(self, table: list[TensorInfo]) -> None:
        if len(self.tensors) != len(table):
            raise CheckpointError(f"{self.path}: two tensors in it share one name; the file is damaged.")
        for info in table:
            end = self._start + info.offset + info.nbytes
            if end > len(self._data):
                raise CheckpointError(
                    f"{self.path} is truncated: tensor {info.name!r} ends at byte {end} and the file has "
                    f"{len(self._data)}. Download it again."
                )
        if self.metadata.get("split.count", 1) not in (0, 1):
            raise CheckpointError(
                f"{self.path} is one of {self.metadata['split.count']} shards; join them first with "
                f"`llama-gguf-split --merge`."
            )


def _map(path: Path) -> np.ndarray:
    with path.open("rb") as file:
        magic = file.read(len(MAGIC))
    if magic != MAGIC:
        came = f"it begins with {magic!r}" if magic else "it is empty"
        raise CheckpointError(f"{path} is not a GGUF file: {came}, where {MAGIC!r} was expected.")
    return np.memmap(path, mode="r")


def _check_version(path: Path, version: int) -> None:
    # A version is a small number: when its low half is empty the bytes are in the other order.
    if version and not version & 0xFFFF:
        raise CheckpointError(
            f"{path} is a big-endian GGUF file; convert it to little-endian with `gguf-convert-endian`."
        )
    if version not in VERSIONS:
        expected = " or ".join(map(str, VERSIONS))
        raise CheckpointError(
            f"{path} is GGUF version {version}; version {expected} was expected. Convert the model again."
        )


def _align(position: int, alignment: int) -> int:
    return -(-position // alignment) * alignment


class _Cursor:
    """Walk the header; a read past the end means that the file is truncated."""

    def __init__(self, data: np.ndarray, path: Path, at: int):
        self.bytes, self.path, self.at = data.data, path, at

    def take(self, size: int) -> memoryview:
        end = self.at + size
        if end > len(self.bytes):
            raise CheckpointError(
                f"{self.path} is truncated: its header runs past the end, at byte {len(self.bytes)}. Download it again."
            )
        piece = self.bytes[self.at : end]
        self.at = end
        return piece

    def u32(self) -> int:
        return struct.unpack("<I", self.take(4))[0]

    def u64(self) -> int:
        return struct.unpack("<Q", self.take(8))[0]

    def text(self) -> str:
        start = self.at
        try:
            return str(self.take(self.u64()), "utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(
                f"{self.path}: the text at byte {start} is not UTF-8; the file is damaged."
            ) from error

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            return self._array(self.u32(), self.u64())
        scalar = self._numbers(kind, 1)[0]
        # A float32 is given its shortest decimal form: 1e-05, as in config.json, not 9.999999747378752e-06.
        return float(str(scalar)) if scalar.dtype == np.float32 else scalar.item()

    def _array(self, kind: int, count: int) -> list[Any]:
        if kind == _STRING:
            return [self.text() for _ in range(count)]
        return self._numbers(kind, count).tolist()

    def _numbers(self, kind: int, count: int) -> np.ndarray:
        if kind not in _SCALARS:
            raise CheckpointError(f"{self.path}: a metadata value near byte {self.at} has the unknown type {kind}.")
        dtype = np.dtype(_SCALARS[kind])
        return np.frombuffer(self.take(count * dtype.itemsize), dtype)


def _tensor_info(cursor: _Cursor) -> TensorInfo:
    name, dims = cursor.text(), cursor.u32()
    if not 1 <= dims <= MAX_DIMS:
        raise CheckpointError(f"{cursor.path}: tensor {name!r} has {dims} dimensions; 1 to {MAX_DIMS} were expected.")
    shape = tuple(cursor.u64() for _ in range(dims))[::-1]
    kind, offset = cursor.u32(), cursor.u64()
    type_name, block, block_bytes = _quant(cursor.path, name, kind)
    if 0 in shape:
        raise CheckpointError(f"{cursor.path}: tensor {name!r} has the empty shape {shape}; the file is damaged.")
    if shape[-1] % block:
        raise CheckpointError(
            f"{cursor.path}: a row of tensor {name!r} has {shape[-1]} values; {type_name} needs a multiple of {block}."
        )
    return TensorInfo(name, type_name, shape, shape[-1] // block * block_bytes, offset)


def _quant(path: Path, tensor: str, kind: int) -> tuple[str, int, int]:
    """Return a type's name, and the number of values and bytes of one of its blocks."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    known = {int(each): each.name for each in GGMLQuantizationType}
    name = known.get(kind, f"number {kind}")
    if name not in QUANT_TYPES:
        raise CheckpointError(
            f"{path}: tensor {tensor!r} is stored as {name}, which is not supported; take a file of one of these "
            f"types: {', '.join(QUANT_TYPES)}."
        )
    return name, *GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
