"""Prompts with images: from messages or text with placeholders to tokens and where the images are."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from dovetail.core.errors import RequestError
from dovetail.io.chat import has_images, image_source, is_image
from dovetail.io.images.decode import as_image
from dovetail.io.images.item import ImagePrompt, ImageSpan, ProcessedImage
from dovetail.io.images.processor import ImageProcessor
from dovetail.io.tokenizer import Tokenizer

Message = Mapping[str, Any]


@dataclass(frozen=True)
class ExpandedText:
    """Hold a text whose placeholders were replaced."""

    text: str
    placeholders: tuple[int, ...]  # where each began before
    grown: tuple[int, ...]  # how much longer the text is after each

    def moved(self, position: int) -> int:
        """Return where a character of the text before is now; it is not inside a placeholder."""
        passed = bisect_left(self.placeholders, position)
        return position + (self.grown[passed - 1] if passed else 0)


def encode_images(
    tokenizer: Tokenizer,
    processor: ImageProcessor,
    messages: Sequence[Message],
    images: Sequence[Any] = (),
    tools: Sequence[Mapping[str, Any]] | None = None,
    *,
    param: str = "messages",
    **template: Any,
) -> ImagePrompt:
    """Return the prompt of a conversation with images.

    Args:
        tokenizer: The model's, with its chat template.
        processor: The model's (see `read_processor`).
        messages: The conversation. A part such as `{"type": "image"}` takes the next of `images`; one with an image
            (`{"type": "image", "image": ...}`) brings its own. Where no message has such a part, the images are put
            before the first message of the user.
        images: Paths, bytes, PIL images or arrays.
        tools: Tools in OpenAI's format.
        param: The field of the messages in errors.
        template: Goes to the chat template (`add_generation_prompt`, `enable_thinking`, ...).

    Raises:
        RequestError: An image is refused, or there are more or fewer images than places for them.
    """
    messages, sources = place_images(messages, images, param=param)
    processed = [processor(as_image(source, param=param), param) for source in sources]
    text = tokenizer.apply_chat(messages, tools, **template)
    return encode_text(text, processed, processor, lambda text: tokenizer.encode(text, add_special=False), param=param)


def place_images(
    messages: Sequence[Message], images: Sequence[Any] = (), *, param: str = "messages"
) -> tuple[list[Message], list[Any]]:
    """Return the messages with a bare `{"type": "image"}` for each image, and the images in this order.

    Args:
        messages: The conversation (see `encode_images`); image parts are those of OpenAI and Hugging Face.
        images: What image parts without an image take, in order.
        param: The field of the messages in errors.
    """
    left, found, placed = list(images), [], []
    if left and not has_images(messages):
        messages = _images_first(messages, len(left))
    for message in messages:
        parts = _parts(message)
        for part in filter(is_image, parts):
            source = image_source(part)
            if source is None and not left:
                raise _wrong_count(f"there are more image parts than the {len(images)} images", param)
            found.append(left.pop(0) if source is None else source)
        bare = [{"type": "image"} if is_image(part) else part for part in parts]
        placed.append({**message, "content": bare} if parts else message)
    if left:
        raise _wrong_count(f"there are {len(left)} more images than image parts", param)
    return placed, found


def encode_text(
    text: str,
    images: Sequence[ProcessedImage],
    processor: ImageProcessor,
    encode: Callable[[str], Sequence[int]],
    *,
    param: str = "prompt",
) -> ImagePrompt:
    """Return the prompt of a text that has a placeholder for each image.

    Args:
        text: A text, or what a chat template has rendered.
        images: What the processor made of the images.
        processor: Their processor.
        encode: Tokenizes the text.
        param: The field of the text in errors.
    """
    expanded = expand(text, images, processor.placeholder, param=param).text
    # The text is expanded before it is tokenized: its line breaks may become one token with those of an image.
    return locate(encode(expanded), images, processor.image_id, param=param)


def encode_tokens(
    tokens: Sequence[int],
    images: Sequence[ProcessedImage],
    processor: ImageProcessor,
    tokenizer: Tokenizer,
    *,
    param: str = "prompt",
) -> ImagePrompt:
    """Return the prompt of token ids, which have the placeholder's id for each image, or all of its image tokens."""
    placeholder = tokenizer.id(processor.placeholder)
    if sum(token == processor.image_id for token in tokens) != _features(images):
        if sum(token == placeholder for token in tokens) != len(images):
            raise _placeholders(processor.placeholder, sum(token == placeholder for token in tokens), images, param)
        texts = iter([tokenizer.encode(image.text, add_special=False) for image in images])
        tokens = [new for token in tokens for new in (next(texts) if token == placeholder else (token,))]
    return locate(tokens, images, processor.image_id, param=param)


