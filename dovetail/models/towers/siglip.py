"""SigLIP's vision tower (and that of SigLIP 2 with a fixed size): patches, learned positions, an encoder and a norm.

N items, P patches of an item, C numbers of a patch, D width.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from dovetail.core.mesh import Placement
from dovetail.core.spec import ParamSpec, Stored
from dovetail.core.types import Params
from dovetail.models.towers.encoder import BIAS, SIGLIP, Encoder, norm, norm_spec
from dovetail.models.towers.vision import CHANNELS
from dovetail.ops.linear import matmul


@dataclass(frozen=True)
class Siglip:
    """Describe a tower for images of one size.

    Attributes:
        encoder: Its blocks.
        image_size: The side of an image in pixels.
        patch_size: The side of a patch in pixels.
    """

    encoder: Encoder
    image_size: int
    patch_size: int

    @property
    def side(self) -> int:
        """Return the patches of a row."""
        return self.image_size // self.patch_size

    @property
    def patch_dim(self) -> int:
        """Return C."""
        return self.patch_size**2 * CHANNELS

    @property
    def max_patches(self) -> int:
        """Return P: every image has as many patches."""
        return self.side**2

    def spec(self, names: Mapping[str, str]) -> dict[str, Any]:
        """Return the weights under their stored names, those of `siglip_names`."""
        D = self.encoder.dim
        return {
            "patch": patch_spec(D, self.patch_size, names["patch"]),
            "patch_bias": ParamSpec((D,), (None,), Stored((names["patch_bias"],), (D,)), **BIAS),
            "positions": ParamSpec(
                (self.max_patches, D), (None, "embed"), Stored((names["positions"],), (self.max_patches, D)), active=0.0
            ),
            "layers": self.encoder.spec(names),
            "norm": norm_spec(D, names["norm"], names["norm_bias"]),
        }

    def __call__(
        self,
        params: Params,
        patches: jax.Array,
        placement: Placement | None = None,
        run: Callable | None = None,
        scan: bool = False,
    ) -> jax.Array:
        """Map the patches [N, P, C] of whole images, row by row and between -1 and 1, to [N, P, D].

        Args:
            params: The weights, with the structure of `spec`.
            patches: The patches, whose dtype is that of the products.
            placement: The mesh and its rules; None for one device.
            run: Runs a block (see Encoder).
            scan: Compile the blocks as one loop (see Encoder).
        """
        x = matmul(patches, params["patch"], params["patch_bias"]) + params["positions"].astype(patches.dtype)
        x = self.encoder(params["layers"], x, placement=placement, run=run, scan=scan)
        return norm(params["norm"], x, self.encoder.eps)

    def flops(self) -> float:
        """Return the FLOPs of the forward pass of one image."""
        return self.encoder.flops(self.max_patches) + 2.0 * self.max_patches * self.patch_dim * self.encoder.dim


def patch_spec(dim: int, patch_size: int, name: str) -> ParamSpec:
    """Return the weight [D, C] of patches (row, column, channel), stored as a convolution [D, channel, row, column]."""
    area = patch_size**2
    stored = Stored((name,), (dim, CHANNELS, patch_size, patch_size), view=(dim, CHANNELS, area), transposed=True)
    return ParamSpec((dim, area * CHANNELS), ("embed", None), stored)


def siglip_names(prefix: str) -> dict[str, str]:
    """Return the stored names of the weights behind `prefix`, such as `vision_model.`."""
    own = {
        "patch": "embeddings.patch_embedding.weight",
        "patch_bias": "embeddings.patch_embedding.bias",
        "positions": "embeddings.position_embedding.weight",
        "norm": "post_layernorm.weight",
        "norm_bias": "post_layernorm.bias",
    }
    own |= {key: f"encoder.layers.{{i}}.{name}" for key, name in SIGLIP.items()}
    return {key: prefix + name for key, name in own.items()}


def centred(patches: jax.Array, dtype: Any) -> jax.Array:
    """Return pixels 0..255 as numbers between -1 and 1: a mean and a standard deviation of 0.5."""
    return (patches.astype(jnp.float32) / 127.5 - 1).astype(dtype)


@dataclass(frozen=True)
class SiglipTower(abc.ABC):
    """Describe a tower of SigLIP and a projector that makes one feature of a square of patches.

    Attributes:
        siglip: The encoder.
        square: The patches of a square's side.
        dim: The width of the language model.
    """

    siglip: Siglip
    square: int
    dim: int

    @property
    def patch_dim(self) -> int:
        """Return the numbers of a patch."""
        return self.siglip.patch_dim

    @property
    def patches_per_feature(self) -> int:
        """Return how many patches of an item become one feature."""
        return self.square**2

    @property
    def min_patches(self) -> int:
        """Return the patches of an item."""
        return self.max_patches

    @property
    def max_patches(self) -> int:
        """Return the patches of an item."""
        return self.siglip.max_patches

    def flops(self, patches: int) -> float:
        """Return the FLOPs of the forward pass of one item, whose patches are always `max_patches`."""
        features = self.max_patches // self.patches_per_feature
        return self.siglip.flops() + 2.0 * features * self.projector_size

    @property
    @abc.abstractmethod
    def projector_size(self) -> int:
        """Return the elements of the projector's matrix."""

    @abc.abstractmethod
    def project(self, params: Params, squares: jax.Array) -> jax.Array:
        """Map the patches of squares [N, F, square * square, width] to features [N, F, dim]."""

    def __call__(
        self, params: Params, patches: jax.Array, positions: jax.Array, placement: Placement | None = None
    ) -> jax.Array:
        """Return the features of items (see models.towers.vision.Tower); all patches are there, row by row."""
        assert patches.shape[1] == self.max_patches, (patches.shape, self.max_patches)
        x = self.siglip(params["siglip"], centred(patches, params["siglip"]["positions"].dtype), placement)
        N, D, across = x.shape[0], x.shape[-1], self.siglip.side // self.square
        squares = x.reshape(N, across, self.square, across, self.square, D).swapaxes(2, 3)
        return self.project(params["projector"], squares.reshape(N, across**2, self.square**2, D))
