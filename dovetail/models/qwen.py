"""Qwen2 and 2.5 (biases on q, k, v), Qwen3 (norms on q and k), Qwen3-MoE."""

from __future__ import annotations

from dovetail.models.config import Attention, Layer, Mlp, ModelConfig, Moe
from dovetail.models.family import Family, Fields, finish, read_glu, read_heads, read_rope, read_windows, rope_dict
from dovetail.ops.moe import Router


def parse_qwen2(f: Fields) -> ModelConfig:
    """Parse the config of Qwen2 and 2.5."""
    return _dense(f, qkv_bias=True, out_bias=False, qk_norm="")


def parse_qwen3(f: Fields) -> ModelConfig:
    """Parse the config of Qwen3."""
    bias = f.get("attention_bias", False)
    return _dense(f, qkv_bias=bias, out_bias=bias, qk_norm="head")


def _dense(f: Fields, **attention) -> ModelConfig:
    n, slides = f.get("num_hidden_layers"), f.get("use_sliding_window", False)
    first = f.get("max_window_layers", 28)
    f.skip("sliding_window", "layer_types")
    pattern = ["sliding_attention" if slides and i >= first else "full_attention" for i in range(n)]
    windows = read_windows(f, pattern) if slides else [None] * n
    heads = read_heads(f)
    rope = read_rope(f, heads["head_dim"], rope_dict(f, 10_000.0))
    mlp = Mlp(f.get("intermediate_size"), read_glu(f))
    scale = heads["head_dim"] ** -0.5
    return finish(f, [Layer(Attention(**heads, scale=scale, rope=rope, window=w, **attention), mlp) for w in windows])


def parse_qwen3_moe(f: Fields) -> ModelConfig:
    """Parse the config of Qwen3-MoE."""
    f.skip("max_window_layers")
    heads, bias = read_heads(f), f.get("attention_bias", False)
    window = f.get("sliding_window", 4096) if f.get("use_sliding_window", False) else None
    f.skip("sliding_window")
    rope = read_rope(f, heads["head_dim"], rope_dict(f, 10_000.0))
    attn = Attention(
        **heads, scale=heads["head_dim"] ** -0.5, rope=rope, window=window, qkv_bias=bias, out_bias=bias, qk_norm="head"
    )
    count = f.get("num_local_experts", None) or f.get("num_experts", 128)
    f.skip("num_experts")
    router = Router(count, f.get("num_experts_per_tok", 8), normalize=f.get("norm_topk_prob", False))
    glu = read_glu(f)
    moe, mlp = Moe(router, f.get("moe_intermediate_size", 768), glu), Mlp(f.get("intermediate_size"), glu)
    dense, step = f.get("mlp_only_layers", ()), f.get("decoder_sparse_step", 1)
    layers = []
    for i in range(f.get("num_hidden_layers")):
        sparse = i not in dense and count > 0 and (i + 1) % step == 0
        layers.append(Layer(attn, None, moe) if sparse else Layer(attn, mlp))
    return finish(f, layers)


FAMILIES = (
    Family(("qwen2",), "Qwen2ForCausalLM", parse_qwen2),
    Family(("qwen3",), "Qwen3ForCausalLM", parse_qwen3),
    Family(("qwen3_moe",), "Qwen3MoeForCausalLM", parse_qwen3_moe),
)
