"""ModelConfig: the architecture and nothing else. No mesh, no kernel, no dtype.

A model is a list of layers, each fully described, so that families differ by what they put here and `decoder` knows
none of them by name. Each kind of attention has its own file. A ModelConfig is built from a Hugging Face config.json by
a family's `parse` (see registry), and written back unchanged.

A scored model returns a score of a text instead of logits: Hugging Face's sequence classification with one label, the
format of reward models.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dovetail.core.errors import UnsupportedError, UserError
from dovetail.models.attention import Attention
from dovetail.models.latent import Latent
from dovetail.models.towers.vision import Vision
from dovetail.ops.glu import Glu
from dovetail.ops.moe import Router

if TYPE_CHECKING:
    from dovetail.models.external import ExternalModel
    from dovetail.models.towers.classifier import ImageClassifier
    from dovetail.models.towers.image_text import ImageText


@dataclass(frozen=True)
class Mlp:
    """Describe a dense feed-forward half; that of a vision encoder is not gated."""

    width: int
    glu: Glu
    bias: bool = False
    gated: bool = True

    @property
    def projections(self) -> dict[str, int]:
        """Return the products of the layer's input, each with its width."""
        return {"gate": self.width, "up": self.width} if self.gated else {"up": self.width}


@dataclass(frozen=True)
class Moe:
    """Describe a mixture of experts."""

    router: Router
    width: int
    glu: Glu
    shared: Mlp | None = None  # an expert every token passes (DeepSeek)
    bias: bool = False  # the router and the experts have biases (GPT-OSS)
    choice_bias: bool = False  # a bias on the choice alone, kept balanced without a loss (DeepSeek-V3)
    scaled_router: bool = False  # the router norms and scales its own input and its experts' weights (Gemma 4)


@dataclass(frozen=True)
class Layer:
    """Describe one block. With both mlp and moe, they run in parallel (Gemma 4)."""

    attn: Attention | Latent
    mlp: Mlp | None
    moe: Moe | None = None
    pre_norm: bool = True
    post_norm: bool = False
    per_layer_dim: int = 0  # the width of this layer's own token embedding (Gemma 4)
    scalar: bool = False  # the block's output times a stored number (Gemma 4)

    def within(self, length: int) -> Layer:
        """Return the layer for sequences of at most `length` tokens (see `ModelConfig.within`)."""
        rope = self.attn.rope
        return replace(self, attn=replace(self.attn, rope=rope.within(length))) if rope else self


@dataclass(frozen=True)
class ModelConfig:
    """Describe a model's architecture."""

    family: str
    vocab: int
    dim: int
    layers: tuple[Layer, ...]
    max_len: int
    norm_eps: float
    norm_offset: float = 0.0
    embed_scale: float = 1.0
    residual_scale: float = 1.0  # of what each half of a block adds to the residual stream (Granite)
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    tied: bool = False
    scored: bool = False  # it gives a text a score, and has no head for words (models.config)
    per_layer_vocab: int = 0
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    vision: Vision | None = None  # how it sees images; None: it does not
    images: ImageClassifier | ImageText | None = None  # a model of images alone, whose weights these are
    external: ExternalModel | None = None  # a model of another framework, whose weights these are
    causal: bool = True  # whether a token sees earlier ones only
    source: str = "{}"  # the config.json it was read from

    def __hash__(self) -> int:
        return hash(self.source)  # a str keeps its hash: a config is a static argument of every step

    def within(self, length: int) -> ModelConfig:
        """Return the model for sequences of at most `length` tokens: LongRoPE's frequencies depend on it (ops.rope)."""
        layers = tuple(layer.within(length) for layer in self.layers)
        return self if layers == self.layers else replace(self, layers=layers)

    def to_hf(self) -> dict[str, Any]:
        """Return the contents of the config.json that it was built from."""
        return json.loads(self.source)

    def text_hf(self) -> dict[str, Any]:
        """Return the part of `to_hf` that describes the text model."""
        hf = self.to_hf()
        return hf.get("text_config") or hf if self.vision else hf


WORDS, SCORES = "ForCausalLM", "ForSequenceClassification"  # the ends of their architectures' names
LABELS = 2  # of a classifier whose config.json does not say


def is_scored(hf: dict[str, Any], where: str) -> bool:
    """Return whether a config.json is of a model with a score; refuse several labels."""
    if not any(str(name).endswith(SCORES) for name in hf.get("architectures") or ()):
        return False
    labels = len(hf.get("id2label") or ()) or hf.get("num_labels", LABELS)
    if labels != 1:
        raise UserError(
            f"{where}: a model for sequence classification with {labels} labels; those with one, which is a score, "
            "are supported"
        )
    return True


def scored(cfg: ModelConfig) -> ModelConfig:
    """Return the model with a score in place of the head."""
    if cfg.scored:
        return cfg
    if cfg.vision:
        raise UnsupportedError("a model that sees images cannot be given a score in place of its head yet")
    hf = cfg.to_hf()
    hf["architectures"] = [name.removesuffix(WORDS) + SCORES for name in hf["architectures"]]
    hf |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    if hf.get("pad_token_id") in cfg.eos_ids:  # transformers would pass over an end of text, taking it for padding
        hf["pad_token_id"] = None
    return replace(cfg, scored=True, source=json.dumps(hf, sort_keys=True))
