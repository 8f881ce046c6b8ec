"""Share a tiny model that sees images, with its tokenizer and processor, and pictures for it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import tokenizers
from PIL import Image
from vision_models import vision_reference

IMAGE = 150
COLOURS = {"red": (220, 30, 30), "blue": (20, 40, 230), "green": (30, 200, 40)}
SPECIAL = ["<fake_token_around_image>", "<global-img>", "<row_1_col_1>", "<row_1_col_2>"]
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}:{% for part in message.content %}"
    "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}<2>{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def vision_folder(folder: Path) -> Path:
    """SmolVLM with a tokenizer of letters and a processor of tiles of 32 x 32."""
    shutil.copytree(vision_reference("smolvlm")[1], folder)
    vocab = {chr(32 + i): i + 3 for i in range(95)} | {"\n": 98} | {f"<{i}>": i for i in (0, 1, 2)}
    vocab |= {token: 140 + i for i, token in enumerate(SPECIAL)} | {"<image>": IMAGE}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="<0>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    made.decoder = tokenizers.decoders.Fuse()
    made.add_special_tokens([*SPECIAL, "<image>", "<2>"])
    made.save(str(folder / "tokenizer.json"))
    config = {"chat_template": TEMPLATE, "eos_token": "<2>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    settings = dict(
        image_processor_type="SmolVLMImageProcessor", size={"longest_edge": 64}, max_image_size={"longest_edge": 32},
        do_resize=True, do_rescale=True, rescale_factor=1 / 255, do_normalize=True, image_mean=[0.5] * 3,
        image_std=[0.5] * 3, resample=1, do_image_splitting=True,
    )  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return folder


def picture(colour: str, seed: int = 0) -> Image.Image:
    """Two tiles and the small copy: 12 image tokens."""
    noise = np.random.default_rng(seed).integers(-20, 20, (16, 32, 3))
    return Image.fromarray(np.clip(noise + COLOURS[colour], 0, 255).astype(np.uint8))
