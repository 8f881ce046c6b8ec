"""SmolVLM and Idefics3: SigLIP, whose patches are joined by squares (a pixel shuffle) and projected, before a Llama."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

from dovetail.core.errors import UserError
from dovetail.core.spec import ParamSpec, Stored
from dovetail.core.types import Params
from dovetail.models.config import ModelConfig
from dovetail.models.family import Fields, VisionFamily
from dovetail.models.towers.siglip import SiglipTower, read_siglip, siglip_names
from dovetail.models.towers.vision import Vision
from dovetail.ops.linear import matmul

# transformers' defaults of `vision_config`
DEFAULTS = dict(
    num_hidden_layers=12, hidden_size=1152, num_attention_heads=16, intermediate_size=3072, image_size=224,
    patch_size=32,
)  # fmt: skip


@dataclass(frozen=True)
class SmolVlmTower(SiglipTower):
    """Describe SmolVLM's tower: the patches of a square side by side, times one matrix."""

    @property
    def projector_size(self) -> int:
        """Return the elements of the projector's matrix."""
        return self.dim * self.square**2 * self.siglip.encoder.dim

    def spec(self) -> dict[str, Any]:
        """Return the weights of the tower and of its projector."""
        shape = self.dim, self.square**2 * self.siglip.encoder.dim
        stored = Stored(("model.connector.modality_projection.proj.weight",), shape)
        return {
            "siglip": self.siglip.spec(siglip_names("model.vision_model.")),
            "projector": {"proj": ParamSpec(shape, ("embed", None), stored)},
        }

    def project(self, params: Params, squares: jax.Array) -> jax.Array:
        """Map the patches of squares [N, F, square * square, width] to features [N, F, dim]."""
        return matmul(squares.reshape(*squares.shape[:2], -1), params["proj"])


def parse_smolvlm(f: Fields, vision: Fields, text: ModelConfig) -> Vision:
    """Parse the config of SmolVLM and Idefics3."""
    f.skip("vocab_size")  # repeats that of text_config
    f.skip("_pad_token_id")
    vision.skip("max_image_size", "size", "tie_word_embeddings", "use_base_siglip")  # a processor's, or unused
    siglip = read_siglip(vision, DEFAULTS)
    square = f.get("scale_factor", 2)
    if siglip.side % square:
        raise UserError(
            f"{f.where}: scale_factor={square} must divide the {siglip.side} patches of an image's side",
            param="scale_factor",
        )
    return Vision(SmolVlmTower(siglip, square, text.dim), image_token=f.get("image_token_id", 128257))


def read_text(f: Fields) -> None:
    """Read what published configs have besides Llama's fields: options of the training code that was used."""
    f.only("qk_layer_norms", False)
    f.only("use_resampler", False)
    f.skip("_flash_attn_2_enabled", "neftune_noise_alpha", "perceiver_config", "pixel_shuffle_factor")


FAMILIES = tuple(
    VisionFamily(
        (kind,), f"{name}ForConditionalGeneration", parse_smolvlm, text_prefix="model.text_model.", read_text=read_text
    )
    for kind, name in (("smolvlm", "SmolVLM"), ("idefics3", "Idefics3"))
)
