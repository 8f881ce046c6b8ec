"""DeepSeek-V2 and V3: latent attention, shared and routed experts, group-limited routing, a bias on the choice."""

from __future__ import annotations

from dovetail.core.errors import UserError
from dovetail.models.config import Latent, Layer, Mlp, ModelConfig, Moe
from dovetail.models.family import Family, Fields, finish, read_glu, read_rope, rope_dict
from dovetail.ops.moe import Router
from dovetail.ops.rope import yarn_magnitude


def parse_v2(f: Fields) -> ModelConfig:
    """Parse the config of DeepSeek-V2."""
    f.only("scoring_func", "softmax")
    f.only("norm_topk_prob", False)
    method = f.get("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise UserError(
            f"{f.where}: topk_method={method!r} is not supported (greedy or group_limited_greedy)", param="topk_method"
        )
    groups = (f.get("n_group", 1), f.get("topk_group", 1)) if method == "group_limited_greedy" else (1, 1)
    f.skip("n_group", "topk_group")
    router = Router(
        f.get("n_routed_experts"), f.get("num_experts_per_tok"), scale=f.get("routed_scaling_factor", 1.0),
        groups=groups[0], top_groups=groups[1], group_score="max",
    )  # fmt: skip
    return _parse(f, router, interleaved=True, mlp_bias=f.get("mlp_bias", False), first_dense=0)


def parse_v3(f: Fields) -> ModelConfig:
    """Parse the config of DeepSeek-V3."""
    f.only("scoring_func", "sigmoid")
    f.only("topk_method", "noaux_tc")
    router = Router(
        f.get("n_routed_experts", 256), f.get("num_experts_per_tok", 8), score="sigmoid",
        normalize=f.get("norm_topk_prob", True), scale=f.get("routed_scaling_factor", 2.5),
        groups=f.get("n_group", 8), top_groups=f.get("topk_group", 4), group_score="top2",
    )  # fmt: skip
    return _parse(f, router, interleaved=f.get("rope_interleave", True), mlp_bias=False, first_dense=3)


def _parse(f: Fields, router: Router, interleaved: bool, mlp_bias: bool, first_dense: int) -> ModelConfig:
    f.only("moe_layer_freq", 1)
    f.skip("head_dim", "qk_head_dim", "num_key_value_heads")  # follow from the latent's dims
    glu, width = read_glu(f), f.get("moe_intermediate_size")
    shared = Mlp(width * f.get("n_shared_experts"), glu, mlp_bias)
    moe = Moe(router, width, glu, shared=shared, choice_bias=router.score == "sigmoid")
    dense = Layer(_latent(f, interleaved), Mlp(f.get("intermediate_size"), glu, mlp_bias))
    sparse = Layer(dense.attn, None, moe)
    first = f.get("first_k_dense_replace", first_dense)
    return finish(f, [dense if i < first else sparse for i in range(f.get("num_hidden_layers"))])


def _latent(f: Fields, interleaved: bool) -> Latent:
    nope, rope_dim = f.get("qk_nope_head_dim"), f.get("qk_rope_head_dim")
    params = rope_dict(f, 10_000.0)
    rope = read_rope(f, rope_dim, params, interleaved)
    scale = (nope + rope_dim) ** -0.5
    if params["rope_type"] != "default" and params.get("mscale_all_dim"):
        scale *= yarn_magnitude(params["factor"], params["mscale_all_dim"]) ** 2
    return Latent(
        heads=f.get("num_attention_heads"), q_rank=f.nullable("q_lora_rank", 1536), kv_rank=f.get("kv_lora_rank"),
        nope_dim=nope, rope_dim=rope_dim, v_dim=f.get("v_head_dim"), scale=scale, rope=rope,
        bias=f.get("attention_bias", False),
    )  # fmt: skip


FAMILIES = (
    Family(("deepseek_v2",), "DeepseekV2ForCausalLM", parse_v2),
    Family(("deepseek_v3",), "DeepseekV3ForCausalLM", parse_v3),
)
