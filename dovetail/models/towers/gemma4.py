"""Gemma 4 with images of any shape: a tower with rotary positions in x and y, whose patches are averaged by squares.

N items, P patches of an item (padded), D width, K heads, H head dim, F features of an item.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from dovetail.core.mesh import Placement, constrain
from dovetail.core.spec import ParamSpec, Stored, matmul_flops
from dovetail.core.types import Params
from dovetail.models.config import ModelConfig
from dovetail.models.family import Fields, VisionFamily, read_glu
from dovetail.models.towers.siglip import centred
from dovetail.models.towers.vision import SquareTower, Vision
from dovetail.ops.bidirectional import bidirectional_attention
from dovetail.ops.glu import Glu
from dovetail.ops.linear import matmul
from dovetail.ops.norm import rms_norm
from dovetail.ops.rope import Rope, rotate

TOKENS = 280  # the most of an image, unless a processor is asked for more
NORMS = {
    "attn_norm": "input_layernorm",
    "attn_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}
BOUNDS = {"input_min": "-inf", "input_max": "inf", "output_min": "-inf", "output_max": "inf"}
NORM: dict[str, Any] = dict(init="ones", active=0.0)


@dataclass(frozen=True)
class Gemma4Tower(SquareTower):
    """Describe Gemma 4's tower and its projector.

    Attributes:
        layers: The number of blocks.
        width: D.
        heads: K.
        kv_heads: The heads of keys and values.
        head_dim: H.
        mlp_width: The width of the MLP.
        glu: The activation of the MLP.
        eps: That of the norms.
        theta: The base of the rotary positions.
        patch_size: The side of a patch in pixels.
        positions: The most patches of a row or a column.
        square: The patches of a square's side.
        clipped: Whether the inputs and outputs of products are clipped to stored bounds.
        standardize: Whether features are shifted and scaled by stored numbers.
        tokens: The most features of an item.
        dim: The width of the language model.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int
    glu: Glu
    eps: float
    theta: float
    positions: int
    clipped: bool
    standardize: bool
    dim: int

    def flops(self, patches: int) -> float:
        """Return the FLOPs of the forward pass of one item."""
        specs = self.spec()
        each = matmul_flops({name: specs[name] for name in ("patch", "layers")})
        attended = 4.0 * self.layers * self.heads * self.head_dim * patches
        return patches * (each + attended) + patches // self.patches_per_feature * matmul_flops(specs["proj"])

    # --- weights ------------------------------------------------------------------------------------------------------

    def spec(self) -> dict[str, Any]:
        """Return the weights of the tower and of its projector."""
        D, C, at = self.width, self.patch_dim, "model.vision_tower."
        table = (2, self.positions, D)
        proj = "model.embed_vision.embedding_projection.weight"
        tree = {
            "patch": _declare(f"{at}patch_embedder.input_proj.weight", (D, C), ("embed", None)),
            "positions": _declare(
                f"{at}patch_embedder.position_embedding_table", table, (None, None, "embed"), active=0.0
            ),
            "layers": tuple(self._layer_spec(f"{at}encoder.layers.{i}.") for i in range(self.layers)),
            "proj": _declare(proj, (self.dim, D), ("embed", None)),
        }
        if self.standardize:
            tree["bias"] = _declare(f"{at}std_bias", (D,), (None,), init="zeros", active=0.0)
            tree["scale"] = _declare(f"{at}std_scale", (D,), (None,), **NORM)
        return tree

    def _layer_spec(self, at: str) -> dict[str, Any]:
        D, K, G, H, F = self.width, self.heads, self.kv_heads, self.head_dim, self.mlp_width
        attn = {
            "q": self._product(f"{at}self_attn.q_proj.", (K, H, D), ("heads", None, "embed"), (K * H, D)),
            "k": self._product(f"{at}self_attn.k_proj.", (G, H, D), ("kv_heads", None, "embed"), (G * H, D)),
            "v": self._product(f"{at}self_attn.v_proj.", (G, H, D), ("kv_heads", None, "embed"), (G * H, D)),
            "o": self._product(f"{at}self_attn.o_proj.", (D, K, H), ("embed", "heads", None), (D, K * H)),
            "q_norm": _declare(f"{at}self_attn.q_norm.weight", (H,), (None,), **NORM),
            "k_norm": _declare(f"{at}self_attn.k_norm.weight", (H,), (None,), **NORM),
        }
        mlp = {x: self._product(f"{at}mlp.{x}_proj.", (F, D), ("mlp", "embed")) for x in ("gate", "up")}
        mlp["down"] = self._product(f"{at}mlp.down_proj.", (D, F), ("embed", "mlp"))
        norms = {key: _declare(f"{at}{name}.weight", (D,), (None,), **NORM) for key, name in NORMS.items()}
        return {"attn": attn, "mlp": mlp, **norms}

    def _product(self, at: str, shape: tuple, axes: tuple, stored: tuple | None = None) -> dict[str, ParamSpec]:
        tree = {"weight": _declare(f"{at}linear.weight", shape, axes, stored)}
        if self.clipped:
            tree |= {x: _declare(at + x, (), (), init=f"constant:{n}", active=0.0) for x, n in BOUNDS.items()}
        return tree

    # --- the forward --------------------------------------------------------------------------------------------------

    def __call__(
        self, params: Params, patches: jax.Array, positions: jax.Array, placement: Placement | None = None
    ) -> jax.Array:
        """Return the features of items (see models.towers.vision.Tower)."""
        dtype = params["positions"].dtype
        is_real, at = (positions >= 0).all(-1), jnp.maximum(positions, 0)
        places = params["positions"][0][at[..., 0]] + params["positions"][1][at[..., 1]]
        x = matmul(centred(patches, dtype), params["patch"]) + jnp.where(is_real[..., None], places, 0)
        rope = Rope(theta=self.theta, dim=self.head_dim // 2)
        tables = tuple(rope.tables(positions[..., i]) for i in range(2))
        lengths = is_real.sum(-1, dtype=jnp.int32)
        for p in params["layers"]:
            x = _block(p, constrain(x, placement, "batch", None, None), tables, lengths, of=self, placement=placement)
        pooled = self._pool(jnp.where(is_real[..., None], x, 0), at)
        if self.standardize:
            pooled = (pooled - params["bias"].astype(jnp.float32)) * params["scale"].astype(jnp.float32)
        return matmul(rms_norm(pooled.astype(dtype), None, self.eps), params["proj"])

    def _pool(self, x: jax.Array, at: jax.Array) -> jax.Array:
        """Return the means [N, F, D] of squares, times sqrt(D), in f32: in f16 they would overflow."""
        across = (at[..., 0].max(axis=1, keepdims=True) + 1) // self.square
        square = at // self.square
        index = square[..., 0] + across * square[..., 1]  # [N, P]
        parts = jax.nn.one_hot(index, x.shape[1] // self.square**2, dtype=jnp.float32)
        total = jnp.einsum("npf,npd->nfd", parts, x.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)
        return (total / self.square**2).astype(x.dtype).astype(jnp.float32) * math.sqrt(self.width)


@functools.partial(jax.jit, static_argnames=("of", "placement"))  # equal blocks are traced and lowered once
def _block(
    p: Params, x: jax.Array, tables: tuple, lengths: jax.Array, *, of: Gemma4Tower, placement: Placement | None
) -> jax.Array:
    """Run one block on x [N, P, D]."""
    h, attn = rms_norm(x, p["attn_norm"], of.eps), p["attn"]
    q = _rotated(rms_norm(_clipped(h, attn["q"]), attn["q_norm"], of.eps), of, tables)
    k = _rotated(rms_norm(_clipped(h, attn["k"]), attn["k_norm"], of.eps), of, tables)
    v = rms_norm(_clipped(h, attn["v"]), None, of.eps)
    platform = placement.platform if placement else None
    h = _clipped(bidirectional_attention(q, k, v, scale=1.0, lengths=lengths, platform=platform), attn["o"], dims=2)
    x = x + rms_norm(h, p["attn_post_norm"], of.eps)
    h = rms_norm(x, p["mlp_norm"], of.eps)
    h = _clipped(of.glu(_clipped(h, p["mlp"]["gate"]), _clipped(h, p["mlp"]["up"])), p["mlp"]["down"])
    return x + rms_norm(h, p["mlp_post_norm"], of.eps)


def _rotated(x: jax.Array, of: Gemma4Tower, tables: tuple) -> jax.Array:
    """Rotate the first half of each head by x and the second by y."""
    rope = Rope(theta=of.theta, dim=of.head_dim // 2)
    halves = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([rotate(half, rope, table) for half, table in zip(halves, tables, strict=True)], axis=-1)


def _clipped(x: jax.Array, p: Params, dims: int = 1) -> jax.Array:
    """Multiply x by a weight, with input and output clipped to its bounds, which are not trained."""
    if "input_min" not in p:
        return matmul(x, p["weight"], dims=dims)
    low_in, high_in, low_out, high_out = (jax.lax.stop_gradient(p[x]) for x in BOUNDS)
    return jnp.clip(matmul(jnp.clip(x, low_in, high_in), p["weight"], dims=dims), low_out, high_out)


def _declare(name: str, shape: tuple, axes: tuple, stored: tuple | None = None, **more: Any) -> ParamSpec:
    return ParamSpec(shape, axes, Stored((name,), stored if stored is not None else shape), **more)


# --- the config -------------------------------------------------------------------------------------------------------


def parse_gemma4(f: Fields, vision: Fields, text: ModelConfig) -> Vision:
    """Parse the config of Gemma 4 with images."""
    skip_other_media(f)
    vision.only("model_type", "gemma4_vision")
    vision.only("attention_bias", False)
    vision.only("attention_dropout", 0.0)
    vision.skip("max_position_embeddings", "default_output_length", "global_head_dim")  # nothing reads them
    rope = vision.get("rope_parameters", {})
    vision_rope = Fields(rope, f"{vision.where}: rope_parameters")
    vision_rope.only("rope_type", "axial", "default")
    theta = vision_rope.get("rope_theta", 100.0)
    vision_rope.done()
    heads = vision.get("num_attention_heads", 12)
    tower = Gemma4Tower(
        layers=vision.get("num_hidden_layers", 16), width=vision.get("hidden_size", 768), heads=heads,
        kv_heads=vision.get("num_key_value_heads", 12), head_dim=vision.get("head_dim", 64),
        mlp_width=vision.get("intermediate_size", 3072),
        glu=read_glu(vision, "hidden_activation", "gelu_pytorch_tanh"), eps=vision.get("rms_norm_eps", 1e-6),
        theta=theta, patch_size=vision.get("patch_size", 16), positions=vision.get("position_embedding_size", 10_240),
        square=vision.get("pooling_kernel_size", 3), clipped=vision.get("use_clipped_linears", False),
        standardize=vision.get("standardize", False), tokens=f.get("vision_soft_tokens_per_image", TOKENS),
        dim=text.dim,
    )  # fmt: skip
    sees_both_ways = text.text_hf().get("use_bidirectional_attention") == "vision"
    return Vision(tower, f.get("image_token_id", 258_880), block_mask="sliding" if sees_both_ways else "")


def skip_other_media(f: Fields) -> None:
    """Mark the fields of sound and video as read, and those of the prompt."""
    f.skip("audio_config", "audio_token_id", "boa_token_id", "eoa_token_id", "eoa_token_index")  # no sound is heard
    f.skip("boi_token_id", "eoi_token_id", "video_token_id")  # of the prompt (io.images)


FAMILIES = (
    VisionFamily(
        ("gemma4",),
        "Gemma4ForConditionalGeneration",
        parse_gemma4,
        text_prefix="model.language_model.",
        dropped=("audio_config",),
        unused=(r"model\.(audio_tower|embed_audio)\..*",),
    ),
)
