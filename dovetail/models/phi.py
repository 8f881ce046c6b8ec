"""Phi-3, Phi-3.5 and Phi-4 with their mini and medium sizes.

They have one tensor for q, k and v and one for gate and up; a part of each head may be rotated, with LongRoPE (ops.rope
says how its factors are chosen).
"""

from __future__ import annotations

from dovetail.models.config import Attention, Layer, Mlp, ModelConfig
from dovetail.models.family import Family, Fields, finish, read_glu, read_heads, read_rope, rope_dict
from dovetail.models.llama import INV_FREQ


def parse_phi3(f: Fields) -> ModelConfig:
    """Parse the config of Phi-3 to Phi-4."""
    for key, value in UNUSED_SETTINGS.items():
        f.only(key, value)
    f.skip("original_max_position_embeddings")  # read with LongRoPE, and no matter to other ropes
    params = rope_dict(f, 10_000.0)
    if params["rope_type"] in ("su", "yarn"):  # what early checkpoints called it
        params["rope_type"] = "longrope"
    heads = read_heads(f)
    rope = read_rope(f, heads["head_dim"], params, partial=1.0)
    attn = Attention(**heads, scale=heads["head_dim"] ** -0.5, rope=rope, window=f.get("sliding_window", None))
    mlp = Mlp(f.get("intermediate_size"), read_glu(f))
    return finish(f, [Layer(attn, mlp)] * f.get("num_hidden_layers"), eos=32000, norm_eps=f.get("rms_norm_eps", 1e-5))


# what transformers does not read, or what is only for training
UNUSED_SETTINGS = {
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attention_bias": False,
    "mlp_bias": False,
    "lm_head_bias": False,
    "full_attn_mod": 1,
    "interpolate_factor": 1,
}

NAMES = {
    **{f"attn.{x}": "self_attn.qkv_proj.weight" for x in "qkv"},
    **{f"mlp.{x}": "mlp.gate_up_proj.weight" for x in ("gate", "up")},
}

FAMILIES = (Family(("phi3",), "Phi3ForCausalLM", parse_phi3, NAMES, unused=INV_FREQ),)
