"""Qwen3-VL: images of any shape, 2 x 2 patches a feature, and features of inner layers for the first text layers.

N items, P patches of an item (padded; those of a feature follow each other), D width, F features of an item.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from dovetail.core.errors import UserError
from dovetail.core.mesh import Placement, constrain
from dovetail.core.spec import ParamSpec, Stored, matmul_flops
from dovetail.core.types import Params
from dovetail.models.config import ModelConfig
from dovetail.models.family import Fields, VisionFamily, read_glu
from dovetail.models.towers.encoder import BIAS, Encoder, encoder_block, norm, norm_spec
from dovetail.models.towers.qwen_vl import OUTER, QwenTower, as_text, read_sections, read_tower
from dovetail.models.towers.siglip import centred
from dovetail.models.towers.vision import Vision
from dovetail.ops.rope import interleaved_axes

AT = "model.visual."
BLOCK = {
    f"{key}{end}": f"{AT}blocks.{{i}}.{name}.{what}"
    for key, name in {
        "attn_norm": "norm1",
        "attn.q": "attn.qkv",
        "attn.k": "attn.qkv",
        "attn.v": "attn.qkv",
        "attn.o": "attn.proj",
        "mlp_norm": "norm2",
        "mlp.up": "mlp.linear_fc1",
        "mlp.down": "mlp.linear_fc2",
    }.items()
    for end, what in (("", "weight"), ("_bias", "bias"))
}


@dataclass(frozen=True)
class Qwen3VlTower(QwenTower):
    """Describe Qwen3-VL's tower.

    Attributes:
        side: The positions of a side in the learned square, which is resized to an item's shape.
        deepstack: The blocks whose outputs become further features.
    """

    side: int
    deepstack: tuple[int, ...]

    def flops(self, patches: int) -> float:
        """Return the FLOPs of the forward pass of one item."""
        specs, features = self.spec(), patches // self.patches_per_feature
        merged = matmul_flops((specs["merger"], specs["mergers"]))
        return self.encoder.flops(patches) + patches * matmul_flops(specs["patch"]) + features * merged

    # --- weights ------------------------------------------------------------------------------------------------------

    def spec(self) -> dict[str, Any]:
        """Return the weights of the tower and of its projectors."""
        D = self.encoder.dim
        table = self.side**2, D
        return {
            "patch": self.patch_spec(f"{AT}patch_embed.proj.weight"),
            "patch_bias": ParamSpec((D,), (None,), Stored((f"{AT}patch_embed.proj.bias",), (D,)), **BIAS),
            "positions": ParamSpec(table, (None, "embed"), Stored((f"{AT}pos_embed.weight",), table), active=0.0),
            "layers": self.encoder.spec(BLOCK),
            "merger": self._merger(f"{AT}merger.", D),
            "mergers": tuple(
                self._merger(f"{AT}deepstack_merger_list.{i}.", D * self.square**2) for i in range(len(self.deepstack))
            ),
        }

    def _merger(self, at: str, normed: int) -> dict[str, Any]:
        tree = self.merger_spec(f"{at}linear_fc1", f"{at}linear_fc2")
        return {"norm": norm_spec(normed, f"{at}norm.weight", f"{at}norm.bias"), **tree}

    # --- the forward --------------------------------------------------------------------------------------------------

    def __call__(
        self, params: Params, patches: jax.Array, positions: jax.Array, placement: Placement | None = None
    ) -> jax.Array:
        """Return the features of items (see models.towers.vision.Tower), and beside each those of inner blocks."""
        x = self.embed(params, centred(patches, params["positions"].dtype))
        x = x + self._resized(params["positions"], positions).astype(x.dtype)
        lengths = (positions >= 0).all(-1).sum(-1, dtype=jnp.int32)
        tables, further = self.tables(positions), []
        for i, p in enumerate(params["layers"]):
            x = constrain(x, placement, "batch", None, None)
            x = encoder_block(p, x, lengths, tables, of=self.encoder, placement=placement)
            if i in self.deepstack:
                further.append(self._merge(params["mergers"][self.deepstack.index(i)], x, squares_first=True))
        return jnp.concatenate([self._merge(params["merger"], x, squares_first=False), *further], axis=-1)

    def _resized(self, table: jax.Array, positions: jax.Array) -> jax.Array:
        """Return the learned positions [N, P, D] of patches, linear between those of the square, in f32."""
        at = jnp.maximum(positions, 0)
        last = jnp.maximum(at.max(axis=1, keepdims=True), 1)
        source = at.astype(jnp.float32) * (self.side - 1) / last  # corners on corners
        low = jnp.floor(source).astype(jnp.int32)
        share = source - low
        high = jnp.minimum(low + 1, self.side - 1)
        total = 0.0
        for y, weight_y in ((low[..., 1], 1 - share[..., 1]), (high[..., 1], share[..., 1])):
            for x, weight_x in ((low[..., 0], 1 - share[..., 0]), (high[..., 0], share[..., 0])):
                total += table[y * self.side + x].astype(jnp.float32) * (weight_y * weight_x)[..., None]
        return jnp.asarray(total)

    def _merge(self, p: Params, x: jax.Array, squares_first: bool) -> jax.Array:
        """Map patches [N, P, D] to features [N, F, dim]; the norm is of squares or of patches."""
        x = norm(p["norm"], self.squares(x) if squares_first else x, self.encoder.eps)
        return self.merge(p, x if squares_first else self.squares(x))


# --- the config -------------------------------------------------------------------------------------------------------


def parse_qwen3_vl(f: Fields, vision: Fields, text: ModelConfig) -> Vision:
    """Parse the config of Qwen3-VL."""
    f.skip(*OUTER)
    vision.only("model_type", "qwen3_vl_vision", "qwen3_vl")
    sizes, act = read_tower(vision, text, patch_size=16), read_glu(vision, "hidden_act", "gelu_pytorch_tanh").kind
    blocks = dict(depth=27, hidden_size=1152, num_heads=16, intermediate_size=4304)
    encoder = Encoder(*(vision.get(key, default) for key, default in blocks.items()), act=act)
    positions = vision.get("num_position_embeddings", 2304)
    if math.isqrt(positions) ** 2 != positions:
        raise UserError(
            f"{vision.where}: num_position_embeddings={positions} must be a square", param="num_position_embeddings"
        )
    deepstack = tuple(vision.get("deepstack_visual_indexes", (8, 16, 24)))
    tower = Qwen3VlTower(encoder=encoder, **sizes, side=math.isqrt(positions), deepstack=deepstack)
    rope, sections, count = read_sections(f, text, (24, 20, 20))
    rope.only("mrope_interleaved", True)
    axes, layers = interleaved_axes(sections, count), tuple(range(len(deepstack)))
    return Vision(tower, f.get("image_token_id", 151_655), mrope=axes, deepstack=layers)


FAMILIES = (
    VisionFamily(
        ("qwen3_vl",),
        "Qwen3VLForConditionalGeneration",
        parse_qwen3_vl,
        text_prefix="model.language_model.",
        as_text=functools.partial(as_text, kind="qwen3"),
    ),
)
