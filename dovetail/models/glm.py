"""GLM-4 (0414) and the GLM-4 before it: half of each head is rotated, in neighbouring pairs.

The newer one also has norms after each half of a block.
"""

from __future__ import annotations

from dovetail.models.config import Attention, Layer, Mlp, ModelConfig
from dovetail.models.family import Family, Fields, finish, read_glu, read_heads, read_rope, rope_dict

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


NAMES = {
    "mlp.gate": "mlp.gate_up_proj.weight",
    "mlp.up": "mlp.gate_up_proj.weight",
    "attn_post_norm": "post_self_attn_layernorm.weight",
    "mlp_post_norm": "post_mlp_layernorm.weight",
}

FAMILIES = (
    Family(("glm",), "GlmForCausalLM", parse_glm, NAMES),
    Family(("glm4",), "Glm4ForCausalLM", parse_glm4, NAMES),
)
