"""Gemma 3 with images: SigLIP, whose patches are averaged by squares, normed and projected."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from dovetail.core.errors import UserError
from dovetail.core.spec import ParamSpec, Stored
from dovetail.core.types import Params
from dovetail.models.config import ModelConfig
from dovetail.models.family import Fields, VisionFamily
from dovetail.models.towers.siglip import SiglipTower, read_siglip, siglip_names
from dovetail.models.towers.vision import Vision
from dovetail.ops.linear import matmul
from dovetail.ops.norm import rms_norm

# transformers' defaults of `vision_config`, and those of `text_config`, of which published configs leave most out
DEFAULTS = dict(
    num_hidden_layers=12, hidden_size=768, num_attention_heads=12, intermediate_size=3072, image_size=224,
    patch_size=16,
)  # fmt: skip
TEXT_DEFAULTS = dict(
    model_type="gemma3_text", vocab_size=262_208, hidden_size=2304, intermediate_size=9216, num_hidden_layers=26,
    num_attention_heads=8, num_key_value_heads=4, head_dim=256, max_position_embeddings=131_072, sliding_window=4096,
    bos_token_id=2, eos_token_id=1,
)  # fmt: skip


@dataclass(frozen=True)
class Gemma3Tower(SiglipTower):
    """Describe Gemma 3's tower: the mean of a square, an RMS norm and one matrix."""

    @property
    def projector_size(self) -> int:
        """Return the elements of the projector's matrix."""
        return self.dim * self.siglip.encoder.dim

    def spec(self) -> dict[str, Any]:
        """Return the weights of the tower and of its projector."""
        at, width = "multi_modal_projector.", self.siglip.encoder.dim
        proj = Stored((f"{at}mm_input_projection_weight",), (width, self.dim), transposed=True)
        norm = Stored((f"{at}mm_soft_emb_norm.weight",), (width,))
        return {
            "siglip": self.siglip.spec(siglip_names("vision_tower.vision_model.")),
            "projector": {
                "proj": ParamSpec((self.dim, width), ("embed", None), proj),
                "norm": ParamSpec((width,), (None,), norm, init="zeros", active=0.0),
            },
        }

    def project(self, params: Params, squares: jax.Array) -> jax.Array:
        """Map the patches of squares [N, F, square * square, width] to features [N, F, dim]."""
        x = squares.astype(jnp.float32).mean(axis=2).astype(squares.dtype)
        return matmul(rms_norm(x, params["norm"], self.siglip.encoder.eps, 1.0), params["proj"])


def parse_gemma3(f: Fields, vision: Fields, text: ModelConfig) -> Vision:
    """Parse the config of Gemma 3 with images."""
    f.skip("boi_token_index", "eoi_token_index")  # of the prompt (io.images)
    vision.only("model_type", "siglip_vision_model")
    vision.only("vision_use_head", False)
    siglip = read_siglip(vision, DEFAULTS)
    tokens = f.get("mm_tokens_per_image", 256)
    across = math.isqrt(tokens)
    if across**2 != tokens or siglip.side % across:
        raise UserError(
            f"{f.where}: mm_tokens_per_image={tokens} must be the square of a number that divides the {siglip.side} "
            "patches of an image's side",
            param="mm_tokens_per_image",
        )
    tower = Gemma3Tower(siglip, siglip.side // across, text.dim)
    return Vision(tower, f.get("image_token_index", f.get("image_token_id", 262_144)), block_mask="all")


FAMILIES = (
    VisionFamily(
        ("gemma3",),
        "Gemma3ForConditionalGeneration",
        parse_gemma3,
        text_prefix="language_model.model.",
        aliases=((r"^(model\.)?vision_tower\.(vision_model\.)?", "vision_tower.vision_model."),
                 (r"^model\.multi_modal_projector\.", "multi_modal_projector.")),
        as_text=lambda hf: TEXT_DEFAULTS | hf,
    ),
)  # fmt: skip
