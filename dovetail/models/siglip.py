"""Models of images alone, in the format of Hugging Face's `siglip`: SigLIP, and a ViT with a classifier.

A classifier is what transformers loads as SiglipForImageClassification. With `pre_logits`, a layer that no class of
transformers has, SiglipVisionModel loads the tower of the folder.
"""

from __future__ import annotations

import json
from typing import Any

from dovetail.core.errors import UserError
from dovetail.models.attention import Attention
from dovetail.models.config import Layer, Mlp, ModelConfig
from dovetail.models.family import Family, Fields
from dovetail.models.towers.classifier import ImageClassifier
from dovetail.models.towers.encoder import Encoder
from dovetail.models.towers.image_text import ImageText
from dovetail.models.towers.siglip import Siglip
from dovetail.ops.glu import Glu

ACTIVATIONS = {"gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "silu": "silu"}
CLASSIFIERS = ("SiglipForImageClassification", "SiglipVisionModel")
OWN = "dovetail"  # the section of a config.json that transformers does not read


def parse_siglip(f: Fields) -> ModelConfig:
    """Return the model of a config.json whose architecture is a classifier, or SiglipModel."""
    vision = Fields(dict(f.get("vision_config", {})), f"{f.where} vision_config")
    is_classifier = any(name in CLASSIFIERS for name in f.hf.get("architectures") or ())
    tower = _tower(vision)
    vision.only("vision_use_head", *((False,) if is_classifier else (True,)))
    vision.done()
    f.skip("text_config", "initializer_factor")
    images = _classifier(f, tower) if is_classifier else _pair(f, tower)
    f.done()
    return image_model(images, json.dumps(f.hf, sort_keys=True))


def _tower(f: Fields) -> Siglip:
    size, patch = f.get("image_size", 224), f.get("patch_size", 16)
    if size % patch:
        raise UserError(f"{f.where}: image_size={size} must be a multiple of patch_size={patch}", param="image_size")
    f.only("num_channels", 3)
    return Siglip(_encoder(f), size, patch)


def _encoder(f: Fields) -> Encoder:
    f.only("attention_dropout", 0.0)
    act = f.get("hidden_act", "gelu_pytorch_tanh")
    if act not in ACTIVATIONS:
        raise UserError(f"{f.where}: hidden_act={act!r} is not supported", param="hidden_act")
    return Encoder(
        f.get("num_hidden_layers", 12), f.get("hidden_size", 768), f.get("num_attention_heads", 12),
        f.get("intermediate_size", 3072), f.get("layer_norm_eps", 1e-6), ACTIVATIONS[act],
    )  # fmt: skip


def _classifier(f: Fields, tower: Siglip) -> ImageClassifier:
    classes = len(f.hf.get("id2label") or ()) or f.get("num_labels")
    own = Fields(dict(f.get(OWN, {})), f"{f.where} {OWN}")
    made = ImageClassifier(tower, classes, own.get("pre_logits", False), own.get("fixed_positions", False))
    own.done()
    return made


def _pair(f: Fields, tower: Siglip) -> ImageText:
    text = Fields(dict(f.get("text_config", {})), f"{f.where} text_config")
    encoder = _encoder(text)
    embedding = text.get("projection_size", encoder.dim)
    if embedding != tower.encoder.dim:
        raise UserError(
            f"{text.where}: projection_size={embedding} must be the width of the image tower, {tower.encoder.dim}",
            param="projection_size",
        )
    pair = ImageText(
        tower, encoder, text.get("vocab_size", 32000), text.get("max_position_embeddings", 64), embedding,
        text.hf.get("pad_token_id", 1),
    )  # fmt: skip
    text.done()
    return pair


def image_model(images: ImageClassifier | ImageText, source: str) -> ModelConfig:
    """Return the config of a model of images; its layers are what the planner counts."""
    tower = images.tower
    layers = (_layer(tower.encoder),) * tower.encoder.layers
    vocab = images.classes if isinstance(images, ImageClassifier) else images.vocab
    if isinstance(images, ImageText):  # a text has fewer tokens than an image has patches
        share = images.length / tower.max_patches
        layers += (_layer(images.text, images.length),) * max(1, round(images.text.layers * share))
    return ModelConfig(
        family="siglip", vocab=vocab, dim=tower.encoder.dim, layers=layers, max_len=tower.max_patches,
        norm_eps=tower.encoder.eps, causal=False, images=images, source=source,
    )  # fmt: skip


def _layer(of: Encoder, window: int | None = None) -> Layer:
    H = of.dim // of.heads
    attn = Attention(of.heads, of.heads, H, H**-0.5, None, window, qkv_bias=True, out_bias=True)
    return Layer(attn, Mlp(of.width, Glu(of.act), bias=True, gated=False))


def with_classes(hf: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """Return the config.json of a classifier with the names of its classes."""
    hf = {key: value for key, value in hf.items() if key != "num_labels"}
    numbered = {str(i): name for i, name in enumerate(names)}
    return hf | {"id2label": numbered, "label2id": {name: i for i, name in enumerate(names)}}


FAMILIES = (Family(("siglip",), "SiglipModel", parse_siglip),)
