"""The common part of Qwen2.5-VL and Qwen3-VL: patches of two frames, rotary positions, and a merger of squares.

N items, P patches of an item (padded; those of a feature follow each other), F features of an item, D width, H head
dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from dovetail.core.errors import UserError
from dovetail.core.spec import ParamSpec, Stored
from dovetail.core.types import Params
from dovetail.models.attention import Attention
from dovetail.models.config import ModelConfig
from dovetail.models.family import Fields
from dovetail.models.towers.encoder import BIAS, Encoder
from dovetail.models.towers.siglip import CHANNELS
from dovetail.models.towers.vision import SquareTower
from dovetail.ops.linear import matmul
from dovetail.ops.rope import Rope

FRAMES = 2  # of a video in a patch; an image is a frame that is shown twice
MAX_PATCHES = 65_536  # of the largest image that published processors make
# Fields that are not the text model's; those of tokens describe the prompt (io.images).
OUTER = (
    "text_config", "vision_config", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id",
    "vision_token_id",
)  # fmt: skip


@dataclass(frozen=True)
class QwenTower(SquareTower):
    """Describe the common part of the towers; for the sizes of images see SquareTower.

    Attributes:
        encoder: The blocks.
        theta: The base of the rotary positions.
        dim: The width of the language model.
    """

    encoder: Encoder
    theta: float
    dim: int

    def patch_spec(self, name: str) -> ParamSpec:
        """Return the weight of patches, stored as a convolution [D, channel, frame, row, column]."""
        D, p = self.encoder.dim, self.patch_size
        shape = D, CHANNELS, FRAMES, p, p
        conv = Stored((name,), shape, view=(D, CHANNELS, FRAMES * p * p), transposed=True)
        return ParamSpec((D, FRAMES * self.patch_dim), ("embed", None), conv)

    def merger_spec(self, up: str, down: str) -> dict[str, ParamSpec]:
        """Return the products of a merger under their stored names, without its norm."""
        M, tree = self.encoder.dim * self.square**2, {}
        for x, name, out, axes in (("up", up, M, ("mlp", "embed")), ("down", down, self.dim, ("embed", "mlp"))):
            tree[x] = ParamSpec((out, M), axes, Stored((f"{name}.weight",), (out, M)))
            tree[f"{x}_bias"] = ParamSpec((out,), (None,), Stored((f"{name}.bias",), (out,)), **BIAS)
        return tree

    def embed(self, params: Params, pixels: jax.Array) -> jax.Array:
        """Map normalised pixels [N, P, C] of one frame to [N, P, D]."""
        return matmul(jnp.concatenate([pixels] * FRAMES, axis=-1), params["patch"], params.get("patch_bias"))

    def tables(self, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return cos and sin [N, P, H / 2]: half of the frequencies turn by y, half by x."""
        rope = Rope(theta=self.theta, dim=self.encoder.dim // self.encoder.heads // 2)
        (cos_y, sin_y), (cos_x, sin_x) = (rope.tables(positions[..., i]) for i in (1, 0))
        return jnp.concatenate([cos_y, cos_x], axis=-1), jnp.concatenate([sin_y, sin_x], axis=-1)

    def squares(self, x: jax.Array) -> jax.Array:
        """Return patches [N, P, D] side by side, [N, F, square**2 D]."""
        return x.reshape(x.shape[0], x.shape[1] // self.square**2, -1)

    def merge(self, p: Params, squares: jax.Array) -> jax.Array:
        """Map squares [N, F, square**2 D] to features [N, F, dim]."""
        h = jax.nn.gelu(matmul(squares, p["up"], p["up_bias"]), approximate=False)
        return matmul(h, p["down"], p["down_bias"])


# --- the config -------------------------------------------------------------------------------------------------------


def read_tower(vision: Fields, text: ModelConfig, patch_size: int) -> dict[str, Any]:
    """Return the fields of QwenTower except the encoder; `patch_size` is the family's default."""
    vision.only("in_channels", CHANNELS)
    vision.only("temporal_patch_size", FRAMES)
    vision.only("out_hidden_size", text.dim)
    rope = Fields(vision.get("rope_parameters", {}), f"{vision.where}: rope_parameters")
    rope.only("rope_type", "axial", "default")
    theta = rope.get("rope_theta", 10_000.0)
    rope.done()
    size, square = vision.get("patch_size", patch_size), vision.get("spatial_merge_size", 2)
    return dict(patch_size=size, square=square, tokens=MAX_PATCHES // square**2, theta=theta, dim=text.dim)


def read_sections(f: Fields, text: ModelConfig, default: Sequence[int]) -> tuple[Fields, tuple[int, ...], int]:
    """Return the fields of the text model's positions, `mrope_section`, and the number of frequencies."""
    rope = Fields(_rope(f.hf.get("text_config") or f.hf), f"{f.where}: text_config: rope_parameters")
    sections = tuple(rope.get("mrope_section", tuple(default)))
    attn = text.layers[0].attn
    assert isinstance(attn, Attention) and attn.rope is not None
    count = attn.rope.dim // 2
    if len(sections) != 3 or sum(sections) != count:
        raise UserError(
            f"{rope.where}: mrope_section={list(sections)} must be three numbers whose sum is {count}",
            param="mrope_section",
        )
    return rope, sections, count


def as_text(text: dict[str, Any], kind: str) -> dict[str, Any]:
    """Return the config of the text model without images and positions in space; `kind` is its `model_type`."""
    rope = {key: value for key, value in _rope(text).items() if not key.startswith("mrope_")}
    rope |= {key: "default" for key in ("type", "rope_type") if rope.get(key) == "mrope"}
    others = {key: value for key, value in text.items() if key not in (*OUTER, "rope_parameters", "rope_scaling")}
    return {**others, "model_type": kind, "rope_parameters": rope}


def _rope(text: dict[str, Any]) -> dict[str, Any]:
    return dict(text.get("rope_parameters") or text.get("rope_scaling") or {})
