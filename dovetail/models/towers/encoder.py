"""The transformer encoder of ViT and SigLIP: its weights, its forward pass and its cost.

N items, P patches of an item, D width, K heads, H head dim, F width of the MLP.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypedDict

import jax
import jax.numpy as jnp

from dovetail.core.mesh import Placement, constrain
from dovetail.core.spec import ParamSpec, Stored, in_one_tensor, matmul_flops
from dovetail.core.types import Params
from dovetail.ops.bidirectional import bidirectional_attention, self_attention, window_attention
from dovetail.ops.glu import Glu
from dovetail.ops.linear import matmul, matmuls
from dovetail.ops.norm import add_layer_norm, layer_norm, rms_norm
from dovetail.ops.rope import Rope, rotate

BIAS: dict[str, Any] = dict(init="zeros", active=0.0)


class EncoderOptions(TypedDict, total=False):
    """Name the options of `Encoder.__call__` that the models around an encoder pass on."""

    placement: Placement | None
    run: Callable | None
    scan: bool


@dataclass(frozen=True)
class Encoder:
    """Describe blocks of bidirectional attention and an MLP, with a norm before each half and biases of products.

    The stored names of `spec` decide about the rest: norms without a bias are RMS norms, an MLP with `gate` is gated.

    Attributes:
        layers: The number of blocks.
        dim: D.
        heads: K, which divides D.
        width: F.
        eps: That of the norms.
        act: The activation of the MLP: "gelu_tanh", "gelu" or "silu".
    """

    layers: int
    dim: int
    heads: int
    width: int
    eps: float = 1e-6
    act: str = "gelu_tanh"

    @property
    def projections(self) -> dict[str, int]:
        """Return the products of attention's input, each with its heads."""
        return dict.fromkeys(("q", "k", "v"), self.heads)

    def spec(self, names: Mapping[str, str]) -> tuple[dict[str, Any], ...]:
        """Return the weights of the blocks.

        Args:
            names: The stored name of each weight of a block; {i} is the block's number. The keys are those of SIGLIP,
                perhaps without biases of norms, and with `mlp.gate` and its bias.
        """
        return tuple(
            self._block_spec({key: name.format(i=i) for key, name in names.items()}) for i in range(self.layers)
        )

    def _block_spec(self, names: Mapping[str, str]) -> dict[str, Any]:
        D, K, H, F = self.dim, self.heads, self.dim // self.heads, self.width

        def declare(key, shape, axes, stored=None, **more) -> ParamSpec:
            return ParamSpec(shape, axes, Stored((names[key],), stored or shape), **more)

        attn = {"o": declare("attn.o", (D, K, H), ("embed", "heads", None), (D, D))}
        attn["o_bias"] = declare("attn.o_bias", (D,), (None,), **BIAS)
        for x in self.projections:
            attn[x] = declare(f"attn.{x}", (K, H, D), ("heads", None, "embed"), (D, D))
            attn[f"{x}_bias"] = declare(f"attn.{x}_bias", (K, H), ("heads", None), (D,), **BIAS)
        mlp = {"down": declare("mlp.down", (D, F), ("embed", "mlp"))}
        mlp["down_bias"] = declare("mlp.down_bias", (D,), (None,), **BIAS)
        for x in ("gate", "up") if "mlp.gate" in names else ("up",):
            mlp[x] = declare(f"mlp.{x}", (F, D), ("mlp", "embed"))
            mlp[f"{x}_bias"] = declare(f"mlp.{x}_bias", (F,), ("mlp",), **BIAS)
        norms = {key: norm_spec(D, names[key], names.get(f"{key}_bias")) for key in ("attn_norm", "mlp_norm")}
        return {"attn": in_one_tensor(attn, self.projections), "mlp": mlp, **norms}

    def __call__(
        self,
        layers: tuple[Params, ...],
        x: jax.Array,
        lengths: jax.Array | None = None,
        placement: Placement | None = None,
        run: Callable | None = None,
        scan: bool = False,
    ) -> jax.Array:
        """Map x [N, P, D] to [N, P, D].

        Args:
            layers: The weights, with the structure of `spec`.
            x: Embedded patches.
            lengths: [N] int32: the patches of each item, if padding follows them.
            placement: The mesh and its rules; None for one device.
            run: `encoder_block`, or a wrapper of it (models.decoder.remember).
            scan: Stack the weights and compile the blocks as one loop.
        """

        def one(x: jax.Array, p: Params) -> tuple[jax.Array, None]:
            x = constrain(x, placement, "batch", None, None)
            return (run or encoder_block)(p, x, lengths, of=self, placement=placement), None

        if scan:
            return jax.lax.scan(one, x, jax.tree.map(lambda *each: jnp.stack(each), *layers))[0]
        for p in layers:
            x, _ = one(x, p)
        return x

    def flops(self, patches: int) -> float:
        """Return the FLOPs of the forward pass of one item, without a gate."""
        products = matmul_flops(self._block_spec(dict.fromkeys(SIGLIP, "")))
        return self.layers * patches * (products + 4.0 * self.dim * patches)


