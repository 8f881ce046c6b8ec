"""A model of every family as it is published, but for the number of its layers: its widths, heads and options."""

from __future__ import annotations

import json
from typing import Any

from dovetail.core.recipe import SHIPPED

LOCAL = ["sliding_attention", "full_attention"]


def shipped(name: str, layers: int = 2) -> dict[str, Any]:
    hf = json.loads((SHIPPED / "models" / f"{name}.json").read_text()) | dict(num_hidden_layers=layers)
    return hf | (dict(layer_types=hf["layer_types"][:layers]) if "layer_types" in hf else {})


def model(kind: str, dim: int, width: int, heads: int, keys: int, vocab: int, length: int, **more: Any):
    return dict(
        model_type=kind, hidden_size=dim, intermediate_size=width, num_attention_heads=heads, num_key_value_heads=keys,
        vocab_size=vocab, max_position_embeddings=length, num_hidden_layers=2,
    ) | more  # fmt: skip


LLAMA3 = dict(
    rope_type="llama3", rope_theta=500000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama3.1-8b": model("llama", 4096, 14336, 32, 8, 128256, 131072, rope_parameters=LLAMA3),
    "llama3.2-1b": shipped("llama3-1b"),
    "smollm2-135m": shipped("smollm2-135m"),
    "smollm3-3b": model("smollm3", 2048, 11008, 16, 4, 128256, 65536),
    "mistral-7b": shipped("mistral-7b"),
    "mixtral-8x7b": shipped("mixtral-8x7b"),
    "qwen2.5-7b": model("qwen2", 3584, 18944, 28, 4, 152064, 32768),
    "qwen3-0.6b": shipped("qwen3-0.6b"),
    "qwen3-30b-a3b": shipped("qwen3-30b-a3b"),
    "gemma2-9b": model("gemma2", 3584, 14336, 16, 8, 256000, 8192, head_dim=256, sliding_window=4096),
    "gemma3-4b": shipped("gemma3-4b", 6),
    "gemma4-e4b": model(
        "gemma4_text", 2560, 10240, 8, 2, 262144, 131072, head_dim=256, global_head_dim=512, sliding_window=512,
        layer_types=LOCAL, hidden_size_per_layer_input=256, vocab_size_per_layer_input=262144,
    ),
    "deepseek-v2-lite": model(
        "deepseek_v2", 2048, 10944, 16, 16, 102400, 163840, q_lora_rank=None, kv_lora_rank=512, qk_nope_head_dim=128,
        qk_rope_head_dim=64, v_head_dim=128, moe_intermediate_size=1408, n_routed_experts=64, num_experts_per_tok=6,
        n_shared_experts=2, first_k_dense_replace=1, topk_method="greedy", n_group=None, topk_group=None,
    ),
    "deepseek-v3": shipped("deepseek-v3", 4),
    "olmo2-7b": model("olmo2", 4096, 11008, 32, 32, 100352, 4096),
    "olmo3-7b": model("olmo3", 4096, 11008, 32, 32, 100278, 65536, sliding_window=4096, layer_types=LOCAL),
    "phi3-mini": model("phi3", 3072, 8192, 32, 32, 32064, 4096, sliding_window=2047),
    "granite3-8b": model("granite", 4096, 12800, 32, 8, 49155, 4096, attention_multiplier=0.0078125),
    "granite4-1b": model(
        "granitemoehybrid", 2048, 4096, 16, 4, 100352, 131072, shared_intermediate_size=4096, num_local_experts=0,
        num_experts_per_tok=0, layer_types=["full_attention"] * 2, position_embedding_type="rope",
    ),
    "glm-edge-4b": model("glm", 3072, 8192, 24, 6, 59264, 8192, head_dim=128),
    "glm4-9b": model("glm4", 4096, 13696, 32, 2, 151552, 32768, head_dim=128),
    "glm4.5-air": model(
        "glm4_moe", 4096, 10944, 96, 8, 151552, 131072, head_dim=128, attention_bias=True, moe_intermediate_size=1408,
        n_routed_experts=128, num_experts_per_tok=8, n_shared_experts=1, first_k_dense_replace=1,
        num_nextn_predict_layers=1,
    ),
    "gpt-oss-20b": model(
        "gpt_oss", 2880, 2880, 64, 8, 201088, 131072, head_dim=64, sliding_window=128, num_local_experts=32,
        num_experts_per_tok=4, layer_types=LOCAL,
    ),
}  # fmt: skip
