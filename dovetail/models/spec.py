"""spec(cfg): the tree of a model's weights, each declared once, and the tensor names of checkpoints.

Weights keep Hugging Face's order, [out, in]: loading is a memory map, and NVIDIA's fastest products take it so. Heads
have their own dim, so that splitting them over devices never cuts one.

A family lists its differences from the common tensor names; {e} is an expert's number. Loading and writing use the one
table.

D model dim, N heads, K key heads, H head dim, F width, E experts, L layers, V vocabulary.
"""

from __future__ import annotations

import functools
import math
from typing import Any

from dovetail.core.mesh import Placement
from dovetail.core.spec import ParamSpec, Stored, in_one_tensor, matmul_flops
from dovetail.models.config import Layer, Mlp, ModelConfig, Moe
from dovetail.models.family import Family
from dovetail.models.registry import family_of

VISION = "vision"  # the branch of the tower's weights


@functools.lru_cache(maxsize=64)
def spec(cfg: ModelConfig) -> dict[str, Any]:
    """Return the tree of a model's weights as ParamSpecs."""
    if cfg.images is not None:
        return cfg.images.spec()
    if cfg.external is not None:
        return cfg.external.spec()
    D, V, L = cfg.dim, cfg.vocab, len(cfg.layers)
    family = family_of(cfg)
    declare = _Declare(COMMON | dict(family.names), "")
    norm_init = "zeros" if cfg.norm_offset else "ones"
    tree: dict[str, Any] = {
        # looked up, and a product only where it is the output layer too
        "embed": declare("embed", (V, D), ("vocab", "embed"), active=1.0 if cfg.tied and not cfg.scored else 0.0),
        "norm": declare("norm", (D,), (None,), init=norm_init, active=0.0),
        "layers": tuple(layer_spec(cfg, family, layer, i) for i, layer in enumerate(cfg.layers)),
    }
    if cfg.scored:
        tree["score"] = declare("score", (1, D), ("vocab", "embed"))
    elif not cfg.tied:
        tree["head"] = declare("head", (V, D), ("vocab", "embed"))
    if width := cfg.layers[0].per_layer_dim:
        rows, flat = cfg.per_layer_vocab, L * width
        tree["per_layer"] = {
            "embed": declare("per_layer.embed", (rows, L, width), ("vocab", None, None), (rows, flat), active=0.0),
            "proj": declare("per_layer.proj", (L, width, D), (None, None, "embed"), (flat, D)),
            "norm": declare("per_layer.norm", (width,), (None,), init=norm_init, active=0.0),
        }
    return tree if cfg.vision is None else {**tree, VISION: cfg.vision.tower.spec()}


def text_spec(cfg: ModelConfig) -> dict[str, Any]:
    """Return the tree without the vision tower, whose weights the tokens of a step do not meet."""
    return {name: part for name, part in spec(cfg).items() if name != VISION or cfg.images}


class _Declare:
    """Make ParamSpecs whose names start with a prefix; `stored` is given where the checkpoint's shape differs."""

    def __init__(self, names: dict[str, str], prefix: str):
        self.names, self.prefix = names, prefix

    def __call__(self, key, shape, axes, stored=None, *, experts=0, cut=None, **more) -> ParamSpec:
        pattern = self.prefix + self.names[key]
        names = tuple(pattern.format(e=e) for e in range(experts)) if experts else (pattern,)
        own = tuple(shape[1:] if experts else shape)
        return ParamSpec(tuple(shape), tuple(axes), Stored(names, tuple(stored or own), **(cut or {})), **more)


def layer_spec(cfg: ModelConfig, family: Family, layer: Layer, i: int) -> dict[str, Any]:
    """Return one layer's weights, stored as the model's i-th."""
    D = cfg.dim
    declare = _Declare(LAYER | dict(family.names), f"model.layers.{i}.")

    def norm(key: str, dim: int = D) -> ParamSpec:
        return declare(key, (dim,), (None,), init="zeros" if cfg.norm_offset else "ones", active=0.0)

    tree: dict[str, Any] = {"attn": in_one_tensor(layer.attn.spec(declare, norm, D), layer.attn.projections)}
    names = ["attn_norm", "mlp_norm"] * layer.pre_norm + ["attn_post_norm", "mlp_post_norm"] * layer.post_norm
    names += ["mlp_out_norm", "moe_norm", "moe_post_norm"] * bool(layer.mlp and layer.moe)
    tree |= {name: norm(name) for name in names}
    if layer.mlp:
        tree["mlp"] = _mlp(declare, "mlp", layer.mlp, D)
    if layer.moe:
        tree["moe"] = _moe(declare, family, layer.moe, D)
    if width := layer.per_layer_dim:
        tree["per_layer"] = {
            "gate": declare("per_layer.gate", (width, D), (None, "embed")),
            "proj": declare("per_layer.proj", (D, width), ("embed", None)),
            "norm": norm("per_layer.norm"),
        }
    if layer.scalar:
        tree["scalar"] = declare("scalar", (1,), (None,), init="ones", active=0.0)
    return tree


