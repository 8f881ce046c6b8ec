"""Read the settings that image processors of Hugging Face share, and refuse those that would change the pixels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dovetail.core.errors import UserError
from dovetail.models.family import Fields

HALF = [0.5, 0.5, 0.5]

_RESAMPLE = {1: "lanczos", 2: "bilinear", 3: "bicubic"}  # PIL.Image.Resampling
# Say how transformers builds its arrays, or describe videos and sounds.
_OTHER = (
    "image_processor_type", "feature_extractor_type", "processor_class", "do_convert_rgb", "default_to_square",
    "data_format", "input_data_format", "return_tensors", "device", "disable_grouping", "video_sampling",
)  # fmt: skip


@dataclass(frozen=True)
class TowerInput:
    """Hold what a processor must know about its model.

    Attributes:
        patch: The side of a patch in pixels.
        merge: How many patches become one feature, in each direction.
        max_patches: The most patches of an item.
        image_token: The text of the token that a feature replaces.
        image_id: Its id.
        tokens: The tokenizer's special tokens by name, such as `boi_token`.
    """

    patch: int
    merge: int
    max_patches: int
    image_token: str
    image_id: int
    tokens: Mapping[str, str]


def read_resample(f: Fields, default: str) -> str:
    """Return the name of the filter."""
    numbers = {name: number for number, name in _RESAMPLE.items()}
    number = f.get("resample", numbers[default])
    if number not in _RESAMPLE:
        raise UserError(f"{f.where}: resample={number!r} is not supported (only 1, 2 or 3)", param="resample")
    return _RESAMPLE[number]


def check_shared(f: Fields, mean: list[float] | None, std: list[float] | None = None) -> None:
    """Refuse settings that differ from what the tower does with pixels.

    Args:
        f: The settings.
        mean: The mean that the tower subtracts after scaling to 0..1; None: it does not normalise.
        std: The standard deviation that it divides by; by default that of `mean`.
    """
    f.only("do_resize", True)
    f.only("do_center_crop", False)
    f.only("do_rescale", True)
    f.only("rescale_factor", 1 / 255)
    f.only("do_normalize", mean is not None)
    if mean is None:
        f.skip("image_mean", "image_std")
    else:
        f.only("image_mean", mean)
        f.only("image_std", std or mean)
    f.skip(*_OTHER)


def check_equal(f: Fields, key: str, wanted: int) -> None:
    """Refuse a setting that differs from the model's config.json."""
    if (value := f.get(key, wanted)) != wanted:
        raise UserError(f"{f.where}: {key}={value!r} does not match the model, which has {wanted}", param=key)
