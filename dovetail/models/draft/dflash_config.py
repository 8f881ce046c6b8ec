"""Parse the config.json of block drafters: DFlash, DFlash 2 and DSpark of speculators, DFlash and DFlash 2 of z-lab."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from dovetail.core.errors import CheckpointError, UnsupportedError
from dovetail.models.config import Layer, Mlp, ModelConfig
from dovetail.models.draft.block_attention import BlockAttention
from dovetail.models.draft.check import check_size, check_taps, check_verifier
from dovetail.models.draft.dflash import DFlash
from dovetail.models.draft.dflash2 import CandidateSelector, DynamicConv
from dovetail.models.family import Fields, finish, read_glu, read_heads, read_rope, read_windows, rope_dict

DFLASH2 = dict(conv_kernel_size=2, conv_group_size=16, selector_rank=256, selector_top_k=16)  # speculators' defaults
MARKOV_RANK = 256  # of a DSpark config that does not say
# transformers' defaults: speculators writes only those fields of a layer's config that differ from them
DEFAULTS: dict[str, dict[str, Any]] = {
    "qwen3": dict(
        vocab_size=151936, hidden_size=4096, intermediate_size=22016, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=32, head_dim=128, max_position_embeddings=32768,
    ),
    "llama": dict(
        vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32,
        max_position_embeddings=2048,
    ),
}  # fmt: skip
# of a layer's config: read by nothing here, or already in layer_types
BESIDE = ("use_sliding_window", "max_window_layers", "mlp_bias", "num_target_layers", "block_size", "dflash_config")


def parse_dflash(hf: dict[str, Any], target: ModelConfig, where: str = "config.json") -> DFlash:
    """Parse the config of a block drafter for `target`.

    Raises:
        CheckpointError: The drafter is for another model, or a required key is missing.
        UnsupportedError: The drafter has a part that is not supported.
    """
    check_verifier(hf, target, where)
    found = _of_speculators(hf, where) if "speculators_model_type" in hf else _of_zlab(hf, where)
    _check_target(found, target, where)
    return found


def _of_speculators(hf: dict[str, Any], where: str) -> DFlash:
    kind = hf["speculators_model_type"]
    layers = hf.get("transformer_layer_config") or {}
    layers = DEFAULTS.get(layers.get("model_type", "qwen3"), {}) | {"model_type": "qwen3"} | _given(layers)
    cfg = _layers(layers, bool(hf.get("sliding_window_non_causal", kind == "dflash2")), where)
    ids = hf.get("aux_hidden_state_layer_ids")
    if not ids:
        raise CheckpointError(
            f"{where}: `aux_hidden_state_layer_ids` must list the target's layers that the drafter reads, got none",
            param="aux_hidden_state_layer_ids",
        )
    rank = int(hf.get("markov_rank", MARKOV_RANK)) if kind == "dspark" else 0
    head_type = hf.get("markov_head_type") or "vanilla"
    if rank and head_type != "vanilla":
        raise UnsupportedError(
            f"{where}: `markov_head_type` must be vanilla, got {head_type}: other types are not supported",
            param="markov_head_type",
        )
    return DFlash(
        cfg, tuple(int(i) - 1 for i in ids), int(hf.get("block_size", 8)), _mask(hf, where),
        int(hf.get("draft_vocab_size") or cfg.vocab), bool(hf.get("sample_from_anchor", kind == "dspark")), rank,
        json.dumps(hf, sort_keys=True), **_dflash2(DFLASH2 | hf, cfg, where) if kind == "dflash2" else {},
    )  # fmt: skip


def _of_zlab(hf: dict[str, Any], where: str) -> DFlash:
    own = dict(hf.get("dflash_config") or {})
    ids, mask = own.pop("target_layer_ids", None), _mask(own, where)
    own.pop("mask_token_id", None)
    size = own.pop("block_size", None) or hf.get("block_size")
    both_ways = own.pop("is_causal", hf.get("is_causal")) is False
    if not ids or not size:
        key = "block_size" if ids else "dflash_config.target_layer_ids"
        raise CheckpointError(f"{where}: the key `{key}` is missing", param=key)
    second = {name: own.pop(name) for name in DFLASH2 if name in own}
    if own:
        key = f"dflash_config.{min(own)}"
        raise UnsupportedError(f"{where}: `{key}` is not supported, got {own[min(own)]}", param=key)
    cfg = _layers({name: value for name, value in hf.items() if name != "is_causal"}, both_ways, where)
    if second.keys() != DFLASH2.keys() and (second or "dflash2" in " ".join(hf.get("architectures") or ()).lower()):
        key = f"dflash_config.{next(name for name in DFLASH2 if name not in second)}"
        raise CheckpointError(f"{where}: the key `{key}` of DFlash 2 is missing", param=key)
    parts = _dflash2(second, cfg, where) if second else {}
    return DFlash(
        cfg, tuple(map(int, ids)), int(size), mask, cfg.vocab, source=json.dumps(hf, sort_keys=True), **parts
    )  # fmt: skip


def _dflash2(fields: dict[str, Any], cfg: ModelConfig, where: str) -> dict[str, Any]:
    """Return the parts that DFlash 2 adds."""
    taps, group, rank, top_k = (int(fields[name]) for name in DFLASH2)
    if cfg.dim % group:
        raise CheckpointError(
            f"{where}: `conv_group_size` must divide hidden_size={cfg.dim}, got {group}", param="conv_group_size"
        )
    if int(fields.get("draft_vocab_size") or cfg.vocab) != cfg.vocab:
        raise UnsupportedError(
            f"{where}: `draft_vocab_size` of a DFlash 2 drafter must be the target's {cfg.vocab:,}, got "
            f"{fields['draft_vocab_size']:,}",
            param="draft_vocab_size",
        )
    return dict(conv=DynamicConv(taps, group), selector=CandidateSelector(rank, min(top_k, cfg.vocab)))


def _given(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _mask(fields: dict[str, Any], where: str) -> int:
    value = fields.get("mask_token_id")
    if value is None:
        raise CheckpointError(f"{where}: the key `mask_token_id` is missing", param="mask_token_id")
    return int(value)


def _layers(hf: dict[str, Any], both_ways: bool, where: str) -> ModelConfig:
    """Return the drafter's layers: Qwen3's, whatever the model type, with attention over blocks."""
    f = Fields(hf, where)
    f.skip(*BESIDE)
    heads, bias = read_heads(f), f.get("attention_bias", False)
    rope = read_rope(f, heads["head_dim"], rope_dict(f, 10_000.0))
    mlp = Mlp(f.get("intermediate_size"), read_glu(f))
    layers = [
        Layer(
            BlockAttention(
                **heads, scale=heads["head_dim"] ** -0.5, rope=rope, window=window, qkv_bias=bias, out_bias=bias,
                qk_norm="head", causal=window is not None and not both_ways,
            ),
            mlp,
        )
        for window in read_windows(f, ["full_attention"] * f.get("num_hidden_layers"))
    ]  # fmt: skip
    return replace(finish(f, layers), family="qwen3")


def _check_target(found: DFlash, target: ModelConfig, where: str) -> None:
    """Refuse a drafter for another model: it has the target's embedding and reads its layers."""
    depth, own = len(target.layers), found.cfg
    asked = json.loads(found.source)
    check_size("hidden_size", own.dim, target.dim, where)
    check_size("vocab_size", own.vocab, target.vocab, where)
    check_size("num_target_layers", asked.get("num_target_layers") or depth, depth, where)
    check_size("target_hidden_size", asked.get("target_hidden_size") or target.dim, target.dim, where)
    check_taps("aux_hidden_state_layer_ids", found.taps, target, where)
    if not 0 <= found.mask_token_id < target.vocab:
        raise CheckpointError(
            f"{where}: `mask_token_id` must be below {target.vocab:,}, got {found.mask_token_id:,}",
            param="mask_token_id",
        )
