"""A ViT with a classifier, as big_vision trains it: fixed positions, the mean of the patches, a layer with tanh.

B images, P patches of an image, C numbers of a patch, D width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Unpack

import jax
import jax.numpy as jnp

from dovetail.core.spec import ParamSpec, Stored, tree_map
from dovetail.core.types import Params
from dovetail.models.towers.encoder import EncoderOptions
from dovetail.models.towers.siglip import CHANNELS, Siglip, siglip_names
from dovetail.ops.linear import matmul


@dataclass(frozen=True)
class ImageClassifier:
    """Describe a ViT that maps an image to the logits of classes.

    Attributes:
        tower: Its encoder.
        classes: The number of classes.
        pre_logits: Whether a dense layer with tanh precedes the classifier.
        fixed_positions: Whether positions are sines and cosines that are not trained.
    """

    tower: Siglip
    classes: int
    pre_logits: bool = False
    fixed_positions: bool = True

    def spec(self) -> dict[str, Any]:
        """Return the tree of the weights."""
        D, once = self.tower.encoder.dim, 1 / self.tower.max_patches
        vision = with_vit_init(self.tower.spec(siglip_names("vision_model.")))
        if self.fixed_positions:
            vision["positions"] = replace(vision["positions"], init="sincos2d")
        head = "logits" if self.pre_logits else "classifier"  # transformers has no class with the layer before it
        tree = {"vision": vision} | dense_spec("head", head, self.classes, D, once, "zeros")
        return tree | (dense_spec("pre_logits", "pre_logits", D, D, once) if self.pre_logits else {})

    def __call__(self, params: Params, patches: jax.Array, **how: Unpack[EncoderOptions]) -> jax.Array:
        """Map patches [B, P, C], between -1 and 1, to logits [B, classes] in f32."""
        vision = params["vision"]
        if self.fixed_positions:
            vision = {**vision, "positions": jax.lax.stop_gradient(vision["positions"])}
        x = self.tower(vision, patches, **how).mean(axis=1, dtype=jnp.float32).astype(patches.dtype)
        if self.pre_logits:
            x = jnp.tanh(matmul(x, params["pre_logits"], params["pre_logits_bias"]))
        return matmul(x, params["head"], out_dtype=jnp.float32) + params["head_bias"].astype(jnp.float32)

    def flops(self) -> float:
        """Return the FLOPs of the forward pass of one image."""
        D = self.tower.encoder.dim
        return self.tower.flops() + 2.0 * D * (self.classes + (D if self.pre_logits else 0))


def dense_spec(name: str, stored: str, out: int, dim: int, active: float, init: str = "") -> dict[str, ParamSpec]:
    """Return the weight [out, dim] of a dense layer with its bias; `init` is LeCun's by default."""
    weight = ParamSpec(
        (out, dim), (None, "embed"), Stored((f"{stored}.weight",), (out, dim)),
        init or f"normal:{dim**-0.5:.6g}", active,
    )  # fmt: skip
    bias = ParamSpec((out,), (None,), Stored((f"{stored}.bias",), (out,)), "zeros", 0.0)
    return {name: weight, f"{name}_bias": bias}


def with_vit_init(tower: dict[str, Any]) -> dict[str, Any]:
    """Return a tower's specs with the initial values of ViT: Xavier's in the encoder, LeCun's for patches."""
    tree = {**tower, "layers": tree_map(with_xavier_init, tower["layers"])}
    if "patch" in tower:
        tree["patch"] = replace(tower["patch"], init=f"normal:{tower['patch'].shape[1] ** -0.5:.6g}")
    dim = tower["positions"].shape[1]
    return tree | {"positions": replace(tower["positions"], init=f"normal:{dim**-0.5:.6g}")}


def with_xavier_init(spec: ParamSpec) -> ParamSpec:
    """Return the spec of a matrix with Xavier's uniform values; others are returned as they are."""
    if spec.active == 0:
        return spec
    return replace(spec, init=f"uniform:{math.sqrt(6 / sum(spec.stored.shape)):.6g}")


def to_patches(images: jax.Array, patch_size: int) -> jax.Array:
    """Return [B, P, C] patches of images [B, H, W, 3], row by row."""
    B, H, W, _ = images.shape
    rows, columns = H // patch_size, W // patch_size
    cut = images.reshape(B, rows, patch_size, columns, patch_size, CHANNELS).swapaxes(2, 3)
    return cut.reshape(B, rows * columns, patch_size**2 * CHANNELS)
