"""ModelConfig: the architecture and nothing else. No mesh, no kernel, no dtype.

A model is a list of layers, each described in full, so families differ by what they put here and `decoder` knows none
of them by name. Built from a Hugging Face config.json by a family's `parse` (see registry), and written back as it was.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from dovetail.ops.glu import Glu
from dovetail.ops.moe import Router
from dovetail.ops.rope import Rope


@dataclass(frozen=True)
class Attention:
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    rope: Rope | None  # None: no positions (SmolLM3's every fourth layer)
    window: int | None = None
    softcap: float | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: str = ""  # "head": over each head's dims; "all": over the heads together (OLMo)
    v_norm: bool = False  # values are normed too, without a weight (Gemma 4)
    k_is_v: bool = False  # the key projection gives the values as well (Gemma 4)
    sinks: bool = False  # a learnt logit a head that takes weight and gives nothing (GPT-OSS)
    kv_from: int | None = None  # reads the keys and values of this earlier layer (Gemma 4)


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek)."""

    heads: int
    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    scale: float
    rope: Rope
    bias: bool = False
    norm_eps: float = 1e-6  # of the two latents' norms, whatever the model's own is


@dataclass(frozen=True)
class Mlp:
    width: int
    glu: Glu
    bias: bool = False


@dataclass(frozen=True)
class Moe:
    router: Router
    width: int
    glu: Glu
    shared: Mlp | None = None  # an expert every token passes (DeepSeek)
    bias: bool = False  # the router and the experts have biases (GPT-OSS)
    choice_bias: bool = False  # a bias on the choice alone, kept balanced without a loss (DeepSeek-V3)
    scaled_router: bool = False  # the router norms and scales its own input and its experts' weights (Gemma 4)


@dataclass(frozen=True)
class Layer:
    """One block. With both mlp and moe, they run side by side (Gemma 4)."""

    attn: Attention | Latent
    mlp: Mlp | None
    moe: Moe | None = None
    pre_norm: bool = True
    post_norm: bool = False
    per_layer_dim: int = 0  # the width of this layer's own token embedding (Gemma 4)
    scalar: bool = False  # the block's output times a stored number (Gemma 4)


@dataclass(frozen=True)
class ModelConfig:
    family: str
    vocab: int
    dim: int
    layers: tuple[Layer, ...]
    max_len: int
    norm_eps: float
    norm_offset: float = 0.0
    embed_scale: float = 1.0
    logit_softcap: float | None = None
    tied: bool = False
    per_layer_vocab: int = 0
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    source: str = "{}"  # the config.json it was read from

    def __hash__(self) -> int:
        return hash(self.source)  # a str keeps its hash: a config is a static argument of every step

    def to_hf(self) -> dict[str, Any]:
        return json.loads(self.source)