def expand(
    text: str, images: Sequence[ProcessedImage], placeholder: str, *, partly: bool = False, param: str = "prompt"
) -> ExpandedText:
    """Replace the placeholders of a text, in order, by the text of the images.

    Args:
        text: The text.
        images: What the processor made of the images.
        placeholder: That of the processor.
        partly: Whether the text may have fewer placeholders, as the beginning of a conversation has.
        param: The field of the text in errors.
    """
    pieces = text.split(placeholder)
    count = len(pieces) - 1
    if count > len(images) or (count < len(images) and not partly):
        raise _placeholders(placeholder, count, images, param)
    written = [image.text for image in images[:count]]
    joined = [pieces[0], *(new + piece for new, piece in zip(written, pieces[1:], strict=True))]
    ends = list(accumulate(len(piece) + len(placeholder) for piece in pieces[:-1]))
    grown = accumulate(len(new) - len(placeholder) for new in written)
    return ExpandedText("".join(joined), tuple(end - len(placeholder) for end in ends), tuple(grown))


def locate(
    tokens: Sequence[int], images: Sequence[ProcessedImage], image_token: int, *, param: str = "prompt"
) -> ImagePrompt:
    """Return the prompt of tokens that have one image token for each feature of the images."""
    at = np.flatnonzero(np.asarray(tokens, np.int64) == image_token)
    if len(at) != _features(images):
        message = f"`{param}` must have {_features(images)} image tokens for its images, got {len(at)}."
        raise RequestError(message, param=param, code="invalid_image")
    spans, taken = [], 0
    for item in (item for image in images for item in image.items):
        span = ImageSpan(int(at[taken]), item)
        taken += span.count
        if at[taken - 1] != span.end - 1:
            message = f"`{param}` has other tokens between the image tokens at {span.start} of one image."
            raise RequestError(message, param=param, code="invalid_image")
        spans.append(span)
    return ImagePrompt(tuple(int(token) for token in tokens), tuple(spans))


def _features(images: Sequence[ProcessedImage]) -> int:
    return sum(item.grid[0] * item.grid[1] for image in images for item in image.items)


def _parts(message: Message) -> list[Any]:
    content = message.get("content") if isinstance(message, Mapping) else None
    return list(content) if isinstance(content, list | tuple) else []


def _images_first(messages: Sequence[Message], count: int) -> list[Message]:
    """Put image parts before the content of the user's first message."""
    users = [i for i, message in enumerate(messages) if message.get("role") == "user"]
    if not users:
        return list(messages)
    first = messages[users[0]]
    content = first.get("content")
    own = _parts(first) or ([{"type": "text", "text": content}] if content else [])
    changed = {**first, "content": [{"type": "image"}] * count + own}
    return [*messages[: users[0]], changed, *messages[users[0] + 1 :]]


def _placeholders(placeholder: str, count: int, images: Sequence[ProcessedImage], param: str) -> RequestError:
    return _wrong_count(f"it has {count} placeholders {placeholder!r} for {len(images)} images", param)


def _wrong_count(what: str, param: str) -> RequestError:
    message = f"`{param}` must have one place for each image, and {what}."
    return RequestError(message, param=param, code="invalid_image")
