"""Settings of the `data` section of a recipe that trains on images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dovetail.core.choice import not_negative, require


@dataclass(frozen=True)
class Augment:
    """Configure the random changes of a training image, in this order."""

    crop_area: float = 0.05  # the least share of an image that a random crop keeps; 1: the whole image is resized
    flip: bool = True  # whether half of the images are mirrored
    randaugment: int = 0  # how many random operations of RandAugment follow
    magnitude: float = 10.0  # their strength, 0 to 10

    def __post_init__(self) -> None:
        require(
            0 < self.crop_area <= 1,
            f"crop_area must be above 0 and at most 1; got {self.crop_area}",
            param="crop_area",
        )
        not_negative(self, "randaugment")
        require(0 <= self.magnitude <= 10, f"magnitude must be from 0 to 10; got {self.magnitude}", param="magnitude")


@dataclass(frozen=True)
class ImageData:
    """Configure the images of a training run."""

    MAIN: ClassVar = "path"  # `data: digits` is data.path

    path: str  # a folder with a subfolder per class, an .npz or .npy file, Parquet files, or `digits`
    validation: str = ""  # images to evaluate on, in the same forms; default: `held_out` of path
    held_out: float = 0.0  # the share of the images that is kept for evaluation
    image_key: str = "image"  # the column of the image, where a record has columns
    label_key: str = "label"  # the column of the class
    text_key: str = "text"  # the column of the caption; without one, captions are made by `prompt`
    prompt: str = "a photo of a {}."  # the caption of an image whose class has this name
    tokenizer: str = ""  # of captions: "": the model's own; "bytes": raw UTF-8; or a path
    augment: Augment = Augment()
    seed: int = 0  # seed of the order and of the random changes
    workers: int = 0  # processes that prepare batches; 0: threads of this process

    def __post_init__(self) -> None:
        require(bool(self.path), "path must name images, such as a folder; it is empty", param="path")
        require(
            0 <= self.held_out < 1, f"held_out must be a share of the images, below 1; got {self.held_out}",
            param="held_out",
        )  # fmt: skip
        require(
            not (self.validation and self.held_out),
            f"validation and held_out exclude each other; got {self.validation!r} and {self.held_out}",
            param="held_out",
        )
        require(
            self.prompt.count("{}") == 1,
            f"prompt must hold one {{}} for the name of the class; got {self.prompt!r}",
            param="prompt",
        )
        not_negative(self, "seed", "workers")
