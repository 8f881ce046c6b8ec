"""Train a model of images from a recipe: `dovetail pretrain vit-s16`, `siglip-b16`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from dovetail.core import recipe as recipes
from dovetail.core.choice import require
from dovetail.core.reporter import Reporter
from dovetail.train.image_settings import ImagePretrain
from dovetail.train.launch import Ended, launch
from dovetail.train.settings import shape_key

if TYPE_CHECKING:
    from dovetail.data.image_loader import ImageLoader
    from dovetail.io.tokenizer import Tokenizer
    from dovetail.models.towers.image_text import ImageText
    from dovetail.train.objective import Objective
    from dovetail.train.prepare import Ready
    from dovetail.train.rows import Opened


def image_pretrain_settings(
    settings: ImagePretrain, folder: Path, *, reporter: Reporter | None = None, **more: Any
) -> Ended:
    """Run the settings in `folder`; for `more` see train.launch."""
    return launch(settings, folder, _objective, _open_rows, settle=settled, reporter=reporter or Reporter(), **more)


def settled(settings: ImagePretrain) -> ImagePretrain:
    """Return the settings with the keys that depend on the model and the data filled in."""
    from dovetail.data.image_loader import count_images
    from dovetail.train.external import model_config

    settings = settings.for_model(model_config(settings.model))
    return settings.for_images(count_images(settings.data)) if settings.epochs else settings


def _objective(settings: ImagePretrain) -> Objective:
    from dovetail.train.image_objective import image_objective

    return image_objective(settings)


def _open_rows(settings: ImagePretrain, ready: Ready) -> Opened:
    from dovetail.data.image_loader import open_image_data
    from dovetail.models.towers.image_text import ImageText
    from dovetail.train.rows import Opened

    images, tokenizer, encode = ready.cfg.images, None, None
    assert images is not None
    if isinstance(images, ImageText):
        tokenizer = _tokenizer(settings)
        encode = partial(encode_caption, tokenizer, images)
    index, count = ready.rows_here()
    rows, held_out, inputs = open_image_data(
        settings.data, images.tower.image_size, settings.batch, encode, host_index=index, host_count=count
    )
    samples = None
    if not isinstance(images, ImageText):
        check_classes(rows, images.classes)
    elif held_out is not None and settings.eval.every and encode is not None and held_out.classes:
        from dovetail.train.zero_shot import ZeroShot

        samples = ZeroShot(ready, held_out, encode, settings.eval.every, settings.eval.batches)
    return Opened(cast(Any, rows), cast(Any, held_out), tokenizer, samples, inputs, _rows_key)


def _rows_key(settings: ImagePretrain) -> dict[str, Any]:
    return {"data": recipes.dump(settings.data), **shape_key(settings)}


def check_classes(rows: ImageLoader, classes: int) -> None:
    """Refuse images without a class of the model."""
    labels = rows.source.labels
    require(
        labels.min() >= 0 and labels.max() < classes,
        f"data.path has classes {labels.min()} to {labels.max()} and the model {classes} classes, from 0: set "
        f"num_labels to {labels.max() + 1} in a copy of the model's config.json, and model to its path",
        param="model",
    )


def _tokenizer(settings: ImagePretrain) -> Tokenizer:
    from dovetail.data.encoder import beside_model, find_tokenizer
    from dovetail.io.tokenizer import byte_tokenizer

    if settings.data.tokenizer == "bytes":
        return byte_tokenizer()
    found = find_tokenizer(settings.data.tokenizer) if settings.data.tokenizer else None
    found = found or beside_model(settings.tokenizer_place, settings.init)
    require(found is not None, "tokenizer must name a tokenizer: the model has none of its own", param="data.tokenizer")
    return cast(Any, found)


def encode_caption(tokenizer: Tokenizer, model: ImageText, text: str) -> np.ndarray:
    """Return [T] int32: the tokens of a caption, cut to the model's length and padded."""
    ids = tokenizer.encode(text)[: model.length]
    out = np.full(model.length, model.pad_id, np.int32)
    out[: len(ids)] = ids
    require(
        out.max() < model.vocab,
        f"tokenizer has the id {out.max()}, and the model's vocabulary {model.vocab} tokens: use the model's own",
        param="data.tokenizer",
    )
    return out
