"""Llama 2 to 3.2 and SmolLM2 (one architecture), SmolLM3 (every fourth layer without positions), Mistral, Mixtral."""

from __future__ import annotations

from dovetail.models.config import Attention, Layer, Mlp, ModelConfig, Moe
from dovetail.models.family import Family, Fields, finish, read_glu, read_heads, read_rope, read_windows, rope_dict
from dovetail.ops.moe import Router


def parse_llama(f: Fields) -> ModelConfig:
    """Parse the config of Llama and SmolLM2."""
    f.only("rope_interleaved", False)
    heads, bias = read_heads(f), f.get("attention_bias", False)
    rope = read_rope(f, heads["head_dim"], rope_dict(f, 10_000.0))
    attn = Attention(**heads, scale=heads["head_dim"] ** -0.5, rope=rope, qkv_bias=bias, out_bias=bias)
    mlp = Mlp(f.get("intermediate_size"), read_glu(f), f.get("mlp_bias", False))
    return finish(f, [Layer(attn, mlp)] * f.get("num_hidden_layers"))


def parse_smollm3(f: Fields) -> ModelConfig:
    """Parse the config of SmolLM3."""
    n, every = f.get("num_hidden_layers"), f.get("no_rope_layer_interval", 4)
    turns = f.get("no_rope_layers", [int((i + 1) % every != 0) for i in range(n)])
    slides = f.get("use_sliding_window", False)
    windows = read_windows(f, ["sliding_attention" if slides and not t else "full_attention" for t in turns])
    heads, bias = read_heads(f), f.get("attention_bias", False)
    rope = read_rope(f, heads["head_dim"], rope_dict(f, 2_000_000.0))
    mlp = Mlp(f.get("intermediate_size"), read_glu(f), f.get("mlp_bias", False))
    layers = []
    for turn, window in zip(turns, windows, strict=True):
        attn = Attention(
            **heads, scale=heads["head_dim"] ** -0.5, rope=rope if turn else None, window=window if slides else None,
            qkv_bias=bias, out_bias=bias,
        )  # fmt: skip
        layers.append(Layer(attn, mlp))
    return finish(f, layers, tied=f.get("tie_word_embeddings", True))


def parse_mistral(f: Fields) -> ModelConfig:
    """Parse the config of Mistral."""
    attn = _windowed(f, f.nullable("sliding_window", 4096), 10_000.0)
    return finish(f, [Layer(attn, Mlp(f.get("intermediate_size"), read_glu(f)))] * f.get("num_hidden_layers"))


def parse_mixtral(f: Fields) -> ModelConfig:
    """Parse the config of Mixtral."""
    f.only("router_jitter_noise", 0.0)
    router = Router(f.get("num_local_experts", 8), f.get("num_experts_per_tok", 2), normalize=True)
    moe = Moe(router, f.get("intermediate_size"), read_glu(f))
    attn = _windowed(f, f.nullable("sliding_window", None), 1_000_000.0)
    return finish(f, [Layer(attn, None, moe)] * f.get("num_hidden_layers"))


def _windowed(f: Fields, window: int | None, theta: float) -> Attention:
    heads = read_heads(f)
    rope = read_rope(f, heads["head_dim"], rope_dict(f, theta))
    return Attention(**heads, scale=heads["head_dim"] ** -0.5, rope=rope, window=window)


# rotary_emb.inv_freq: a table that old exports kept; it follows from the config
INV_FREQ = (r".*\.rotary_emb\.inv_freq",)

FAMILIES = (
    Family(("llama",), "LlamaForCausalLM", parse_llama, unused=INV_FREQ),
    Family(("smollm3",), "SmolLM3ForCausalLM", parse_smollm3),
    Family(("mistral",), "MistralForCausalLM", parse_mistral, unused=INV_FREQ),
    Family(
        ("mixtral",),
        "MixtralForCausalLM",
        parse_mixtral,
        names={
            "moe.router": "block_sparse_moe.gate.weight",
            "moe.gate": "block_sparse_moe.experts.{e}.w1.weight",
            "moe.up": "block_sparse_moe.experts.{e}.w3.weight",
            "moe.down": "block_sparse_moe.experts.{e}.w2.weight",
        },
        unused=INV_FREQ,
    ),
)
