"""Granite 3 and the dense models of Granite 4: a Llama with scaled embeddings, attention, block halves and logits."""

from __future__ import annotations

from dovetail.core.errors import UserError
from dovetail.models.config import Attention, Layer, Mlp, ModelConfig
from dovetail.models.family import Family, Fields, finish, read_glu, read_heads, read_rope, rope_dict
from dovetail.models.llama import INV_FREQ


def parse_granite(f: Fields) -> ModelConfig:
    """Parse the config of Granite 3."""
    return _scaled(f, Mlp(f.get("intermediate_size"), read_glu(f), f.get("mlp_bias", False)), positions=True)


def parse_hybrid(f: Fields) -> ModelConfig:
    """Parse the config of a dense Granite 4.

    One architecture names all its models, also those with experts or without attention.
    """
    kinds, experts = f.get("layer_types", ["mamba"]), f.get("num_local_experts", 8)
    if not set(kinds) <= {"attention", "full_attention"} or experts:
        raise UserError(
            f"{f.where}: this Granite 4 has {experts} experts and layers of the kinds {sorted(set(kinds))}; only its "
            "dense models are supported: no experts, attention in every layer (granite-4.0-1b, say, not granite-4.0-h)",
            param="num_local_experts" if experts else "layer_types",
        )
    f.only("normalization_function", "rmsnorm")
    f.only("position_embedding_type", None, "nope", "rope")  # the first two: no positions at all
    # settings of experts and Mamba layers, which a dense model does not have
    f.skip("intermediate_size", "num_experts_per_tok", "init_method", "time_step_limit")
    f.skip(*(key for key in f.hf if key.startswith("mamba_")))
    positions = f.get("position_embedding_type", None) == "rope"
    return _scaled(f, Mlp(f.get("shared_intermediate_size", 1024), read_glu(f)), positions)


def _scaled(f: Fields, mlp: Mlp, positions: bool) -> ModelConfig:
    heads, bias = read_heads(f), f.get("attention_bias", False)
    rope = read_rope(f, heads["head_dim"], rope_dict(f, 10_000.0))
    attn = Attention(
        **heads, scale=f.get("attention_multiplier", 1.0), rope=rope if positions else None,
        qkv_bias=bias, out_bias=bias,
    )  # fmt: skip
    return finish(
        f,
        [Layer(attn, mlp)] * f.get("num_hidden_layers"),
        dropout=True,
        embed_scale=f.get("embedding_multiplier", 1.0),
        residual_scale=f.get("residual_multiplier", 1.0),
        logit_scale=1.0 / f.get("logits_scaling", 1.0),
    )


HYBRID_NAMES = {
    "mlp.gate": "shared_mlp.input_linear.weight",
    "mlp.up": "shared_mlp.input_linear.weight",
    "mlp.down": "shared_mlp.output_linear.weight",
}

FAMILIES = (
    Family(("granite",), "GraniteForCausalLM", parse_granite, unused=INV_FREQ),
    Family(("granitemoehybrid",), "GraniteMoeHybridForCausalLM", parse_hybrid, HYBRID_NAMES),
)
