"""Qwen2.5-VL: images of any shape, whose patches attend within windows in most blocks.

N items, P patches of an item (padded; those of a feature follow each other), F features of an item, D width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dovetail.core.errors import UserError
from dovetail.core.mesh import Placement, constrain
from dovetail.core.spec import matmul_flops
from dovetail.core.types import Params
from dovetail.models.config import ModelConfig
from dovetail.models.family import Fields, VisionFamily, read_glu
from dovetail.models.towers.encoder import Encoder, encoder_block, norm, norm_spec
from dovetail.models.towers.qwen_vl import MAX_PATCHES, OUTER, QwenTower, as_text, read_sections, read_tower
from dovetail.models.towers.siglip import CHANNELS
from dovetail.models.towers.vision import Vision
from dovetail.ops.rope import blocked_axes

AT = "visual."
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
BLOCK = {
    f"{key}{end}": f"{AT}blocks.{{i}}.{name}.{what}"
    for key, name in {
        "attn.q": "attn.qkv",
        "attn.k": "attn.qkv",
        "attn.v": "attn.qkv",
        "attn.o": "attn.proj",
        "mlp.gate": "mlp.gate_proj",
        "mlp.up": "mlp.up_proj",
        "mlp.down": "mlp.down_proj",
    }.items()
    for end, what in (("", "weight"), ("_bias", "bias"))
} | {"attn_norm": f"{AT}blocks.{{i}}.norm1.weight", "mlp_norm": f"{AT}blocks.{{i}}.norm2.weight"}


@dataclass(frozen=True)
class Qwen25VlTower(QwenTower):
    """Describe Qwen2.5-VL's tower.

    Attributes:
        window: The side of a window in patches.
        full: The blocks in which all patches of an item see each other.
    """

    window: int
    full: tuple[int, ...]

    def flops(self, patches: int) -> float:
        """Return the FLOPs of the forward pass of one item."""
        specs, features = self.spec(), patches // self.patches_per_feature
        seen = [patches if i in self.full else min(patches, self.window**2) for i in range(self.encoder.layers)]
        each = matmul_flops((specs["patch"], specs["layers"])) + 4.0 * self.encoder.dim * sum(seen)
        return patches * each + features * matmul_flops(specs["merger"])

    def spec(self) -> dict[str, Any]:
        """Return the weights of the tower and of its projector."""
        norm_of_merger = norm_spec(self.encoder.dim, f"{AT}merger.ln_q.weight")
        return {
            "patch": self.patch_spec(f"{AT}patch_embed.proj.weight"),
            "layers": self.encoder.spec(BLOCK),
            "merger": {"norm": norm_of_merger, **self.merger_spec(f"{AT}merger.mlp.0", f"{AT}merger.mlp.2")},
        }

    def __call__(
        self, params: Params, patches: jax.Array, positions: jax.Array, placement: Placement | None = None
    ) -> jax.Array:
        """Return the features of items (see models.towers.vision.Tower).

        The features are sorted by window before the first block, and put back into their order after the last.
        """
        windows = self._windows(positions)
        order = jnp.argsort(windows, axis=-1, stable=True)
        patches, positions = self._sorted(patches, order), self._sorted(positions, order)
        windows = jnp.repeat(jnp.take_along_axis(windows, order, axis=1), self.patches_per_feature, axis=1)
        dtype = params["merger"]["norm"]["weight"].dtype
        x, tables = self.embed(params, _normalised(patches).astype(dtype)), self.tables(positions)
        lengths = (positions >= 0).all(-1).sum(-1, dtype=jnp.int32)
        for i, p in enumerate(params["layers"]):
            x = constrain(x, placement, "batch", None, None)
            near = None if i in self.full else windows
            x = encoder_block(p, x, lengths, tables, near, most=self.window**2, of=self.encoder, placement=placement)
        features = self.merge(params["merger"], self.squares(norm(params["merger"]["norm"], x, self.encoder.eps)))
        return jnp.take_along_axis(features, jnp.argsort(order, axis=-1)[..., None], axis=1)

    def _windows(self, positions: jax.Array) -> jax.Array:
        """Return the number [N, F] of each feature's window, in order of rows; the largest for padding."""
        at = positions[:, :: self.patches_per_feature] // self.window
        return jnp.where(at[..., 0] < 0, jnp.iinfo(jnp.int32).max, at[..., 1] * MAX_PATCHES + at[..., 0])

    def _sorted(self, x: jax.Array, order: jax.Array) -> jax.Array:
        """Return x [N, P, ..] with the patches of features in this order [N, F]."""
        whole = x.reshape(*order.shape, self.patches_per_feature, -1)
        return jnp.take_along_axis(whole, order[..., None, None], axis=1).reshape(x.shape)


def _normalised(patches: jax.Array) -> jax.Array:
    """Return pixels 0..255 with CLIP's mean subtracted and divided by its standard deviation."""
    area = patches.shape[-1] // CHANNELS
    mean, std = (jnp.asarray(np.tile(each, area), jnp.float32) for each in (CLIP_MEAN, CLIP_STD))
    return (patches.astype(jnp.float32) / 255 - mean) / std


# --- the config -------------------------------------------------------------------------------------------------------


def parse_qwen2_5_vl(f: Fields, vision: Fields, text: ModelConfig) -> Vision:
    """Parse the config of Qwen2.5-VL."""
    inner = f.hf.get("text_config") or f.hf
    f.skip(*OUTER, "rope_scaling", "rope_parameters", *(key for key in inner if key not in OUTER))  # read by the text
    vision.only("model_type", "qwen2_5_vl_vision", "qwen2_5_vl")
    vision.only("in_chans", CHANNELS)
    vision.skip("spatial_patch_size", "tokens_per_second")  # repeats patch_size; is of videos
    sizes = read_tower(vision, text, patch_size=14)
    pixels, unit = vision.get("window_size", 112), sizes["patch_size"] * sizes["square"]
    if pixels % unit:
        raise UserError(f"{vision.where}: window_size={pixels} must be a multiple of {unit}", param="window_size")
    act = read_glu(vision).kind
    blocks = dict(depth=32, hidden_size=3584, num_heads=16, intermediate_size=3420)
    encoder = Encoder(*(vision.get(key, default) for key, default in blocks.items()), act=act)
    full = tuple(vision.get("fullatt_block_indexes", (7, 15, 23, 31)))
    tower = Qwen25VlTower(encoder=encoder, **sizes, window=pixels // sizes["patch_size"], full=full)
    _, sections, _ = read_sections(f, text, (16, 24, 24))
    return Vision(tower, f.get("image_token_id", 151_655), mrope=blocked_axes(sections))


def _as_qwen2(text: dict[str, Any]) -> dict[str, Any]:
    """Return the config of a Qwen2 with the defaults of Qwen2.5-VL."""
    return as_text({"rope_theta": 1e6, "rms_norm_eps": 1e-5, **text}, kind="qwen2")


FAMILIES = (
    VisionFamily(
        ("qwen2_5_vl",),
        "Qwen2_5_VLForConditionalGeneration",
        parse_qwen2_5_vl,
        text_prefix="model.",
        aliases=((r"^model\.visual\.", AT),),
        as_text=_as_qwen2,
        flat=True,
    ),
)
