"""Read a SigLIP tower from a `vision_config`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dovetail.core.errors import UserError
from dovetail.models.family import Fields, read_glu
from dovetail.models.towers.encoder import Encoder
from dovetail.models.towers.siglip import CHANNELS, Siglip


def read_siglip(f: Fields, defaults: Mapping[str, Any]) -> Siglip:
    """Return the tower that a `vision_config` describes; `defaults` are those of its config class."""
    f.only("num_channels", CHANNELS)
    f.only("attention_dropout", 0.0)
    sizes = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size")
    layers, dim, heads, width = (f.get(key, defaults[key]) for key in sizes)
    if dim % heads:
        raise UserError(
            f"{f.where}: hidden_size={dim} must be a multiple of num_attention_heads={heads}",
            param="num_attention_heads",
        )
    act = read_glu(f, "hidden_act", "gelu_pytorch_tanh").kind
    encoder = Encoder(layers, dim, heads, width, f.get("layer_norm_eps", 1e-6), act)
    return Siglip(encoder, *(f.get(key, defaults[key]) for key in ("image_size", "patch_size")))
