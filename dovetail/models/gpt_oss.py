"""GPT-OSS: attention sinks, every other layer local, experts with biases and a clamped gate."""

from __future__ import annotations

from dovetail.models.config import Attention, Layer, ModelConfig, Moe
from dovetail.models.family import Family, Fields, finish, read_heads, read_rope, read_windows, rope_dict
from dovetail.ops.glu import Glu
from dovetail.ops.moe import Router

YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096, "rope_theta": 150_000.0,
}  # fmt: skip


def parse_gpt_oss(f: Fields) -> ModelConfig:
    """Parse the config of GPT-OSS."""
    f.only("hidden_act", "silu")
    f.skip("experts_per_token")  # says num_experts_per_tok again
    n = f.get("num_hidden_layers")
    windows = read_windows(f, ["full_attention" if i % 2 else "sliding_attention" for i in range(n)])
    heads, bias = read_heads(f), f.get("attention_bias", True)
    given = f.get("rope_parameters", None) or f.get("rope_scaling", None)
    rope = read_rope(f, heads["head_dim"], rope_dict(f, 150_000.0) if given else dict(YARN))
    glu = Glu(limit=f.get("swiglu_limit", 7.0), alpha=f.get("swiglu_alpha", 1.702))
    router = Router(f.get("num_local_experts"), f.get("num_experts_per_tok", 4), score="chosen")
    moe = Moe(router, f.get("intermediate_size"), glu, bias=True)
    layers = []
    for window in windows:
        attn = Attention(
            **heads, scale=heads["head_dim"] ** -0.5, rope=rope, window=window, qkv_bias=bias, out_bias=bias, sinks=True
        )
        layers.append(Layer(attn, None, moe))
    return finish(f, layers, norm_eps=f.get("rms_norm_eps", 1e-5))


NAMES = {
    "moe.router": "mlp.router.weight",
    "moe.router_bias": "mlp.router.bias",
    "moe.gate_up": "mlp.experts.gate_up_proj",
    "moe.gate_up_bias": "mlp.experts.gate_up_proj_bias",
    "moe.down": "mlp.experts.down_proj",
    "moe.down_bias": "mlp.experts.down_proj_bias",
}

FAMILIES = (Family(("gpt_oss",), "GptOssForCausalLM", parse_gpt_oss, NAMES, experts="interleaved"),)
