"""Read a `.gguf` file as a Hugging Face checkpoint, so that one loader serves both.

Weights are returned under their Hugging Face names, in Hugging Face's layout ([out, in]) and row order, dequantised.
Only the rows asked for are dequantised: blocks lie along a row, so that choosing an expert, reordering rows and slicing
rows are done on the packed bytes.

What llama.cpp's converter changed is undone:
- llama, smollm3 and granite: the rows of q and k are reordered within each head, because llama.cpp rotates
  neighbouring pairs where Hugging Face rotates the two halves. (It rotates qwen, gemma and olmo2 in halves too.)
- gemma: 1 is added to every norm's weight, so that llama.cpp can use a plain RMS norm.
- mixture of experts: the experts' matrices are stacked, [E, out, in]; Hugging Face has one tensor per expert.
"""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from dovetail.core.errors import CheckpointError, MissingPackageError
from dovetail.core.formats import BLOCKS, Format
from dovetail.io.gguf_config import hf_config
from dovetail.io.gguf_file import GgufFile

if TYPE_CHECKING:
    from dovetail.io.tokenizer import Tokenizer


# Stored as they are; every other type is dequantised to float32.
_PLAIN = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
# Dequantising makes several temporaries of its input's size: at this many values at a time they stay small.
_CHUNK = 1 << 22


