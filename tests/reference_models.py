"""A tiny random model of every family, made by transformers, with every option of the family switched on."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import torch
import transformers

BASE = dict(
    vocab_size=160, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=512, bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip
LLAMA3 = dict(
    rope_type="llama3", rope_theta=10000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=64,
)  # fmt: skip
YARN = dict(
    rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=64, mscale=0.7,
    mscale_all_dim=0.9, beta_fast=8.0, beta_slow=1.0,
)  # fmt: skip
LATENT = dict(
    num_key_value_heads=4, q_lora_rank=20, kv_lora_rank=16, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=10,
    moe_intermediate_size=24, n_routed_experts=8, num_experts_per_tok=3, n_shared_experts=2, first_k_dense_replace=1,
    n_group=4, topk_group=2, routed_scaling_factor=1.7, rope_parameters=YARN, attention_bias=True,
)  # fmt: skip
LONGROPE = dict(
    rope_type="longrope", rope_theta=10000.0, short_factor=[1.0, 1.1, 1.3, 1.7, 2.0, 2.5],
    long_factor=[1.5, 2.0, 3.0, 7.0, 20.0, 40.0],
)  # fmt: skip
GRANITE = dict(embedding_multiplier=3.0, attention_multiplier=0.3, residual_multiplier=0.22, logits_scaling=1.7)
LOCAL = ["sliding_attention", "full_attention"]
GEMMA4 = dict(
    num_hidden_layers=4, layer_types=LOCAL * 2, head_dim=16, sliding_window=6, final_logit_softcapping=20.0,
    vocab_size_per_layer_input=160, global_head_dim=24,
)  # fmt: skip

# name -> (transformers' config class, its arguments)
FAMILIES: dict[str, tuple[str, dict]] = {
    "llama2": ("LlamaConfig", dict(num_key_value_heads=4)),
    "llama3.1": ("LlamaConfig", dict(rope_parameters=LLAMA3, attention_bias=True, mlp_bias=True, head_dim=16)),
    "llama3.2": ("LlamaConfig", dict(rope_parameters=LLAMA3 | {"factor": 32.0}, tie_word_embeddings=True)),
    "llama-linear": ("LlamaConfig", dict(rope_parameters=dict(rope_type="linear", factor=3.0, rope_theta=5000.0))),
    "smollm2": ("LlamaConfig", dict(tie_word_embeddings=True, rms_norm_eps=1e-5)),
    "smollm3": (
        "SmolLM3Config",
        dict(no_rope_layer_interval=2, use_sliding_window=True, sliding_window=6, attention_bias=True, mlp_bias=True),
    ),
    "mistral": ("MistralConfig", dict(sliding_window=6, head_dim=16)),
    "mixtral": ("MixtralConfig", dict(sliding_window=7, num_local_experts=5, num_experts_per_tok=2)),
    "qwen2": ("Qwen2Config", dict(use_sliding_window=True, sliding_window=6, max_window_layers=1)),
    "qwen3": (
        "Qwen3Config",
        dict(head_dim=16, attention_bias=True, use_sliding_window=True, sliding_window=6, layer_types=LOCAL),
    ),
    "qwen3-moe": (
        "Qwen3MoeConfig",
        dict(
            num_hidden_layers=4, head_dim=16, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=20,
            norm_topk_prob=True,
            decoder_sparse_step=2, mlp_only_layers=[3], attention_bias=True, use_sliding_window=True, sliding_window=9,
        ),
    ),
    "gemma2": (
        "Gemma2Config",
        dict(head_dim=16, sliding_window=6, query_pre_attn_scalar=20, attention_bias=True,
             attn_logit_softcapping=5.0, final_logit_softcapping=10.0),
    ),
    "gemma3": (
        "Gemma3TextConfig",
        dict(
            head_dim=16, sliding_window=6, query_pre_attn_scalar=20, layer_types=LOCAL, final_logit_softcapping=9.0,
            attention_bias=True,
            rope_parameters={
                "sliding_attention": dict(rope_type="default", rope_theta=1000.0),
                "full_attention": dict(rope_type="linear", factor=8.0, rope_theta=50000.0),
            },
        ),
    ),
    "gemma4-dense": (
        "Gemma4TextConfig",
        GEMMA4 | dict(hidden_size_per_layer_input=0, attention_k_eq_v=True, num_global_key_value_heads=1),
    ),
    "gemma4-moe": (
        "Gemma4TextConfig",
        GEMMA4 | dict(
            hidden_size_per_layer_input=0, enable_moe_block=True, num_experts=5, top_k_experts=2,
            moe_intermediate_size=20, attention_k_eq_v=True, num_global_key_value_heads=1,
        ),
    ),
    "gemma4-per-layer": (
        "Gemma4TextConfig",
        GEMMA4 | dict(hidden_size_per_layer_input=8, num_kv_shared_layers=2, use_double_wide_mlp=True,
                      attention_bias=True),
    ),
    "deepseek-v2": ("DeepseekV2Config", LATENT | dict(topk_method="group_limited_greedy", mlp_bias=True)),
    "deepseek-v2-lite": (
        "DeepseekV2Config",
        LATENT | dict(topk_method="greedy", q_lora_rank=None, n_group=None, topk_group=None),
    ),
    "deepseek-v3": ("DeepseekV3Config", LATENT | dict(norm_topk_prob=True)),
    "olmo2": ("Olmo2Config", dict(attention_bias=True)),
    "olmo3": (
        "Olmo3Config",
        dict(sliding_window=6, layer_types=LOCAL, rope_parameters={
            "sliding_attention": dict(rope_type="default", rope_theta=1000.0),
            "full_attention": dict(rope_type="yarn", rope_theta=1000.0, factor=4.0,
                                   original_max_position_embeddings=64),
        }),
    ),
    "phi3": ("Phi3Config", dict(sliding_window=7)),
    "phi3-short": (  # every document is short enough for the short factors
        "Phi3Config",
        dict(rope_parameters=LONGROPE | {"factor": 4.0}, original_max_position_embeddings=512),
    ),
    "phi4-mini": (  # and here long enough for the long ones
        "Phi3Config",
        dict(rope_parameters=LONGROPE | {"partial_rotary_factor": 0.75, "attention_factor": 1.2},
             original_max_position_embeddings=2, hidden_size=64, tie_word_embeddings=True),
    ),
    "granite3": ("GraniteConfig", GRANITE | dict(attention_bias=True, mlp_bias=True, tie_word_embeddings=True)),
    "granite4": (
        "GraniteMoeHybridConfig",
        GRANITE | dict(num_local_experts=0, num_experts_per_tok=0, shared_intermediate_size=72, mamba_n_heads=6,
                       layer_types=["full_attention"] * 2, position_embedding_type="rope"),
    ),
    "glm": ("GlmConfig", dict(head_dim=16, rope_parameters=dict(rope_type="default", rope_theta=10000.0,
                                                                partial_rotary_factor=0.25))),
    "glm4": ("Glm4Config", dict(head_dim=16)),
    "glm4-moe": (
        "Glm4MoeConfig",
        dict(head_dim=16, attention_bias=True, use_qk_norm=True, moe_intermediate_size=24, n_routed_experts=8,
             num_experts_per_tok=3, n_shared_experts=2, n_group=4, topk_group=2, routed_scaling_factor=1.7,
             num_nextn_predict_layers=1),
    ),
    "gpt-oss": (
        "GptOssConfig",
        dict(head_dim=16, sliding_window=6, num_local_experts=5, num_experts_per_tok=2, swiglu_limit=1.0,
             rope_parameters=dict(rope_type="yarn", rope_theta=1000.0, factor=4.0, truncate=False,
                                  original_max_position_embeddings=64, beta_fast=8.0, beta_slow=1.0)),
    ),
}  # fmt: skip


@functools.cache
def reference(name: str, **changes):
    """(transformers' model, a folder it was saved to). Every tensor is random, norms, biases and buffers too."""
    kind, options = FAMILIES[name]
    changes = {k: list(v) if isinstance(v, tuple) else v for k, v in changes.items()}
    config = getattr(transformers, kind)(**(BASE | options | changes), attn_implementation="eager")
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval().float()
    randomize(model)
    folder = Path(tempfile.mkdtemp(prefix=f"dovetail-{name}-"))
    model.save_pretrained(folder)
    return model, folder


def randomize(model) -> None:
    """Fill every tensor of a model of transformers, norms, biases and buffers too, with random numbers."""
    with torch.no_grad():
        for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" in key or "embed_scale" in key or not tensor.is_floating_point():
                continue
            spread = 0.15 if tensor.ndim > 1 else 0.3
            middle = 1.0 if "norm" in key or "scal" in key else 0.0
            tensor.copy_(torch.randn_like(tensor) * spread + middle)


def reference_logits(name: str, tokens: list[int]):
    model, _ = reference(name)
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].float().numpy()