@functools.partial(jax.jit, static_argnames=("most", "of", "placement"))  # equal blocks are traced and lowered once
def encoder_block(
    p: Params,
    x: jax.Array,
    lengths: jax.Array | None = None,
    tables: tuple[jax.Array, jax.Array] | None = None,
    windows: jax.Array | None = None,
    *,
    most: int = 0,
    of: Encoder,
    placement: Placement | None = None,
) -> jax.Array:
    """Run one block of the encoder `of` on x [N, P, D].

    Args:
        p: The weights.
        x: The patches.
        lengths: [N] int32: the patches of each item, if padding follows them.
        tables: cos and sin of rotary positions.
        windows: [N, P] int32, ascending: if given, patches attend to those of the same window.
        most: The most patches of a window.
        of: The encoder.
        placement: The mesh and its rules; None for one device.
    """
    x, h = add_norm(p["attn_norm"], x, None, of.eps, placement)
    if tables is None:
        delta = self_attention(p["attn"], h, of.projections, lengths=lengths, placement=placement)
    else:
        delta = _rotated_attention(p["attn"], h, of.projections, tables, lengths, windows, most, placement)
    x, h = add_norm(p["mlp_norm"], x, delta, of.eps, placement)
    return x + _mlp(p["mlp"], h, Glu(of.act))


def _rotated_attention(
    p: Params,
    x: jax.Array,
    names: Mapping[str, int],
    tables: tuple[jax.Array, jax.Array],
    lengths: jax.Array | None,
    windows: jax.Array | None,
    most: int,
    placement: Placement | None,
) -> jax.Array:
    """Return attention with rotary positions over an item, or over windows of it."""
    q, k, v = matmuls(x, p, names)
    whole = Rope(theta=0.0, dim=q.shape[-1])  # which dims are rotated; the tables say how far
    q, k = rotate(q, whole, tables), rotate(k, whole, tables)
    platform, scale = placement.platform if placement else None, q.shape[-1] ** -0.5
    if windows is None:
        h = bidirectional_attention(q, k, v, scale=scale, lengths=lengths, platform=platform)
    else:
        h = window_attention(q, k, v, scale=scale, windows=windows, most=most)
    return matmul(h, p["o"], p["o_bias"], dims=2)


def _mlp(p: Params, x: jax.Array, act: Glu) -> jax.Array:
    up = matmul(x, p["up"], p["up_bias"])
    h = act(matmul(x, p["gate"], p["gate_bias"]), up) if "gate" in p else act.activate(up)
    return matmul(h, p["down"], p["down_bias"])


def norm_spec(dim: int, weight: str, bias: str | None = None) -> dict[str, ParamSpec]:
    """Return the weights of a layer norm, or without a bias of an RMS norm, under their stored names."""
    tree = {"weight": ParamSpec((dim,), (None,), Stored((weight,), (dim,)), init="ones", active=0.0)}
    return tree if bias is None else tree | {"bias": ParamSpec((dim,), (None,), Stored((bias,), (dim,)), **BIAS)}


def norm(p: Params, x: jax.Array, eps: float) -> jax.Array:
    """Normalise x by a layer norm, or without a bias by an RMS norm."""
    return layer_norm(x, p["weight"], p["bias"], eps) if "bias" in p else rms_norm(x, p["weight"], eps)


def add_norm(
    p: Params, x: jax.Array, delta: jax.Array | None, eps: float, placement: Placement | None
) -> tuple[jax.Array, jax.Array]:
    """Return x + delta and its norm."""
    if "bias" in p:
        return add_layer_norm(x, delta, p["weight"], p["bias"], eps, placement)
    x = x if delta is None else x + delta
    return x, norm(p, x, eps)


# the stored names of a block's weights in SigLIP, behind the model's own prefix
SIGLIP = {
    f"{key}{end}": f"{name}.{what}"
    for key, name in {
        "attn_norm": "layer_norm1",
        "attn.q": "self_attn.q_proj",
        "attn.k": "self_attn.k_proj",
        "attn.v": "self_attn.v_proj",
        "attn.o": "self_attn.out_proj",
        "mlp_norm": "layer_norm2",
        "mlp.up": "mlp.fc1",
        "mlp.down": "mlp.fc2",
    }.items()
    for end, what in (("", "weight"), ("_bias", "bias"))
}
