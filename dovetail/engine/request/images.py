"""ImageReader: prompts and conversations with images, as dt.LLM takes them."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from collections.abc import Sequence as Many
from pathlib import Path
from typing import Any

from dovetail.core.errors import RequestError
from dovetail.io.hub import resolve
from dovetail.io.images.decode import as_image
from dovetail.io.images.item import ImagePrompt
from dovetail.io.images.processor import ImageProcessor, read_processor
from dovetail.io.images.prompt import encode_images, encode_text, encode_tokens
from dovetail.io.tokenizer import Tokenizer
from dovetail.models.towers.vision import Vision

KEYS = ("prompt", "prompt_token_ids", "multi_modal_data")  # vLLM's


class ImageReader:
    """Turn prompts with images into tokens and items.

    Args:
        model: The folder, hub id or catalogue name that has the settings of the model's processor.
        vision: How the model sees images; None: images are refused.
        tokenizer: The model's, if it has one.
        processor: Used in place of the one of `model`.
    """

    def __init__(
        self,
        model: str | Path | None,
        vision: Vision | None,
        tokenizer: Tokenizer | None,
        processor: ImageProcessor | None = None,
    ):
        self._model, self._vision, self._tokenizer, self._given = model, vision, tokenizer, processor

    @functools.cached_property
    def processor(self) -> ImageProcessor:
        """Return the model's image processor; it is read with the first image.

        Raises:
            RequestError: The model does not see images, or has no tokenizer or no processor.
        """
        if self._vision is None:
            raise RequestError("the model does not see images: use one with a vision tower", param="images")
        if self._given is not None:
            return self._given
        if self._tokenizer is None or self._model is None:
            missing = "tokenizer" if self._tokenizer is None else "processor"
            raise RequestError(f"images require a {missing}, and the model has none: pass ImagePrompts", param="images")
        return read_processor(resolve(self._model), self._vision, self._tokenizer)

    def chat(
        self, tokenizer: Tokenizer, messages: Many[Mapping[str, Any]], tools: Any, template: Mapping[str, Any]
    ) -> ImagePrompt:
        """Return the prompt of a conversation; an image is a PIL image, an array, bytes, a path or a data: URL."""
        return encode_images(tokenizer, self.processor, messages, tools=tools, **template)

    def prompt(self, given: Mapping[str, Any]) -> str | Many[int] | ImagePrompt:
        """Return the prompt of a dict with vLLM's keys: a text or token ids with placeholders, and the images."""
        if unknown := [key for key in given if key not in KEYS]:
            raise RequestError(f"a prompt that is a dict has the keys {KEYS}, got {unknown[0]!r}", param="prompts")
        if ("prompt" in given) == ("prompt_token_ids" in given):
            raise RequestError("a prompt that is a dict has either `prompt` or `prompt_token_ids`", param="prompts")
        sources, text = _sources(given.get("multi_modal_data")), given.get("prompt", given.get("prompt_token_ids"))
        if not sources:
            return text
        processor, tokenizer = self.processor, self._tokenizer
        if tokenizer is None:
            raise RequestError("images require a tokenizer, and the model has none: pass ImagePrompts", param="images")
        images = [processor(as_image(source)) for source in sources]
        if isinstance(text, str):
            return encode_text(text, images, processor, tokenizer.encode)
        return encode_tokens(text, images, processor, tokenizer)


def _sources(data: Any) -> list[Any]:
    """Return the images of `multi_modal_data`."""
    if data is None:
        return []
    if not isinstance(data, Mapping) or data.keys() != {"image"}:
        raise RequestError("`multi_modal_data` must be a dict with the key 'image'", param="multi_modal_data")
    return list(data["image"]) if isinstance(data["image"], list | tuple) else [data["image"]]
