"""Gemma 4 12B ("unified"), which has no vision encoder: squares of pixels are projected to the language model's width.

N items, P squares of an item (padded), C numbers of a square, W width of the projection, D width of the language model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from dovetail.core.mesh import Placement, constrain
from dovetail.core.spec import ParamSpec, Stored, matmul_flops
from dovetail.core.types import Params
from dovetail.models.config import ModelConfig
from dovetail.models.family import Fields, VisionFamily
from dovetail.models.towers.encoder import BIAS, norm, norm_spec
from dovetail.models.towers.gemma4 import TOKENS, skip_other_media
from dovetail.models.towers.vision import SquareTower, Vision
from dovetail.ops.linear import matmul
from dovetail.ops.norm import rms_norm

AT = "model.vision_embedder."
EPS = 1e-5  # of the layer norms; the config has that of the RMS norm alone


@dataclass(frozen=True)
class Gemma4UnifiedTower(SquareTower):
    """Describe the projection of squares.

    Attributes:
        patch_size: The side of a square in pixels.
        square: 1: a square of pixels becomes a feature.
        tokens: The most features of an item.
        positions: The most squares of a row or a column.
        width: W.
        eps: That of the RMS norm before the last product.
        dim: D.
    """

    positions: int
    width: int
    eps: float
    dim: int

    def flops(self, patches: int) -> float:
        """Return the FLOPs of the forward pass of one item."""
        return patches * matmul_flops(self.spec())

    def spec(self) -> dict[str, Any]:
        """Return the weights of the projection."""
        C, W, D = self.patch_dim, self.width, self.dim

        def declare(name: str, shape: tuple[int, ...], axes: tuple, **more: Any) -> ParamSpec:
            return ParamSpec(shape, axes, Stored((name,), shape), **more)

        sizes = {"patch_norm": ("patch_ln1", C), "norm": ("patch_ln2", W), "position_norm": ("pos_norm", W)}
        norms = {key: norm_spec(size, f"{AT}{name}.weight", f"{AT}{name}.bias") for key, (name, size) in sizes.items()}
        return {
            "patch": declare(f"{AT}patch_dense.weight", (W, C), ("embed", None)),
            "patch_bias": declare(f"{AT}patch_dense.bias", (W,), (None,), **BIAS),
            "positions": declare(f"{AT}pos_embedding", (self.positions, 2, W), (None, None, "embed"), active=0.0),
            "proj": declare("model.embed_vision.embedding_projection.weight", (D, W), ("embed", None)),
            **norms,
        }

    def __call__(
        self, params: Params, patches: jax.Array, positions: jax.Array, placement: Placement | None = None
    ) -> jax.Array:
        """Return the features of items (see models.towers.vision.Tower)."""
        is_real, at = (positions >= 0).all(-1, keepdims=True), jnp.maximum(positions, 0)
        x = constrain((patches / 255.0).astype(params["patch"].dtype), placement, "batch", None, None)
        x = norm(params["norm"], matmul(norm(params["patch_norm"], x, EPS), params["patch"], params["patch_bias"]), EPS)
        places = params["positions"][at[..., 0], 0] + params["positions"][at[..., 1], 1]
        x = norm(params["position_norm"], x + jnp.where(is_real, places, 0), EPS)
        return matmul(rms_norm(x, None, self.eps), params["proj"])


def as_gemma4(text: dict[str, Any]) -> dict[str, Any]:
    """Return the text model's config as one of Gemma 4, which has the same layers without experts."""
    vision = {"use_bidirectional_attention": "vision"}
    return vision | text | {"model_type": "gemma4_text", "hidden_size_per_layer_input": 0, "enable_moe_block": False}


def parse_unified(f: Fields, vision: Fields, text: ModelConfig) -> Vision:
    """Parse the config of Gemma 4 12B."""
    skip_other_media(f)
    vision.only("model_type", "gemma4_unified_vision")
    side, width = vision.get("patch_size", 16) * vision.get("pooling_kernel_size", 3), vision.get("mm_embed_dim", 3840)
    vision.only("model_patch_size", side)
    vision.only("output_proj_dims", width)
    tower = Gemma4UnifiedTower(
        patch_size=side, square=1, tokens=f.get("vision_soft_tokens_per_image", TOKENS),
        positions=vision.get("mm_posemb_size", 1120), width=width, eps=vision.get("rms_norm_eps", 1e-6), dim=text.dim,
    )  # fmt: skip
    sees_both_ways = text.text_hf().get("use_bidirectional_attention") == "vision"
    return Vision(tower, f.get("image_token_id", 258_880), block_mask="sliding" if sees_both_ways else "")


FAMILIES = (
    VisionFamily(
        ("gemma4_unified",),
        "Gemma4UnifiedForConditionalGeneration",
        parse_unified,
        text_prefix="model.language_model.",
        as_text=as_gemma4,
        dropped=("audio_config",),
        unused=(r"model\.embed_audio\..*",),
    ),
)