def _mlp(declare: _Declare, at: str, mlp: Mlp, D: int) -> dict[str, ParamSpec]:
    F = mlp.width
    tree = {x: declare(f"{at}.{x}", (F, D), ("mlp", "embed")) for x in ("gate", "up")}
    tree["down"] = declare(f"{at}.down", (D, F), ("embed", "mlp"))
    if mlp.bias:
        tree |= {f"{x}_bias": declare(f"{at}.{x}_bias", (F,), ("mlp",), **_BIAS) for x in ("gate", "up")}
        tree["down_bias"] = declare(f"{at}.down_bias", (D,), (None,), **_BIAS)
    return in_one_tensor(tree, mlp.projections)


def _moe(declare: _Declare, family: Family, moe: Moe, D: int) -> dict[str, Any]:
    E, F = moe.router.experts, moe.width
    tree: dict[str, Any] = {"router": declare("moe.router", (E, D), (None, None))}
    share = moe.router.top_k / E
    tree["experts"] = {
        x: declare(
            _expert_key(family, x), (E, D, F) if x == "down" else (E, F, D),
            ("experts", "embed", "mlp") if x == "down" else ("experts", "mlp", "embed"), active=share,
            **_expert_layout(family, x, E, F, D),
        )
        for x in ("gate", "up", "down")
    }  # fmt: skip
    if moe.bias:
        tree["router_bias"] = declare("moe.router_bias", (E,), (None,), **_BIAS)
        for i, x in enumerate(("gate", "up")):
            cut = dict(at=(slice(None), slice(i, None, 2)))
            tree["experts"][f"{x}_bias"] = declare(
                "moe.gate_up_bias", (E, F), ("experts", "mlp"), (E, 2 * F), cut=cut, **_BIAS
            )
        tree["experts"]["down_bias"] = declare("moe.down_bias", (E, D), ("experts", None), **_BIAS)
    if moe.choice_bias:
        tree["choice_bias"] = declare("moe.choice_bias", (E,), (None,), dtype="float32", **_BIAS)
    if moe.scaled_router:
        tree["router_scale"] = declare("moe.router_scale", (D,), (None,), init="ones", active=0.0)
        tree["expert_scale"] = declare("moe.expert_scale", (E,), (None,), init="ones", active=0.0)
    if moe.shared:
        tree["shared"] = _mlp(declare, "moe.shared", moe.shared, D)
    return tree


def _expert_key(family: Family, x: str) -> str:
    return "moe.gate_up" if family.experts != "each" and x != "down" else f"moe.{x}"


def _expert_layout(family: Family, x: str, E: int, F: int, D: int) -> dict[str, Any]:
    """Return how the checkpoint holds an expert weight (see Family.experts)."""
    if family.experts == "each":
        return dict(experts=E)
    everything, second = slice(None), x == "up"
    if family.experts == "stacked":
        rows = slice(F, 2 * F) if second else slice(0, F)
        return {} if x == "down" else dict(stored=(E, 2 * F, D), cut=dict(at=(everything, rows)))
    if x == "down":
        return dict(stored=(E, F, D), cut=dict(transposed=True))
    columns = (everything, everything, slice(int(second), None, 2))
    return dict(stored=(E, D, 2 * F), cut=dict(at=columns, transposed=True))


_BIAS: dict[str, Any] = dict(init="zeros", active=0.0)


def cache_shapes(
    layers: tuple[Layer, ...],
    num_pages: int,
    page_size: int,
    dtype: Any,
    placement: Placement | None = None,
    platform: str | None = None,
    kv: str = "auto",
) -> tuple[tuple[int, ...] | None, ...]:
    """Return the shape of each layer's pages; None for a layer that reads another's.

    `platform`: see Paged; `kv`: see Attention.page_dtype.
    """
    rows = [layer.attn.page_row(layer.attn.page_dtype(dtype, kv), platform, placement) for layer in layers]
    return tuple(None if row is None else (num_pages, page_size, *row) for row in rows)


