"""Choose the image processor of a model's folder."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from dovetail.core.errors import RequestError, UserError
from dovetail.io.images.fixed import build_gemma3, build_siglip
from dovetail.io.images.gemma4 import build_gemma4
from dovetail.io.images.item import ProcessedImage
from dovetail.io.images.qwen import build_qwen
from dovetail.io.images.settings import TowerInput
from dovetail.io.images.smolvlm import build_smolvlm
from dovetail.io.tokenizer import Tokenizer
from dovetail.models.family import Fields
from dovetail.models.registry import read_json
from dovetail.models.towers.vision import Vision


class ImageProcessor(Protocol):
    """Describe how the images of a model become items and text: a frozen dataclass."""

    @property
    def image_token(self) -> str:
        """Return the text of the token that a feature replaces."""
        ...

    @property
    def image_id(self) -> int:
        """Return the id of this token."""
        ...

    @property
    def placeholder(self) -> str:
        """Return what chat templates write for an image."""
        ...

    def __call__(self, image: np.ndarray, param: str = "image") -> ProcessedImage:
        """Return the items of an image [H, W, 3] of uint8; `param` names it in errors."""
        ...

    def low_detail(self) -> ImageProcessor:
        """Return the processor for OpenAI's `detail: low`: fewer image tokens where the tower allows it."""
        ...


BUILDERS: dict[str, Callable[[Fields, TowerInput], ImageProcessor]] = {
    "Idefics3ImageProcessor": build_smolvlm,
    "SmolVLMImageProcessor": build_smolvlm,
    "Gemma3ImageProcessor": build_gemma3,
    "Gemma4ImageProcessor": build_gemma4,
    "Gemma4UnifiedImageProcessor": build_gemma4,
    "Qwen2VLImageProcessor": build_qwen,
    "SiglipImageProcessor": build_siglip,
}

DETAILS = ("auto", "low", "high", "original")

_FILES = ("preprocessor_config.json", "processor_config.json")


def read_processor(folder: str | Path, vision: Vision, tokenizer: Tokenizer) -> ImageProcessor:
    """Return the image processor of a model's folder.

    Args:
        folder: It has a preprocessor_config.json, or a processor_config.json with an `image_processor`.
        vision: How the model sees images (`ModelConfig.vision`).
        tokenizer: The model's.

    Raises:
        UserError: Neither file is there, or a setting is not supported; `param` is the setting.
    """
    settings, where = _read_settings(Path(folder))
    kind = str(settings.get("image_processor_type") or settings.get("feature_extractor_type"))
    builder = BUILDERS.get(kind.removesuffix("Fast").removesuffix("Pil"))
    if builder is None:
        known = ", ".join(sorted(BUILDERS))
        raise UserError(
            f"{where}: image_processor_type={kind!r} is not supported (only {known})", param="image_processor_type"
        )
    tower = TowerInput(
        patch=math.isqrt(vision.tower.patch_dim // 3),
        merge=math.isqrt(vision.tower.patches_per_feature),
        max_patches=vision.tower.max_patches,
        image_token=tokenizer.token(vision.image_token),
        image_id=vision.image_token,
        tokens=tokenizer.special_tokens,
    )
    fields = Fields(settings, where)
    processor = builder(fields, tower)
    fields.done()
    return processor


def has_processor(folder: str | Path) -> bool:
    """Return whether a model's folder has the settings of an image processor."""
    return any((Path(folder) / name).is_file() for name in _FILES)


def copy_processor(source: str | Path, folder: str | Path) -> None:
    """Copy the settings of a model's image processor, if it has one, into the folder of other weights of it."""
    for path in (Path(source) / name for name in _FILES):
        if path.is_file():
            (Path(folder) / path.name).write_bytes(path.read_bytes())


def at_detail(processor: ImageProcessor, detail: str) -> ImageProcessor:
    """Return the processor for a `detail` of OpenAI's API: "auto", "high" and "original" are the model's settings."""
    if detail not in DETAILS:
        raise RequestError(f"`detail` must be one of {', '.join(DETAILS)}, got {detail!r}.", param="detail")
    return processor.low_detail() if detail == "low" else processor


def _read_settings(folder: Path) -> tuple[dict[str, Any], str]:
    """Return the settings of images and of prompts together, and the file that they are from."""
    own, shared = (read_json(folder / name) if (folder / name).is_file() else None for name in _FILES)
    nested = (shared or {}).get("image_processor")
    images = own if nested is None else nested
    if images is None:
        raise UserError(
            f"{folder} has no preprocessor_config.json: the model's images cannot be resized as in training"
        )
    prompts = {key: value for key, value in (shared or {}).items() if not isinstance(value, dict)}
    return prompts | images, str(folder / _FILES[0 if nested is None else 1])
