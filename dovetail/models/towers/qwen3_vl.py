"""Qwen3-VL: images of any shape, 2 x 2 patches a feature, and features of inner layers for the first text layers.

N items, P patches of an item (padded; those of a feature follow each other), D width, K heads, H head dim.
"""

from __future__ import annotations

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
from dovetail.models.towers.siglip import CHANNELS, centred
from dovetail.models.towers.vision import Vision
from dovetail.ops.linear import matmul
from dovetail.ops.rope import Rope

AT = "model.visual."
FRAMES = 2  # of a video in a patch; an image is a frame that is shown twice
MAX_PATCHES = 65_536  # of the largest image that published processors make
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
class Qwen3VlTower:
    """Describe Qwen3-VL's tower.

    Attributes:
        encoder: Its blocks.
        patch_size: The side of a patch in pixels.
        side: The positions of a side in the learned square, which is resized to an item's shape.
        square: The patches of a feature's side.
        deepstack: The blocks whose outputs become further features.
        theta: The base of the rotary positions.
        dim: The width of the language model.
    """

    encoder: Encoder
    patch_size: int
    side: int
    square: int
    deepstack: tuple[int, ...]
    theta: float
    dim: int

    @property
    def patch_dim(self) -> int:
        """Return the numbers of a patch."""
        return self.patch_size**2 * CHANNELS

    @property
    def patches_per_feature(self) -> int:
        """Return how many patches of an item become one feature."""
        return self.square**2

    @property
    def max_patches(self) -> int:
        """Return the most patches of an item."""
        return MAX_PATCHES

    @property
    def min_patches(self) -> int:
        """Return the fewest patches of an item."""
        return self.patches_per_feature

    def flops(self, patches: int) -> float:
        """Return the FLOPs of the forward pass of one item."""
        specs, features = self.spec(), patches // self.patches_per_feature
        merged = matmul_flops((specs["merger"], specs["mergers"]))
        return self.encoder.flops(patches) + patches * matmul_flops(specs["patch"]) + features * merged

    # --- weights ------------------------------------------------------------------------------------------------------

    def spec(self) -> dict[str, Any]:
        """Return the weights of the tower and of its projectors."""
        D, p = self.encoder.dim, self.patch_size
        shape = D, CHANNELS, FRAMES, p, p
        conv = Stored((f"{AT}patch_embed.proj.weight",), shape, view=(D, CHANNELS, FRAMES * p * p), transposed=True)
        table = self.side**2, D
        return {
            "patch": ParamSpec((D, FRAMES * self.patch_dim), ("embed", None), conv),
            "patch_bias": ParamSpec((D,), (None,), Stored((f"{AT}patch_embed.proj.bias",), (D,)), **BIAS),
            "positions": ParamSpec(table, (None, "embed"), Stored((f"{AT}pos_embed.weight",), table), active=0.0),
            "layers": self.encoder.spec(BLOCK),
            "merger": self._merger(f"{AT}merger.", D),
            "mergers": tuple(
                self._merger(f"{AT}deepstack_merger_list.{i}.", D * self.square**2) for i in range(len(self.deepstack))
            ),
        }

    def _merger(self, at: str, normed: int) -> dict[str, Any]:
        M = self.encoder.dim * self.square**2
        sizes = {"up": ("linear_fc1", M, ("mlp", "embed")), "down": ("linear_fc2", self.dim, ("embed", "mlp"))}
        tree: dict[str, Any] = {"norm": norm_spec(normed, f"{at}norm.weight", f"{at}norm.bias")}
        for x, (name, out, axes) in sizes.items():
            tree[x] = ParamSpec((out, M), axes, Stored((f"{at}{name}.weight",), (out, M)))
            tree[f"{x}_bias"] = ParamSpec((out,), (None,), Stored((f"{at}{name}.bias",), (out,)), **BIAS)
        return tree

    # --- the forward --------------------------------------------------------------------------------------------------

    def __call__(
        self, params: Params, patches: jax.Array, positions: jax.Array, placement: Placement | None = None
    ) -> jax.Array:
        """Return the features of items (see models.towers.vision.Tower), and beside each those of inner blocks."""
        pixels = centred(patches, params["positions"].dtype)
        x = matmul(jnp.concatenate([pixels] * FRAMES, axis=-1), params["patch"], params["patch_bias"])
        x = x + self._resized(params["positions"], positions).astype(x.dtype)
        lengths = (positions >= 0).all(-1).sum(-1, dtype=jnp.int32)
        tables, further = self._tables(positions), []
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

    def _tables(self, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return cos and sin [N, P, H / 2]: half of the frequencies turn by y, half by x."""
        rope = Rope(theta=self.theta, dim=self.encoder.dim // self.encoder.heads // 2)
        (cos_y, sin_y), (cos_x, sin_x) = (rope.tables(positions[..., i]) for i in (1, 0))
        return jnp.concatenate([cos_y, cos_x], axis=-1), jnp.concatenate([sin_y, sin_x], axis=-1)

    def _merge(self, p: Params, x: jax.Array, squares_first: bool) -> jax.Array:
        """Map patches [N, P, D] to features [N, P / square**2, dim]; the norm is of squares or of patches."""
        squares = x.shape[0], x.shape[1] // self.square**2, -1
        x = norm(p["norm"], x.reshape(squares) if squares_first else x, self.encoder.eps).reshape(squares)
        return matmul(jax.nn.gelu(matmul(x, p["up"], p["up_bias"]), approximate=False), p["down"], p["down_bias"])


# --- the config -------------------------------------------------------------------------------------------------------


def parse_qwen3_vl(f: Fields, vision: Fields, text: ModelConfig) -> Vision:
    """Parse the config of Qwen3-VL."""
    f.skip("video_token_id", "vision_start_token_id", "vision_end_token_id")  # of the prompt (io.images)
    vision.only("model_type", "qwen3_vl_vision", "qwen3_vl")
    vision.only("in_channels", CHANNELS)
    vision.only("temporal_patch_size", FRAMES)
    vision.only("out_hidden_size", text.dim)
    rope = Fields(vision.get("rope_parameters", {}), f"{vision.where}: rope_parameters")
    rope.only("rope_type", "axial", "default")
    theta = rope.get("rope_theta", 10_000.0)
    rope.done()
    act = read_glu(vision, "hidden_act", "gelu_pytorch_tanh").kind
    sizes = dict(depth=27, hidden_size=1152, num_heads=16, intermediate_size=4304)
    encoder = Encoder(*(vision.get(key, default) for key, default in sizes.items()), act=act)
    positions = vision.get("num_position_embeddings", 2304)
    if math.isqrt(positions) ** 2 != positions:
        raise UserError(
            f"{vision.where}: num_position_embeddings={positions} must be a square", param="num_position_embeddings"
        )
    deepstack = tuple(vision.get("deepstack_visual_indexes", (8, 16, 24)))
    tower = Qwen3VlTower(
        encoder, vision.get("patch_size", 16), math.isqrt(positions), vision.get("spatial_merge_size", 2), deepstack,
        theta, text.dim,
    )  # fmt: skip
    mrope = Fields(_rope(f.hf["text_config"]), f"{f.where}: text_config: rope_parameters")
    mrope.only("mrope_interleaved", True)
    sections = tuple(mrope.get("mrope_section", (24, 20, 20)))
    layers = tuple(range(len(deepstack)))
    return Vision(tower, f.get("image_token_id", 151_655), mrope=sections, deepstack=layers)


def _rope(text: dict[str, Any]) -> dict[str, Any]:
    return dict(text.get("rope_parameters") or text.get("rope_scaling") or {})


def as_qwen3(text: dict[str, Any]) -> dict[str, Any]:
    """Return the config of a Qwen3: the text model without its positions in space."""
    rope = {key: value for key, value in _rope(text).items() if not key.startswith("mrope_")}
    others = {key: value for key, value in text.items() if key not in ("rope_parameters", "rope_scaling")}
    return {**others, "model_type": "qwen3", "rope_parameters": rope}


FAMILIES = (
    VisionFamily(
        ("qwen3_vl",),
        "Qwen3VLForConditionalGeneration",
        parse_qwen3_vl,
        text_prefix="model.language_model.",
        as_text=as_qwen3,
    ),
)