def kv_bytes_per_token(cfg: ModelConfig, itemsize: int = 2) -> int:
    """Return the bytes of the KV cache per token."""
    return sum(math.prod(row) * itemsize for layer in cfg.layers if (row := layer.attn.cache_row))


def flops_per_token(cfg: ModelConfig, context: float = 0, train: bool = False) -> float:
    """Return the FLOPs of one token.

    The weights' products and attention over `context` earlier tokens, limited by windows.

    The backward pass costs twice the forward. For the mean of a causal sequence of T tokens use context = T / 2.
    """
    attention = sum(layer.attn.flops_per_key * layer.attn.keys_seen(context) for layer in cfg.layers)
    return (matmul_flops(text_spec(cfg)) + attention) * (3 if train else 1)


COMMON = {
    "embed": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "head": "lm_head.weight",
    "score": "score.weight",
    "per_layer.embed": "model.embed_tokens_per_layer.weight",
    "per_layer.proj": "model.per_layer_model_projection.weight",
    "per_layer.norm": "model.per_layer_projection_norm.weight",
}

LAYER = {
    "attn_norm": "input_layernorm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "attn.q": "self_attn.q_proj.weight",
    "attn.k": "self_attn.k_proj.weight",
    "attn.v": "self_attn.v_proj.weight",
    "attn.o": "self_attn.o_proj.weight",
    "attn.q_bias": "self_attn.q_proj.bias",
    "attn.k_bias": "self_attn.k_proj.bias",
    "attn.v_bias": "self_attn.v_proj.bias",
    "attn.o_bias": "self_attn.o_proj.bias",
    "attn.q_norm": "self_attn.q_norm.weight",
    "attn.k_norm": "self_attn.k_norm.weight",
    "attn.sinks": "self_attn.sinks",
    "attn.q_a": "self_attn.q_a_proj.weight",
    "attn.q_a_bias": "self_attn.q_a_proj.bias",
    "attn.q_a_norm": "self_attn.q_a_layernorm.weight",
    "attn.q_b": "self_attn.q_b_proj.weight",
    "attn.kv_a": "self_attn.kv_a_proj_with_mqa.weight",
    "attn.kv_a_bias": "self_attn.kv_a_proj_with_mqa.bias",
    "attn.kv_a_norm": "self_attn.kv_a_layernorm.weight",
    "attn.kv_b": "self_attn.kv_b_proj.weight",
    "mlp.gate": "mlp.gate_proj.weight",
    "mlp.up": "mlp.up_proj.weight",
    "mlp.down": "mlp.down_proj.weight",
    "mlp.gate_bias": "mlp.gate_proj.bias",
    "mlp.up_bias": "mlp.up_proj.bias",
    "mlp.down_bias": "mlp.down_proj.bias",
    "moe.router": "mlp.gate.weight",
    "moe.choice_bias": "mlp.gate.e_score_correction_bias",
    "moe.gate": "mlp.experts.{e}.gate_proj.weight",
    "moe.up": "mlp.experts.{e}.up_proj.weight",
    "moe.down": "mlp.experts.{e}.down_proj.weight",
    "moe.shared.gate": "mlp.shared_experts.gate_proj.weight",
    "moe.shared.up": "mlp.shared_experts.up_proj.weight",
    "moe.shared.down": "mlp.shared_experts.down_proj.weight",
    "moe.shared.gate_bias": "mlp.shared_experts.gate_proj.bias",
    "moe.shared.up_bias": "mlp.shared_experts.up_proj.bias",
    "moe.shared.down_bias": "mlp.shared_experts.down_proj.bias",
    # only Gemma 4 has these
    "mlp_out_norm": "post_feedforward_layernorm_1.weight",
    "moe_norm": "pre_feedforward_layernorm_2.weight",
    "moe_post_norm": "post_feedforward_layernorm_2.weight",
    "per_layer.gate": "per_layer_input_gate.weight",
    "per_layer.proj": "per_layer_projection.weight",
    "per_layer.norm": "post_per_layer_input_norm.weight",
    "scalar": "layer_scalar",
}
