"""Folders of models with vision: settings as transformers writes them, and tokenizers that know their image tokens."""

import importlib
import json
from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from dovetail.io.detokenize import byte_characters
from dovetail.io.images.processor import read_processor
from dovetail.io.tokenizer import Tokenizer
from dovetail.models.towers.vision import Vision

MODULES = {"Idefics3": "idefics3", "Gemma3": "gemma3", "Gemma4": "gemma4", "Qwen2VL": "qwen2_vl", "Siglip": "siglip"}


@dataclass(frozen=True)
class FakeTower:
    """Stand in for a tower: what a processor asks it."""

    patch_dim: int
    patches_per_feature: int
    max_patches: int


@dataclass(frozen=True)
class Family:
    """One family of processors: its settings, its tower and its tokens."""

    name: str  # of the image processor in transformers
    settings: dict
    patch: int
    merge: int
    max_patches: int
    tokens: dict  # special tokens by name; `image_token` among them
    more: dict  # of processor_config.json
    template: str = ""


PARTS = "{% for part in message['content'] %}{{ part['text'] if part['type'] == 'text' else PLACEHOLDER }}{% endfor %}"
TEMPLATE = "{% for message in messages %}{{ message['role'] }}: " + PARTS + "{{ '\n' }}{% endfor %}"

GEMMA4_AUDIO = {"audio_token": "<|audio|>", "boa_token": "<|audio>", "eoa_token": "<audio|>"}
HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
FAMILIES = {
    "smolvlm": Family(
        "Idefics3ImageProcessor",
        {"size": {"longest_edge": 256}, "max_image_size": {"longest_edge": 64}, **HALF},
        8, 4, 64, {"image_token": "<image>", "fake_image_token": "<fake_token_around_image>"}, {"image_seq_len": 4},
        TEMPLATE.replace("PLACEHOLDER", "'<image>'"),
    ),
    "gemma3": Family(
        "Gemma3ImageProcessor",
        {"size": {"height": 112, "width": 112}, "do_pan_and_scan": None, **HALF},
        14, 4, 64,
        {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
        {"image_seq_length": 4}, TEMPLATE.replace("PLACEHOLDER", "'<start_of_image>'"),
    ),
    "gemma4": Family(
        "Gemma4ImageProcessor",
        {"patch_size": 4, "pooling_kernel_size": 3, "max_soft_tokens": 70},
        4, 3, 630, {"image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>"} | GEMMA4_AUDIO, {},
        TEMPLATE.replace("PLACEHOLDER", "'<|image|>'"),
    ),
    "gemma4-unified": Family(
        "Gemma4UnifiedImageProcessor",
        {"patch_size": 4, "pooling_kernel_size": 3, "max_soft_tokens": 70},
        12, 1, 70, {"image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>"} | GEMMA4_AUDIO, {},
        TEMPLATE.replace("PLACEHOLDER", "'<|image|>'"),
    ),
    "qwen2.5": Family(
        "Qwen2VLImageProcessor",
        {"min_pixels": 28 * 28 * 4, "max_pixels": 28 * 28 * 30, "patch_size": 14},
        14, 2, 16384, {"image_token": "<|image_pad|>"}, {},
        TEMPLATE.replace("PLACEHOLDER", "'<|vision_start|><|image_pad|><|vision_end|>'"),
    ),
    "qwen3": Family(
        "Qwen2VLImageProcessor",
        {"size": {"shortest_edge": 8192, "longest_edge": 65536}, "patch_size": 16, **HALF},
        16, 2, 16384, {"image_token": "<|image_pad|>"}, {},
        TEMPLATE.replace("PLACEHOLDER", "'<|vision_start|><|image_pad|><|vision_end|>'"),
    ),
    "siglip": Family(
        "SiglipImageProcessor", {"size": {"height": 48, "width": 48}, **HALF}, 16, 1, 9, {"image_token": "<image>"}, {}
    ),
}  # fmt: skip


def tokenizer_of(family: Family) -> Tokenizer:
    """Return a tokenizer of bytes in which three line breaks are one token, as in Gemma's."""
    vocab = {letter: byte for byte, letter in enumerate(byte_characters())}
    newline = byte_characters()[ord("\n")]
    for count in (2, 3, 4):
        vocab[newline * count] = len(vocab)
    merges = [(newline, newline), (newline * 2, newline), (newline * 2, newline * 2)]
    backend = Backend(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    more = ["<|vision_start|>", "<|vision_end|>", "<global-img>", "<row_1_col_1>", "<row_1_col_2>", "<end>"]
    backend.add_special_tokens([*family.tokens.values(), *more])
    extra = {"extra_special_tokens": dict(family.tokens)}
    return Tokenizer(backend, eos="<end>", pad="<end>", chat_template=family.template, extra=extra)


def vision_of(family: Family, tokenizer: Tokenizer) -> Vision:
    """Return how a model of this family sees images."""
    tower = FakeTower(family.patch**2 * 3, family.merge**2, family.max_patches)
    return Vision(tower, tokenizer.id(family.tokens["image_token"]))


def processor_of(family: Family, folder, **changes):
    """Return the family's processor, read from a folder, and its tokenizer."""
    write_settings(folder, family, **changes)
    tokenizer = tokenizer_of(family)
    return read_processor(folder, vision_of(family, tokenizer), tokenizer), tokenizer


def image_processor_of(family: Family):
    """Return the slow image processor of transformers with the family's settings."""
    module = MODULES[family.name.removesuffix("ImageProcessor")]
    found = importlib.import_module(f"transformers.models.{module}.image_processing_pil_{module}")
    return getattr(found, f"{family.name}Pil")(**family.settings)


def write_settings(folder, family: Family, **changes) -> None:
    """Write the files of a model's folder."""
    settings = {"image_processor_type": family.name, **family.settings, **changes}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": "Any", **family.more}))


def noise(height: int, width: int, seed: int = 0) -> np.ndarray:
    """Return an image of random pixels."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
