"""Gemma 4's text tower: dense, mixture of experts beside the dense MLP, and per-layer embeddings."""

from __future__ import annotations

from dovetail.core.errors import UserError
from dovetail.models.config import Attention, Layer, Mlp, ModelConfig, Moe
from dovetail.models.family import Family, Fields, finish, read_glu, read_rope, read_windows, rope_dict
from dovetail.models.gemma import OTHER_TOWERS, SANDWICH
from dovetail.ops.moe import Router


def parse_gemma4(f: Fields) -> ModelConfig:
    """Parse the config of Gemma 4's text model."""
    f.only("use_bidirectional_attention", None, "vision")  # "vision": images only, which this tower never sees
    n = f.get("num_hidden_layers")
    windows = read_windows(f, ["sliding_attention" if (i + 1) % 6 else "full_attention" for i in range(n)])
    if windows[-1] is not None:
        raise UserError(f"{f.where}: Gemma 4's last layer must be full_attention", param="layer_types")
    first_shared = n - f.get("num_kv_shared_layers", 0)
    moe = _moe(f) if f.get("enable_moe_block", False) else None
    glu, width = read_glu(f, "hidden_activation", "gelu_pytorch_tanh"), f.get("intermediate_size")
    wide = f.get("use_double_wide_mlp", False)
    layers = []
    for i in range(n):
        shares = i >= first_shared > 0
        attn = _attention(f, i, windows, first_shared if shares else None)
        mlp = Mlp(width * 2 if wide and shares else width, glu)
        per_layer = f.nullable("hidden_size_per_layer_input", 256) or 0
        layers.append(Layer(attn, mlp, moe, post_norm=True, per_layer_dim=per_layer, scalar=True))
    return finish(
        f,
        layers,
        tied=f.get("tie_word_embeddings", True),
        embed_scale=f.get("hidden_size") ** 0.5,
        logit_softcap=f.get("final_logit_softcapping", None),
        per_layer_vocab=f.get("vocab_size_per_layer_input", 262_144),
    )


def _attention(f: Fields, i: int, windows: list, first_shared: int | None) -> Attention:
    """Return a layer's attention: global layers have their own head size and KV heads, and may use keys as values."""
    window, k_is_v = windows[i], f.get("attention_k_eq_v", False) and windows[i] is None
    head_dim, kv_heads = f.get("head_dim", 256), f.get("num_key_value_heads", 4)
    over = {}
    if window is None:  # either spelling: per-layer overrides, or one global size
        over = {"head_dim": f.get("global_head_dim", 512)}
        over["num_key_value_heads"] = f.get("num_global_key_value_heads", kv_heads) if k_is_v else kv_heads
    if "per_layer_config" in f.hf:
        over = f.get("per_layer_config", {}).get(str(i), {})
    if unknown := set(over) - {"head_dim", "num_key_value_heads"}:
        raise UserError(
            f"{f.where}: per_layer_config does not support {', '.join(sorted(unknown))}", param="per_layer_config"
        )
    f.skip("global_head_dim", "num_global_key_value_heads", "per_layer_config")
    head_dim, kv_heads = over.get("head_dim", head_dim), over.get("num_key_value_heads", kv_heads)
    donor = None
    if first_shared is not None:  # the last layer of the same kind that has keys of its own
        donor = max(j for j in range(first_shared) if (windows[j] is None) == (window is None))
    bias = f.get("attention_bias", False)
    return Attention(
        heads=f.get("num_attention_heads"), kv_heads=kv_heads, head_dim=head_dim, scale=1.0,
        rope=_rope(f, head_dim, window), window=window, qkv_bias=bias, out_bias=bias, qk_norm="head", v_norm=True,
        k_is_v=k_is_v, kv_from=donor,
    )  # fmt: skip


def _rope(f: Fields, dim: int, window: int | None):
    if window is not None:
        return read_rope(f, dim, rope_dict(f, 10_000.0, "sliding_attention"))
    params = rope_dict(f, 1_000_000.0, "full_attention")
    if not f.get("rope_parameters", None):
        params |= {"rope_type": "proportional", "partial_rotary_factor": 0.25}
    return read_rope(f, dim, params)


def _moe(f: Fields) -> Moe:
    router = Router(f.get("num_experts"), f.get("top_k_experts"), normalize=True)
    glu = read_glu(f, "hidden_activation", "gelu_pytorch_tanh")
    return Moe(router, f.get("moe_intermediate_size"), glu, scaled_router=True)


NAMES = SANDWICH | {
    "moe.router": "router.proj.weight",
    "moe.router_scale": "router.scale",
    "moe.expert_scale": "router.per_expert_scale",
    "moe.gate_up": "experts.gate_up_proj",
    "moe.down": "experts.down_proj",
}

FAMILIES = (Family(("gemma4_text",), "Gemma4ForCausalLM", parse_gemma4, NAMES, experts="stacked", unused=OTHER_TOWERS),)