class GgufCheckpoint:
    """Read the weights, config and tokenizer of one `.gguf` file."""

    def __init__(self, path: str | Path):
        if importlib.util.find_spec("gguf") is None:
            raise MissingPackageError(f"Reading {path} needs the `gguf` package: pip install gguf")
        self._file = GgufFile(path)
        self.path = self._file.path
        self.config: dict[str, Any] = hf_config(self._file)
        self._sources = stored_weights(self._file, self.config)

    def tensors(self) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        """Return (shape, dtype) by Hugging Face name, without reading a weight."""
        return {name: self._describe(source) for name, source in self._sources.items()}

    def read(self, name: str, index: tuple[slice, ...] = ()) -> np.ndarray:
        """Return one weight, or the part of it at `index` (one slice per dimension); it may be a read-only view."""
        source = self._source(name)
        shape, _ = self._describe(source)
        if len(index) > len(shape):
            raise CheckpointError(f"{self.path}: {name} has shape {shape}; it was indexed with {len(index)} slices.")
        kind, raw = self._file.tensors[source.tensor].type, self._file.raw(source.tensor)
        if source.expert is not None:
            raw = raw[source.expert]
        if raw.ndim == 1:  # a vector is a single row: reorder and cut its values
            return _without(_hf_rows(_decode(raw[None], kind)[0], source.heads)[index], source.added)
        rows = _hf_rows(raw, source.heads)[index[:1]]
        return _without(_decode(rows, kind)[(slice(None), *index[1:])], source.added)

    def formats(self) -> dict[str, Format]:
        """Return the formats of the matrices whose blocks can be kept as they are, by Hugging Face name."""
        kinds = {name: self._file.tensors[source.tensor] for name, source in self._sources.items()}
        return {
            name: Format(info.type.lower())
            for name, info in kinds.items()
            if info.type.lower() in BLOCKS and len(info.shape) > 1 and not self._sources[name].added
        }

    def packed(self, name: str) -> dict[str, np.ndarray]:
        """Return the blocks of a matrix (core.formats), its rows in Hugging Face's order."""
        source = self._source(name)
        raw = self._file.raw(source.tensor)
        return {"blocks": _hf_rows(raw if source.expert is None else raw[source.expert], source.heads)}

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer and chat template of the metadata."""
        from dovetail.io.gguf_tokenizer import tokenizer

        return tokenizer(self._file)

    def _source(self, name: str) -> StoredWeight:
        if name not in self._sources:
            raise CheckpointError(f"{self.path} holds no weight named {name!r}; `tensors()` lists the names it has.")
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
    """Decode packed bytes [rows, row bytes] to values [rows, columns]."""
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


_ATTENTION = tuple(f"self_attn.{each}_proj" for each in "qkvo")
_MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
_QK_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
_NORMS_BEFORE = ("input_layernorm", "post_attention_layernorm")
_NORMS_AFTER = ("post_attention_layernorm", "post_feedforward_layernorm")
_NORMS_AROUND = ("input_layernorm", "pre_feedforward_layernorm", *_NORMS_AFTER)

_OUTSIDE = ("model.embed_tokens", "model.norm", "lm_head")
_BLOCK = {
    "llama": (*_ATTENTION, *_NORMS_BEFORE, *_MLP),
    "granite": (*_ATTENTION, *_NORMS_BEFORE, *_MLP),
    "smollm3": (*_ATTENTION, *_NORMS_BEFORE, *_MLP),
    "mixtral": (*_ATTENTION, *_NORMS_BEFORE, "block_sparse_moe.gate"),
    "qwen2": (*_ATTENTION, *_NORMS_BEFORE, *_MLP),
    "qwen3": (*_ATTENTION, *_QK_NORMS, *_NORMS_BEFORE, *_MLP),
    "qwen3_moe": (*_ATTENTION, *_QK_NORMS, *_NORMS_BEFORE, "mlp.gate"),
    "gemma2": (*_ATTENTION, *_NORMS_AROUND, *_MLP),
    "gemma3_text": (*_ATTENTION, *_QK_NORMS, *_NORMS_AROUND, *_MLP),
    "olmo2": (*_ATTENTION, *_QK_NORMS, *_NORMS_AFTER, *_MLP),
}
# What each family calls an expert's gate, up and down matrices.
_EXPERTS = {
    "mixtral": ("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3", "block_sparse_moe.experts.{}.w2"),
    "qwen3_moe": ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj", "mlp.experts.{}.down_proj"),
}
_STACKED = ("mlp.experts.gate_proj", "mlp.experts.up_proj", "mlp.experts.down_proj")
_REORDERED = ("llama", "mixtral", "smollm3", "granite")
# Tables of rotary frequencies, not weights: the config is built from them, or they can be computed.
_NOT_WEIGHTS = re.compile(r"rope_freqs\.weight|blk\.\d+\.attn_rot_embd(\.weight)?")


@dataclass(frozen=True)
class StoredWeight:
    """Say where a weight lies in the file, and what to undo when reading it."""

    tensor: str
    expert: int | None = None  # which slice of a stacked [E, out, in] tensor
    heads: int = 0  # when not 0, the rows of that many heads are in llama.cpp's order
    added: float = 0.0  # what the converter added to every value


def stored_weights(file: GgufFile, config: dict[str, Any]) -> dict[str, StoredWeight]:
    """Return the StoredWeight of every weight in the file by Hugging Face name; refuse a tensor without a name."""
    found = {name: source for name, source in _candidates(file, config) if source.tensor in file.tensors}
    claimed = {source.tensor for source in found.values()}
    for tensor in file.tensors:
        if tensor not in claimed and not _NOT_WEIGHTS.fullmatch(tensor):
            raise CheckpointError(
                f"{file.path}: tensor {tensor!r} has no place in a {config['model_type']} model; without it the model "
                f"would compute something else."
            )
    return found


def _candidates(file: GgufFile, config: dict[str, Any]) -> Iterator[tuple[str, StoredWeight]]:
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    arch = next(key for key, name in MODEL_ARCH_NAMES.items() if name == file.metadata["general.architecture"])
    layers, family = config["num_hidden_layers"], config["model_type"]
    names = get_tensor_name_map(arch, layers)
    modules = [*_OUTSIDE, *(f"model.layers.{layer}.{each}" for layer in range(layers) for each in _BLOCK[family])]
    for module in modules:
        stored = names.get_name(module)
        for suffix in (".weight", ".bias") if stored else ():
            yield module + suffix, _plain_source(f"{stored}{suffix}", module + suffix, config)
    for layer in range(layers) if family in _EXPERTS else ():
        for stacked, own in zip(_STACKED, _EXPERTS[family], strict=True):
            stored = f"{names.get_name(f'model.layers.{layer}.{stacked}')}.weight"
            for expert in range(_count_experts(file, stored)):
                yield f"model.layers.{layer}.{own.format(expert)}.weight", StoredWeight(stored, expert=expert)


def _plain_source(stored: str, name: str, config: dict[str, Any]) -> StoredWeight:
    heads = 0
    if config["model_type"] in _REORDERED and "q_proj" in name:
        heads = config["num_attention_heads"]
    elif config["model_type"] in _REORDERED and "k_proj" in name:
        heads = config["num_key_value_heads"]
    plus_one = config["model_type"].startswith("gemma") and name.endswith("norm.weight")
    return StoredWeight(stored, heads=heads, added=float(plus_one))


def _count_experts(file: GgufFile, stored: str) -> int:
    return file.tensors[stored].shape[0] if stored in file.tensors else 0
