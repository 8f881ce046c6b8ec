"""OLMo 2 and 3: norms only behind each half of a block, and over all heads of q and of k together."""

from __future__ import annotations

from dovetail.models.config import Attention, Layer, Mlp, ModelConfig
from dovetail.models.family import Family, Fields, finish, read_glu, read_heads, read_rope, read_windows, rope_dict

NAMES = {
    "attn_post_norm": "post_attention_layernorm.weight",
    "mlp_post_norm": "post_feedforward_layernorm.weight",
}


def parse_olmo2(f: Fields) -> ModelConfig:
    """Parse the config of OLMo 2."""
    rope = read_rope(f, read_heads(f)["head_dim"], rope_dict(f, 10_000.0))
    return _parse(f, [None] * f.get("num_hidden_layers"), {None: rope})


def parse_olmo3(f: Fields) -> ModelConfig:
    """Parse the config of OLMo 3."""
    n, dim = f.get("num_hidden_layers"), read_heads(f)["head_dim"]
    windows = read_windows(f, ["sliding_attention" if (i + 1) % 4 else "full_attention" for i in range(n)])
    params = {kind: rope_dict(f, 500_000.0, kind) for kind in ("sliding_attention", "full_attention")}
    if f.get("rope_scaling", None):  # the older spelling stretches the full layers alone
        params["sliding_attention"] = {"rope_type": "default", "rope_theta": f.get("rope_theta", 500_000.0)}
    ropes = {w: read_rope(f, dim, params["sliding_attention" if w else "full_attention"]) for w in set(windows)}
    return _parse(f, windows, ropes)


def _parse(f: Fields, windows: list[int | None], ropes: dict) -> ModelConfig:
    f.only("clip_qkv", None)
    heads, bias = read_heads(f), f.get("attention_bias", False)
    mlp = Mlp(f.get("intermediate_size"), read_glu(f))
    layers = []
    for window in windows:
        attn = Attention(
            **heads, scale=heads["head_dim"] ** -0.5, rope=ropes[window], window=window,
            qkv_bias=bias, out_bias=bias, qk_norm="all",
        )  # fmt: skip
        layers.append(Layer(attn, mlp, pre_norm=False, post_norm=True))
    return finish(f, layers, norm_eps=f.get("rms_norm_eps", 1e-5))


FAMILIES = (
    Family(("olmo2",), "Olmo2ForCausalLM", parse_olmo2, names=NAMES),
    Family(("olmo3",), "Olmo3ForCausalLM", parse_olmo3, names=NAMES),
)
