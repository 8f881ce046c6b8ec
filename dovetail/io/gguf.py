"""A `.gguf` file presented as a Hugging Face checkpoint, so that one loader serves both.

Weights come back under their Hugging Face names, in Hugging Face's layout ([out, in]) and row order, dequantised. Only
the rows asked for are dequantised: blocks lie along a row, so picking an expert, putting rows back in order and slicing
rows are all done on the packed bytes.
"""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from dovetail.core.errors import MissingPackageError, UserError
from dovetail.io.gguf_config import hf_config
from dovetail.io.gguf_file import GgufFile
from dovetail.io.gguf_names import StoredWeight, stored_weights

if TYPE_CHECKING:
    from dovetail.io.tokenizer import Tokenizer

# Stored as they are; every other type is dequantised to float32.
_PLAIN = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
# Dequantising makes several temporaries of its input's size: at this many values at a time they stay small.
_CHUNK = 1 << 22


class GgufCheckpoint:
    """The weights, config and tokenizer of one `.gguf` file."""

    def __init__(self, path: str | Path):
        if importlib.util.find_spec("gguf") is None:
            raise MissingPackageError(f"Reading {path} needs the `gguf` package: pip install gguf")
        self._file = GgufFile(path)
        self.path = self._file.path
        self.config: dict[str, Any] = hf_config(self._file)
        self._sources = stored_weights(self._file, self.config)

    def tensors(self) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        """HF name -> (shape, dtype), without reading a weight."""
        return {name: self._describe(source) for name, source in self._sources.items()}

    def read(self, name: str, index: tuple[slice, ...] = ()) -> np.ndarray:
        """One weight, or the part of it that `index` (one slice per dimension) cuts out; it may be a read-only view."""
        source = self._source(name)
        shape, _ = self._describe(source)
        if len(index) > len(shape):
            raise UserError(f"{self.path}: {name} has shape {shape}; it was indexed with {len(index)} slices.")
        kind, raw = self._file.tensors[source.tensor].type, self._file.raw(source.tensor)
        if source.expert is not None:
            raw = raw[source.expert]
        if raw.ndim == 1:  # a vector is a single row: reorder and cut its values
            return _without(_hf_rows(_decode(raw[None], kind)[0], source.heads)[index], source.added)
        rows = _hf_rows(raw, source.heads)[index[:1]]
        return _without(_decode(rows, kind)[(slice(None), *index[1:])], source.added)

    def tokenizer(self) -> Tokenizer:
        """The tokenizer and chat template that the metadata describes."""
        from dovetail.io.gguf_tokenizer import tokenizer

        return tokenizer(self._file)

    def _source(self, name: str) -> StoredWeight:
        if name not in self._sources:
            raise UserError(f"{self.path} holds no weight named {name!r}; `tensors()` lists the names it has.")
        return self._sources[name]

    def _describe(self, source: StoredWeight) -> tuple[tuple[int, ...], np.dtype]:
        info = self._file.tensors[source.tensor]
        shape = info.shape if source.expert is None else info.shape[1:]
        return shape, _PLAIN.get(info.type, np.dtype(np.float32))


def _hf_rows(rows: np.ndarray, heads: int) -> np.ndarray:
    """Undo llama.cpp's order: it keeps a head's rows as d/2 pairs (i, i + d/2), Hugging Face as two halves."""
    if not heads:
        return rows
    pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _decode(rows: np.ndarray, kind: str) -> np.ndarray:
    """Packed bytes [rows, row bytes] -> values [rows, columns]."""
    if kind in _PLAIN:
        return rows.view(_PLAIN[kind])
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    quant = GGMLQuantizationType[kind]
    block, block_bytes = GGML_QUANT_SIZES[quant]
    values = np.empty((len(rows), rows.shape[-1] // block_bytes * block), np.float32)
    step = math.ceil(_CHUNK / max(1, values.shape[-1]))
    for start in range(0, len(rows), step):
        values[start : start + step] = dequantize(np.ascontiguousarray(rows[start : start + step]), quant)
    return values


def _without(values: np.ndarray, added: float) -> np.ndarray:
    return (values.astype(np.float32) - added).astype(values.dtype) if added else values
