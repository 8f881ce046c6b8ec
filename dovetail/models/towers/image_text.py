"""SigLIP: an image tower with attention pooling and a text tower, whose embeddings of a pair point the same way.

B pairs, P patches of an image, T tokens of a text, D width, K heads, H head dim, F width of an MLP, E embedding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Unpack

import jax
import jax.numpy as jnp

from dovetail.core.mesh import constrain
from dovetail.core.spec import ParamSpec, Stored, tree_map
from dovetail.core.types import Params
from dovetail.models.towers.classifier import dense_spec, with_vit_init, with_xavier_init
from dovetail.models.towers.encoder import BIAS, SIGLIP, Encoder, EncoderOptions, norm, norm_spec
from dovetail.models.towers.siglip import Siglip, siglip_names
from dovetail.ops.glu import Glu
from dovetail.ops.linear import matmul

SCALE, SHIFT = math.log(10), -10.0  # initial values of the logits' scale, as a logarithm, and bias


@dataclass(frozen=True)
class ImageText:
    """Describe a pair of towers.

    Attributes:
        tower: The image tower.
        text: The encoder of texts.
        vocab: The tokens of the vocabulary.
        length: T; a text is padded to it.
        embedding: E.
        pad_id: The token that pads a text.
    """

    tower: Siglip
    text: Encoder
    vocab: int
    length: int
    embedding: int
    pad_id: int

    def spec(self) -> dict[str, Any]:
        """Return the tree of the weights. A token of the plan is a patch: a text has T / P of them."""
        vision = with_vit_init(self.tower.spec(siglip_names("vision_model.")))
        vision["pool"] = self._pool_spec("vision_model.head.")
        return {
            "vision": vision,
            "text": self._text_spec("text_model."),
            "logit_scale": _number("logit_scale", SCALE),
            "logit_bias": _number("logit_bias", SHIFT),
        }

    def _pool_spec(self, prefix: str) -> dict[str, Any]:
        of, once = self.tower.encoder, 1 / self.tower.max_patches
        D, K, F = of.dim, of.heads, of.width
        rows = {x: slice(i * D, (i + 1) * D) for i, x in enumerate(("q", "k", "v"))}
        tree: dict[str, Any] = {
            "probe": ParamSpec((D,), (None,), Stored((f"{prefix}probe",), (1, 1, D)), f"normal:{D**-0.5:.6g}", 0.0),
            "norm": norm_spec(D, f"{prefix}layernorm.weight", f"{prefix}layernorm.bias"),
        }
        bound = f"uniform:{math.sqrt(6 / (2 * D)):.6g}"
        for x, at in rows.items():
            weight, bias = (Stored((f"{prefix}attention.in_proj_{end}",), shape, at=(at,)) for end, shape in
                            (("weight", (3 * D, D)), ("bias", (3 * D,))))  # fmt: skip
            share = once if x == "q" else 1.0
            tree[x] = ParamSpec((K, D // K, D), ("heads", None, "embed"), weight, bound, share)
            tree[f"{x}_bias"] = ParamSpec((K, D // K), ("heads", None), bias, **BIAS)
        for name, stored, out, size in (
            ("o", "attention.out_proj", D, D),
            ("up", "mlp.fc1", F, D),
            ("down", "mlp.fc2", D, F),
        ):
            own = dense_spec(name, prefix + stored, out, size, once)
            tree |= own | {name: with_xavier_init(own[name])}
        return tree

    def _text_spec(self, prefix: str) -> dict[str, Any]:
        D, T, V = self.text.dim, self.length, self.vocab
        share = T / self.tower.max_patches
        names = {key: f"{prefix}encoder.layers.{{i}}.{name}" for key, name in SIGLIP.items()}
        positions = Stored((f"{prefix}embeddings.position_embedding.weight",), (T, D))
        table = Stored((f"{prefix}embeddings.token_embedding.weight",), (V, D))
        tower = {
            "positions": ParamSpec((T, D), (None, "embed"), positions, active=0.0),
            "layers": tree_map(lambda one: replace(one, active=one.active * share), self.text.spec(names)),
        }
        return {
            **with_vit_init(tower),
            "embed": ParamSpec((V, D), ("vocab", "embed"), table, active=0.0),
            "norm": norm_spec(D, f"{prefix}final_layer_norm.weight", f"{prefix}final_layer_norm.bias"),
            **dense_spec("head", f"{prefix}head", self.embedding, D, 1 / self.tower.max_patches),
        }

    def image_embeds(self, params: Params, patches: jax.Array, **how: Unpack[EncoderOptions]) -> jax.Array:
        """Map patches [B, P, C], between -1 and 1, to [B, E] f32 of length 1."""
        x = self.tower(params["vision"], patches, **how)
        return _unit(self._pool(params["vision"]["pool"], x))

    def _pool(self, p: Params, x: jax.Array) -> jax.Array:
        """Return [B, D] of x [B, P, D]: one learned query attends to all patches."""
        q, k, v = (
            matmul(p["probe"], p["q"], p["q_bias"]),
            matmul(x, p["k"], p["k_bias"]),
            matmul(x, p["v"], p["v_bias"]),
        )
        scores = jnp.einsum("kh,bpkh->bkp", q, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
        seen = jnp.einsum("bkp,bpkh->bkh", jax.nn.softmax(scores).astype(v.dtype), v)
        x = matmul(seen.reshape(seen.shape[0], -1), p["o"], p["o_bias"])
        of = self.tower.encoder
        h = Glu(of.act).activate(matmul(norm(p["norm"], x, of.eps), p["up"], p["up_bias"]))
        return x + matmul(h, p["down"], p["down_bias"])

    def text_embeds(self, params: Params, tokens: jax.Array, **how: Unpack[EncoderOptions]) -> jax.Array:
        """Map tokens [B, T] to [B, E] f32 of length 1: the state of the last position."""
        p = params["text"]
        x = constrain(p["embed"], how.get("placement"), "vocab", None)[tokens] + p["positions"]
        x = self.text(p["layers"], x, **how)
        return _unit(matmul(norm(p["norm"], x[:, -1], self.text.eps), p["head"], p["head_bias"]))

    def flops(self) -> float:
        """Return the FLOPs of the forward pass of one pair."""
        D, F, P = self.tower.encoder.dim, self.tower.encoder.width, self.tower.max_patches
        pool = 2.0 * (2 * P * D * D + 2 * D * D + 2 * D * F)
        return self.tower.flops() + pool + self.text.flops(self.length) + 2.0 * self.text.dim * self.embedding


def _number(name: str, value: float) -> ParamSpec:
    return ParamSpec((1,), (None,), Stored((name,), (1,)), f"constant:{value:.8g}", 0.0, "float32")


def _unit(x: jax.Array) -> jax.Array:
    x = x.astype(jnp.float32)
    return x / jnp.sqrt(jnp.maximum(jnp.sum(x * x, axis=-1, keepdims=True), 1e-24))
