"""Which tensor of a `.gguf` file holds a Hugging Face weight, and what llama.cpp's converter did to it on the way in.

Three things are undone when a weight is read:
- llama, smollm3 and granite: the rows of q and k are reordered within each head, because llama.cpp rotates
  neighbouring pairs where Hugging Face rotates the two halves. (It rotates qwen, gemma and olmo2 in halves too.)
- gemma: 1 is added to every norm's weight, so that llama.cpp can use a plain RMS norm.
- mixture of experts: the experts' matrices are stacked, [E, out, in]; Hugging Face names each by itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dovetail.core.errors import UserError
from dovetail.io.gguf_file import GgufFile

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
    """Where a weight lies in the file, and what to undo when reading it."""

    tensor: str
    expert: int | None = None  # which slice of a stacked [E, out, in] tensor
    heads: int = 0  # when not 0, the rows of that many heads are in llama.cpp's order
    added: float = 0.0  # what the converter added to every value


def stored_weights(file: GgufFile, config: dict[str, Any]) -> dict[str, StoredWeight]:
    """HF name -> StoredWeight for every weight in the file; a tensor that no name claims is an error."""
    found = {name: source for name, source in _candidates(file, config) if source.tensor in file.tensors}
    claimed = {source.tensor for source in found.values()}
    for tensor in file.tensors:
        if tensor not in claimed and not _NOT_WEIGHTS.fullmatch(tensor):
            raise UserError(
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
