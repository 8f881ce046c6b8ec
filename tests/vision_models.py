"""A tiny random model of every family that sees images, made by transformers, and prompts with images for it."""

from __future__ import annotations

import functools
import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
GEMMA4 = TEXT | dict(
    num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2, head_dim=16, sliding_window=6,
    vocab_size_per_layer_input=160, global_head_dim=24,
)  # fmt: skip
GEMMA4_12B = {key: GEMMA4[key] for key in GEMMA4 if key != "vocab_size_per_layer_input"}
GEMMA4_12B |= dict(attention_k_eq_v=True, num_global_key_value_heads=1, final_logit_softcapping=30.0)
GEMMA4_VISION = dict(
    hidden_size=32, intermediate_size=56, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
    head_dim=12, patch_size=4, pooling_kernel_size=2, position_embedding_size=40, rms_norm_eps=1e-4,
    rope_parameters=dict(rope_type="axial", rope_theta=80.0),
)  # fmt: skip

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
    "gemma4": (
        "Gemma4Config",
        dict(text_config=GEMMA4 | dict(hidden_size_per_layer_input=8, num_kv_shared_layers=2),
             vision_config=GEMMA4_VISION | dict(use_clipped_linears=True), image_token_id=IMAGE_TOKEN),
    ),
    "gemma4-31b": (
        "Gemma4Config",
        dict(text_config=GEMMA4 | dict(hidden_size_per_layer_input=0, use_bidirectional_attention="vision"),
             vision_config=GEMMA4_VISION | dict(standardize=True), image_token_id=IMAGE_TOKEN),
    ),
    "qwen2.5-vl": (
        "Qwen2_5_VLConfig",
        dict(text_config=TEXT | dict(rope_parameters=dict(
                rope_type="default", rope_theta=1000.0, mrope_section=[3, 1, 2])),
             vision_config=dict(depth=4, hidden_size=32, intermediate_size=56, num_heads=4, patch_size=4,
                                spatial_merge_size=2, out_hidden_size=48, window_size=16, fullatt_block_indexes=[1]),
             image_token_id=IMAGE_TOKEN, video_token_id=IMAGE_TOKEN + 1),
    ),
    "gemma4-unified": (
        "Gemma4UnifiedConfig",
        dict(text_config=GEMMA4_12B,
             vision_config=dict(patch_size=4, pooling_kernel_size=2, mm_embed_dim=32, output_proj_dims=32,
                                mm_posemb_size=20, rms_norm_eps=1e-4),
             audio_config=dict(audio_embed_dim=16), image_token_id=IMAGE_TOKEN),
    ),
    "qwen3-vl": (
        "Qwen3VLConfig",
        dict(text_config=TEXT | dict(num_hidden_layers=4, head_dim=16, rope_parameters=dict(
                rope_type="default", rope_theta=1000.0, mrope_section=[4, 2, 2], mrope_interleaved=True)),
             vision_config=dict(depth=4, hidden_size=32, intermediate_size=56, num_heads=4, patch_size=4,
                                spatial_merge_size=2, out_hidden_size=48, num_position_embeddings=25,
                                deepstack_visual_indexes=[0, 2]),
             image_token_id=IMAGE_TOKEN, video_token_id=IMAGE_TOKEN + 1),
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
    for key, bound in model.named_buffers():  # of clipped products: some numbers are beyond them
        if key.endswith(("put_min", "put_max")):
            bound.copy_((1 + bound.abs()) * (1 if key.endswith("max") else -1))
    folder = Path(tempfile.mkdtemp(prefix=f"dovetail-{name}-"))
    model.save_pretrained(folder)
    return model, folder


# height and width of a prompt's items, in turn
SIZES = dict.fromkeys(("gemma4", "gemma4-31b", "gemma4-unified", "qwen3-vl"), ((16, 24), (32, 8), (24, 24)))
SIZES["qwen2.5-vl"] = ((24, 40), (32, 8), (56, 24))  # windows are 16 x 16
CLIP = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]  # mean, standard deviation


@dataclass(frozen=True)
class Example:
    """A prompt: its tokens, its items as pixels [H, W, 3], and which item (1, 2, ..) a token is of."""

    tokens: np.ndarray
    pixels: Sequence[np.ndarray]
    image_ids: np.ndarray


