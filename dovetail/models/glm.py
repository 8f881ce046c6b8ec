"""GLM-4 (0414), the GLM-4 before it, and GLM-4.5 to 4.7: half of each head is rotated.

GLM-4 rotates neighbouring pairs; 0414 also has norms after each half of a block. GLM-4.5 has DeepSeek-V3's experts.
"""

from __future__ import annotations

from dovetail.models.config import Attention, Layer, Mlp, ModelConfig, Moe
from dovetail.models.family import Family, Fields, finish, read_glu, read_heads, read_rope, rope_dict
from dovetail.ops.moe import Router

EOS = (151329, 151336, 151338)


def parse_glm(f: Fields) -> ModelConfig:
    """Parse the config of GLM-4 before 0414."""
    return _parse(f, post_norm=False)


def parse_glm4(f: Fields) -> ModelConfig:
    """Parse the config of GLM-4 (0414)."""
    return _parse(f, post_norm=True)


def _parse(f: Fields, post_norm: bool) -> ModelConfig:
    heads = read_heads(f, kv_heads=2, head_dim=128)
    rope = read_rope(f, heads["head_dim"], rope_dict(f, 10_000.0), interleaved=True, partial=0.5)
    attn = Attention(
        **heads, scale=heads["head_dim"] ** -0.5, rope=rope, qkv_bias=f.get("attention_bias", True), out_bias=False
    )
    mlp = Mlp(f.get("intermediate_size"), read_glu(f))
    layers = [Layer(attn, mlp, post_norm=post_norm)] * f.get("num_hidden_layers")
    return finish(f, layers, eos=EOS, norm_eps=f.get("rms_norm_eps", 1.5625e-7))


def parse_glm4_moe(f: Fields) -> ModelConfig:
    """Parse the config of GLM-4.5, 4.5-Air, 4.6 and 4.7."""
    heads, glu, width = read_heads(f), read_glu(f), f.get("moe_intermediate_size")
    rope = read_rope(f, heads["head_dim"], rope_dict(f, 10_000.0), partial=0.5)
    attn = Attention(
        **heads, scale=heads["head_dim"] ** -0.5, rope=rope, qkv_bias=f.get("attention_bias", False), out_bias=False,
        qk_norm="head" if f.get("use_qk_norm", False) else "",
    )  # fmt: skip
    router = Router(
        f.get("n_routed_experts"), f.get("num_experts_per_tok"), score="sigmoid",
        normalize=f.get("norm_topk_prob", True), scale=f.get("routed_scaling_factor", 1.0),
        groups=f.get("n_group", 1), top_groups=f.get("topk_group", 1), group_score="top2",
    )  # fmt: skip
    moe = Moe(router, width, glu, shared=Mlp(width * f.get("n_shared_experts", 1), glu), choice_bias=True)
    dense, sparse = Layer(attn, Mlp(f.get("intermediate_size"), glu)), Layer(attn, None, moe)
    first = f.get("first_k_dense_replace", 1)
    layers = [dense if i < first else sparse for i in range(f.get("num_hidden_layers"))]
    return finish(f, layers, eos=EOS, norm_eps=f.get("rms_norm_eps", 1e-5))


NAMES = {
    "mlp.gate": "mlp.gate_up_proj.weight",
    "mlp.up": "mlp.gate_up_proj.weight",
    "attn_post_norm": "post_self_attn_layernorm.weight",
    "mlp_post_norm": "post_mlp_layernorm.weight",
}

FAMILIES = (
    Family(("glm",), "GlmForCausalLM", parse_glm, NAMES),
    Family(("glm4",), "Glm4ForCausalLM", parse_glm4, NAMES),
    Family(("glm4_moe",), "Glm4MoeForCausalLM", parse_glm4_moe),
)
