"""Find images with their classes or captions: a folder, arrays, Parquet files, or the built-in digits.

A source gives an image by its number, as the bytes of a file or as an array, so that any order is possible.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dovetail.core.errors import MissingFileError, UserError
from dovetail.core.fingerprint import fingerprint
from dovetail.core.recipe import SHIPPED
from dovetail.data.image_settings import ImageData

DIGITS = "digits"  # 1,797 handwritten digits of 8 x 8 pixels (UCI, as in scikit-learn)
ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm")


@dataclass(frozen=True, eq=False)
class LabelledImages:
    """Hold the images of a source."""

    name: str
    read: Callable[[int], Any]  # an image's number -> the bytes of its file, or an array of uint8
    where: Callable[[int], str]  # an image's number -> its place, for a message
    labels: np.ndarray  # [images] int32; -1 without a class
    classes: tuple[str, ...]
    digest: str  # see core.fingerprint
    texts: Sequence[str] | None = None  # captions

    def __len__(self) -> int:
        return len(self.labels)


def open_images(path: str, data: ImageData) -> LabelledImages:
    """Return the images at a path; `data` names the columns.

    Raises:
        UserError: There are no images, or they have another form.
    """
    if path == DIGITS:
        return _arrays(DIGITS, *_pair(SHIPPED / "samples" / "digits.npz", data))
    here = Path(path).expanduser()
    if not here.exists():
        raise MissingFileError(f"{path} does not exist: name a folder, an .npz, .npy or .parquet file", param="path")
    if here.suffix in (".npz", ".npy"):
        return _arrays(path, *_pair(here, data))
    tables = [here] if here.suffix == ".parquet" else sorted(here.glob("*.parquet"))
    if tables:
        return _parquet(path, tables, data)
    if here.is_dir():
        return _folder(path, here)
    raise UserError(f"{path}: expected a folder, an .npz, .npy or .parquet file, got {here.suffix!r}", param="path")


# --- a folder per class -----------------------------------------------------------------------------------------------


def _folder(name: str, folder: Path) -> LabelledImages:
    classes = sorted(entry.name for entry in folder.iterdir() if entry.is_dir())
    found = [
        (file, label)
        for label, one in enumerate(classes)
        for file in sorted((folder / one).rglob("*"))
        if file.suffix.lower() in ENDINGS
    ]
    if not found:
        raise UserError(
            f"{name}: expected a subfolder for each class with files ending in {' '.join(ENDINGS)}, found none",
            param="path",
        )
    files = [file for file, _ in found]
    sizes = [[str(file.relative_to(folder)), file.stat().st_size] for file in files]
    return LabelledImages(
        name, lambda i: files[i].read_bytes(), lambda i: str(files[i]),
        np.asarray([label for _, label in found], np.int32), tuple(classes), fingerprint(sizes),
    )  # fmt: skip


# --- arrays -----------------------------------------------------------------------------------------------------------


def _pair(path: Path, data: ImageData) -> tuple[np.ndarray, np.ndarray, str]:
    """Return (images, labels, their place) of an .npz file, or of X.npy with X-labels.npy beside it."""
    if path.suffix == ".npy":
        beside = path.with_name(f"{path.stem}-labels.npy")
        if not beside.exists():
            raise MissingFileError(f"{beside} must hold the classes of the images in {path.name}", param="path")
        return np.load(path, mmap_mode="r"), np.load(beside), str(path)
    with np.load(path) as held:
        for key in (data.image_key, data.label_key):
            if key not in held:
                raise UserError(
                    f"{path} has no array {key!r}, it has {', '.join(held)}: set data.image_key and data.label_key",
                    param="image_key" if key == data.image_key else "label_key",
                )
        return held[data.image_key], held[data.label_key], str(path)


def _arrays(name: str, images: np.ndarray, labels: np.ndarray, where: str) -> LabelledImages:
    if images.dtype != np.uint8 or images.ndim not in (3, 4) or len(images) != len(labels):
        raise UserError(
            f"{where}: expected images [N, H, W] or [N, H, W, C] of uint8 and N labels, got {images.shape} of "
            f"{images.dtype} and {labels.shape}",
            param="path",
        )
    labels = labels.astype(np.int32)
    classes = tuple(str(one) for one in range(int(labels.max()) + 1))
    digest = fingerprint(images, labels, whole=images.nbytes < 1 << 28)
    return LabelledImages(name, lambda i: images[i], lambda i: f"{where} image {i}", labels, classes, digest)


# --- Parquet ----------------------------------------------------------------------------------------------------------


def _parquet(name: str, files: list[Path], data: ImageData) -> LabelledImages:
    """Return the rows of Parquet files, which are held in memory. Hugging Face's image columns are read as well."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pq.read_schema(files[0])
    if data.image_key not in schema.names:
        names = ", ".join(schema.names)
        raise UserError(
            f"{name} has no column {data.image_key!r}, it has {names}: set data.image_key", param="image_key"
        )
    wanted = [key for key in (data.image_key, data.label_key, data.text_key) if key in schema.names]
    table = pa.concat_tables([pq.read_table(file, columns=wanted) for file in files])
    images = table.column(data.image_key)

    def read(i: int) -> bytes:
        found = images[i].as_py()
        return found["bytes"] if isinstance(found, dict) else found

    has_labels = data.label_key in wanted
    labels = np.asarray(table.column(data.label_key)) if has_labels else np.full(len(table), -1)
    if labels.dtype.kind not in "iu":
        raise UserError(f"{name}: expected whole numbers in {data.label_key!r}, got {labels.dtype}", param="label_key")
    texts = table.column(data.text_key).to_pylist() if data.text_key in wanted else None
    classes = _class_names(schema, data.label_key) or tuple(str(one) for one in range(int(labels.max(initial=-1)) + 1))
    digest = fingerprint([[file.name, file.stat().st_size] for file in files], labels)
    return LabelledImages(name, read, lambda i: f"{name} row {i}", labels.astype(np.int32), classes, digest, texts)


def _class_names(schema: Any, label_key: str) -> tuple[str, ...]:
    """Return the names of the classes that Hugging Face's `datasets` writes into the schema; else none."""
    held = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
    return tuple(held.get("info", {}).get("features", {}).get(label_key, {}).get("names", ()))
