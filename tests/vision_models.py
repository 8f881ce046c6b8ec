"""A tiny random model of every family that sees images, made by transformers, and prompts with images for it."""

from __future__ import annotations

import functools
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import transformers
from reference_models import randomize

TEXT = dict(
    vocab_size=160, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=512, bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip
SIGLIP = dict(
    hidden_size=32, intermediate_size=56, num_hidden_layers=3, num_attention_heads=4, image_size=32, patch_size=4
)
IMAGE_TOKEN = 150

# name -> (transformers' config class, its arguments)
VISION: dict[str, tuple[str, dict]] = {
    "smolvlm": (
        "SmolVLMConfig",
        dict(text_config=dict(model_type="llama", **TEXT), vision_config=SIGLIP, scale_factor=4,
             image_token_id=IMAGE_TOKEN, tie_word_embeddings=True),
    ),
    "idefics3": (
        "Idefics3Config",
        dict(text_config=dict(model_type="llama", **TEXT), vision_config=SIGLIP | dict(layer_norm_eps=1e-3),
             scale_factor=2, image_token_id=IMAGE_TOKEN),
    ),
    "gemma3": (
        "Gemma3Config",
        dict(text_config=TEXT | dict(head_dim=16, sliding_window=6, num_hidden_layers=3, query_pre_attn_scalar=20,
                                     layer_types=["sliding_attention", "full_attention", "sliding_attention"]),
             vision_config=SIGLIP | dict(vision_use_head=False, model_type="siglip_vision_model"),
             mm_tokens_per_image=16, image_token_index=IMAGE_TOKEN),
    ),
}  # fmt: skip


@functools.cache
def vision_reference(name: str):
    """(transformers' model, a folder it was saved to). Every tensor is random, norms and biases too."""
    kind, options = VISION[name]
    config = getattr(transformers, kind)(**options)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval().float()
    randomize(model)
    folder = Path(tempfile.mkdtemp(prefix=f"dovetail-{name}-"))
    model.save_pretrained(folder)
    return model, folder


@dataclass(frozen=True)
class Example:
    """A prompt: its tokens, its items as pixels [N, side, side, 3], and which item (1, 2, ..) a token is of."""

    tokens: np.ndarray
    pixels: np.ndarray
    image_ids: np.ndarray


def example(texts: list[int], tokens_per_item: int, side: int = 32, seed: int = 0) -> Example:
    """A prompt of texts of these lengths with an item between each two of them."""
    rng = np.random.default_rng(seed)
    tokens, ids = [], []
    for i, length in enumerate(texts):
        if i:
            tokens += [IMAGE_TOKEN] * tokens_per_item
            ids += [i] * tokens_per_item
        tokens += rng.integers(3, IMAGE_TOKEN, length).tolist()
        ids += [0] * length
    pixels = rng.integers(0, 256, (len(texts) - 1, side, side, 3), dtype=np.uint8)
    return Example(np.asarray(tokens, np.int32), pixels, np.asarray(ids, np.int32))


def their_logits(name: str, prompt: Example) -> np.ndarray:
    """The logits [T, vocab] of transformers."""
    model, _ = vision_reference(name)
    given = {"input_ids": torch.tensor(prompt.tokens[None].astype(np.int64))}
    if name == "gemma3":
        given["token_type_ids"] = torch.tensor(prompt.image_ids[None] > 0).long()
    if len(prompt.pixels):
        pixels = torch.tensor(prompt.pixels).permute(0, 3, 1, 2).float() / 127.5 - 1
        is_tiled = name in ("smolvlm", "idefics3")
        given["pixel_values"] = pixels[None] if is_tiled else pixels
    with torch.no_grad():
        return model(**given).logits[0].float().numpy()


def patches_of(pixels: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Images [N, H, W, 3] as patches [N, P, size * size * 3], row by row, and their positions [N, P, 2]."""
    N, H, W, _ = pixels.shape
    grid = pixels.reshape(N, H // size, size, W // size, size, 3).transpose(0, 1, 3, 2, 4, 5)
    patches = grid.reshape(N, -1, size * size * 3)
    y, x = np.divmod(np.arange(patches.shape[1]), W // size)
    return patches, np.broadcast_to(np.stack([x, y], -1), (*patches.shape[:2], 2)).astype(np.int32)
