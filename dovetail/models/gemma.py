"""Gemma 2 and 3: norms on both sides of each half of a block, stored less 1; local and global layers; soft caps."""

from __future__ import annotations

from dovetail.models.config import Attention, Layer, Mlp, ModelConfig
from dovetail.models.family import Family, Fields, finish, read_glu, read_heads, read_rope, read_windows, rope_dict

SANDWICH = {
    "attn_post_norm": "post_attention_layernorm.weight",
    "mlp_norm": "pre_feedforward_layernorm.weight",
    "mlp_post_norm": "post_feedforward_layernorm.weight",
}
# the towers of a checkpoint that also sees and hears, and what joins them to the text
OTHER_TOWERS = (
    r"(model\.)?(vision_tower|vision_embedder|audio_tower|multi_modal_projector|embed_vision|embed_audio)\..*",
)


def parse_gemma2(f: Fields) -> ModelConfig:
    """Parse the config of Gemma 2."""
    return _parse(f, period=2, qk_norm="", caps=(50.0, 30.0))


def parse_gemma3(f: Fields) -> ModelConfig:
    """Parse the config of Gemma 3's text model."""
    f.only("attn_logit_softcapping", None)  # transformers reads it and applies none
    period = f.get("sliding_window_pattern", f.get("_sliding_window_pattern", 6))
    return _parse(f, period, qk_norm="head", caps=(None, None))


def _parse(f: Fields, period: int, qk_norm: str, caps: tuple) -> ModelConfig:
    f.only("use_bidirectional_attention", False)
    f.skip("hidden_act")  # Gemma's first configs had it, and it was wrong: hidden_activation is the one in use
    n = f.get("num_hidden_layers")
    windows = read_windows(f, ["sliding_attention" if (i + 1) % period else "full_attention" for i in range(n)])
    heads, bias = read_heads(f), f.get("attention_bias", False)
    local, everywhere = _ropes(f, heads["head_dim"], two=qk_norm == "head")
    softcap = f.nullable("attn_logit_softcapping", caps[0])
    mlp = Mlp(f.get("intermediate_size"), read_glu(f, "hidden_activation", "gelu_pytorch_tanh"))
    layers = []
    for window in windows:
        attn = Attention(
            **heads, scale=f.get("query_pre_attn_scalar", 256) ** -0.5, rope=local if window else everywhere,
            window=window, softcap=softcap, qkv_bias=bias, out_bias=bias, qk_norm=qk_norm,
        )  # fmt: skip
        layers.append(Layer(attn, mlp, post_norm=True))
    return finish(
        f,
        layers,
        tied=f.get("tie_word_embeddings", True),
        norm_offset=1.0,
        embed_scale=f.get("hidden_size") ** 0.5,
        logit_softcap=f.nullable("final_logit_softcapping", caps[1]),
    )


def _ropes(f: Fields, dim: int, two: bool):
    """Return the ropes of local and global layers: Gemma 3's local ones have their own base and no scaling."""
    if not two:
        rope = read_rope(f, dim, rope_dict(f, 10_000.0))
        return rope, rope
    everywhere = rope_dict(f, 1_000_000.0, "full_attention")
    local = {"rope_type": "default", "rope_theta": f.get("rope_local_base_freq", 10_000.0)}
    local |= f.get("rope_parameters", {}).get("sliding_attention") or {}
    return read_rope(f, dim, local), read_rope(f, dim, everywhere)


FAMILIES = (
    Family(("gemma2",), "Gemma2ForCausalLM", parse_gemma2, names=SANDWICH),
    Family(("gemma3_text",), "Gemma3ForCausalLM", parse_gemma3, names=SANDWICH, unused=OTHER_TOWERS),
)