def example(texts: list[int], tokens_per_item: int, side: int = 32, seed: int = 0) -> Example:
    """A prompt of texts of these lengths with a square item between each two of them."""
    built = sized_example(texts, ((side, side),), side // math.isqrt(tokens_per_item), seed)
    return replace(built, pixels=np.stack(built.pixels) if built.pixels else np.zeros((0, side, side, 3), np.uint8))


def sized_example(texts: list[int], sizes: tuple[tuple[int, int], ...], unit: int, seed: int = 0) -> Example:
    """The same with items of these heights and widths in turn; a feature is of unit x unit pixels."""
    rng = np.random.default_rng(seed)
    tokens, ids, pixels = [], [], []
    for i, length in enumerate(texts):
        if i:
            height, width = sizes[(i - 1) % len(sizes)]
            count = (height // unit) * (width // unit)
            pixels.append(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))
            tokens += [IMAGE_TOKEN] * count
            ids += [i] * count
        tokens += rng.integers(3, IMAGE_TOKEN, length).tolist()
        ids += [0] * length
    return Example(np.asarray(tokens, np.int32), pixels, np.asarray(ids, np.int32))


def their_logits(name: str, prompt: Example, model: torch.nn.Module | None = None) -> np.ndarray:
    """The logits [T, vocab] of transformers; `model`: with adapters."""
    model = model or vision_reference(name)[0]
    given = {"input_ids": torch.tensor(prompt.tokens[None].astype(np.int64))}
    kinds = torch.tensor(prompt.image_ids[None] > 0).long()
    given |= {"token_type_ids": kinds} if name == "gemma3" else {}
    given |= {"mm_token_type_ids": kinds} if name.startswith(("gemma4", "qwen")) else {}
    if name == "gemma4-unified":  # as its `generate`; alone, its forward pass lets images see each other in all layers
        embeds, positions = model.get_input_embeddings()(given["input_ids"]), torch.arange(len(prompt.tokens))[None]
        masks = model.create_masks_for_generate(model.config, embeds, None, None, positions, kinds)
        given |= {"attention_mask": masks}
    with torch.no_grad():
        return model(**given, **_pixel_values(name, prompt)).logits[0].float().numpy()


def _pixel_values(name: str, prompt: Example) -> dict[str, torch.Tensor]:
    if not len(prompt.pixels):
        return {}
    if name.startswith("gemma4"):
        patches, positions = patches_of(prompt.pixels, 8 if name == "gemma4-unified" else GEMMA4_VISION["patch_size"])
        return {"pixel_values": torch.tensor(patches) / 255, "image_position_ids": torch.tensor(positions).long()}
    if name.startswith("qwen"):
        return _two_frames(prompt.pixels, 4, CLIP if name == "qwen2.5-vl" else ([0.5] * 3, [0.5] * 3))
    pixels = torch.tensor(np.stack(prompt.pixels)).permute(0, 3, 1, 2).float() / 127.5 - 1
    return {"pixel_values": pixels[None] if name in ("smolvlm", "idefics3") else pixels}


def _two_frames(pixels: Sequence[np.ndarray], size: int, norm: tuple[list, list]) -> dict[str, torch.Tensor]:
    """Qwen's input: patches as (channel, frame, row, column) in squares of 2 x 2, and the shape of each image."""
    parts = [patches_of([image], size, square=2)[0][0].reshape(-1, size, size, 3) for image in pixels]
    mean, std = (torch.tensor(each)[None, :, None, None] for each in norm)
    patches = (torch.tensor(np.concatenate(parts)).permute(0, 3, 1, 2).float() / 255 - mean) / std
    grids = [[1, image.shape[0] // size, image.shape[1] // size] for image in pixels]
    return {"pixel_values": patches[:, :, None].repeat(1, 1, 2, 1, 1).flatten(1), "image_grid_thw": torch.tensor(grids)}


def patches_of(pixels: Sequence[np.ndarray], size: int, square: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Images [H, W, 3] as patches [N, P, size * size * 3] and their positions [N, P, 2]; padding is -1.

    They are in order of rows, or of squares of patches.
    """
    items = []
    for image in pixels:
        rows, columns = image.shape[0] // size, image.shape[1] // size
        grid = image.reshape(rows, size, columns, size, 3).transpose(0, 2, 1, 3, 4).reshape(rows * columns, -1)
        y, x = np.divmod(np.arange(rows * columns), columns)
        order = np.lexsort((x, y, x // square, y // square))
        items.append((grid[order], np.stack([x, y], -1)[order].astype(np.int32)))
    most = max(len(patches) for patches, _ in items)
    patches = [np.pad(patches, ((0, most - len(patches)), (0, 0))) for patches, _ in items]
    positions = [np.pad(at, ((0, most - len(at)), (0, 0)), constant_values=-1) for _, at in items]
    return np.stack(patches), np.stack(positions)
