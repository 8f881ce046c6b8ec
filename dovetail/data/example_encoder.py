"""Encode an example to tokens, with a mask of the trained ones.

By default the assistant's tokens are trained, each turn with its end. The mask comes from the chat template, never from
a search in the text. A template with {% generation %} marks says itself which text is the assistant's. With any other,
a turn is what the template adds to the prompt that a model would get there (the messages before it, rendered with
add_generation_prompt). Some templates render a turn differently once the conversation has gone on (Qwen3 removes the
thinking): such a turn becomes a document of its own that ends with it, as the model sees it.

`fit` shortens examples that are longer than a row.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dovetail.core.errors import MissingFileError, UserError
from dovetail.core.fingerprint import fingerprint
from dovetail.data.encoder import OffsetTokenizer
from dovetail.data.examples import ChatExample, Example, TextExample
from dovetail.data.messages import check_roles
from dovetail.data.pictures import NO_IMAGES, Picture, count_images, read_picture
from dovetail.data.settings import TrainedTokens, TuningData
from dovetail.io.chat import ChatTemplate
from dovetail.io.images.item import ProcessedImage
from dovetail.io.images.processor import ImageProcessor
from dovetail.io.images.prompt import ExpandedText, expand
from dovetail.io.tokenizer import Tokenizer

_MARK = re.compile(r"\{%[-+]?\s*generation\b")
WHOLE, SHORTENED, CUT, LEFT_OUT = "whole", "shortened", "cut", "left out"  # outcomes of `fit`
Sides = Sequence[ChatExample | TextExample]


class MaskedTokens(NamedTuple):
    """Hold the tokens of one document, and which of them are trained."""

    tokens: np.ndarray  # [n] int32
    mask: np.ndarray  # [n] bool
    images: tuple[Picture, ...] = ()

    @property
    def is_trained(self) -> bool:
        """Return whether any token is trained; a document's first token cannot be predicted."""
        return bool(self.mask[1:].any())


class _Turn(NamedTuple):
    before: str  # the prompt that the assistant answers
    ended: str  # the same, with the answer


def example_encoder(
    settings: TuningData,
    tokenizer: Tokenizer,
    trained: TrainedTokens = TrainedTokens(),
    processor: ImageProcessor | None = None,
) -> ExampleEncoder:
    """Return the encoder with the template of the settings, or the tokenizer's own."""
    template = template_source(settings)
    if template is None:
        return ExampleEncoder(tokenizer, trained=trained, processor=processor)
    name = f"the chat template {Path(settings.template).expanduser()}"
    return ExampleEncoder(tokenizer, template, name, trained, processor)


def template_source(settings: TuningData) -> str | None:
    """Return the Jinja source of `data.template`; None: the tokenizer's own template is used."""
    if not settings.template:
        return None
    path = Path(settings.template).expanduser()
    if not path.is_file():
        raise MissingFileError(
            f"template must be a file with a chat template's Jinja source; there is no {str(path)!r}",
            param="data.template",
        )
    return path.read_text(encoding="utf-8")


def begins_with_assistant(side: ChatExample | TextExample) -> bool:
    """Return whether the first turn is the assistant's. It has no prompt, so it is not trained."""
    return isinstance(side, ChatExample) and not side.first and side.messages[0]["role"] == "assistant"


class ExampleEncoder:
    """Encode examples with a tokenizer and a chat template.

    Args:
        tokenizer: The model's tokenizer.
        template: Jinja source to use in place of the tokenizer's own templates.
        name: The name of the template in messages.
        trained: Which tokens are trained.
        processor: The model's image processor; None: images are refused.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: str | None = None,
        name: str = "the model's chat template",
        trained: TrainedTokens = TrainedTokens(),
        processor: ImageProcessor | None = None,
    ):
        self.tokenizer, self.name, self._trained, self._processor = tokenizer, name, trained, processor
        self._source, self._text = template, OffsetTokenizer(tokenizer)
        self._ends = np.asarray(tokenizer.eos_ids, np.int32)
        self._templates: dict[bool, ChatTemplate] = {}

    @property
    def image_id(self) -> int:
        """Return the id of the image token; -1 if the model does not see images."""
        return self._processor.image_id if self._processor else -1

    @property
    def identity(self) -> str:
        """Return a hash of everything that decides the tokens of an example."""
        text, tokenizer = self._text, self.tokenizer
        own = None if self._source is not None else tokenizer.chat_templates
        kept = [text.before, bool(text.backend.encode_special_tokens), tokenizer.eos_id, list(tokenizer.eos_ids)]
        seen = [repr(self._processor)] if self._processor else []
        return fingerprint(text.backend.to_str(), kept, self._source, own, list(self._trained), *seen)

    def with_pictures(self, found: Example, folder: Path) -> Example:
        """Return the example with its images read and processed; relative paths start from `folder`."""
        return replace(found, sides=tuple(self.pictured(side, folder) for side in found.sides))

    def pictured(self, side: ChatExample | TextExample, folder: Path) -> ChatExample | TextExample:
        """Return one side with its images read and processed, those that are not yet."""
        if isinstance(side, TextExample) or not side.images:
            return side
        if self._processor is None:
            raise UserError(f"the record has images: {NO_IMAGES}", param="model", code="no_images")
        images = (x if isinstance(x, Picture) else read_picture(x, self._processor, folder) for x in side.images)
        return replace(side, images=tuple(images))

    def encode(self, side: ChatExample | TextExample) -> list[MaskedTokens]:
        """Return the documents of one side: one, or more where turns are separate; none where nothing is trained."""
        found = [self._plain(side)] if isinstance(side, TextExample) else self._conversation(side)
        return found if self._processor is None else [self._with_images(document, side) for document in found]

    def _with_images(self, document: MaskedTokens, side: ChatExample | TextExample) -> MaskedTokens:
        """Return the document with its images, all or the first of the conversation's, whose tokens are not trained."""
        assert self._processor is not None
        images = () if isinstance(side, TextExample) else side.images
        is_image = document.tokens == self._processor.image_id
        count = self._num_images(document.tokens, images)
        return MaskedTokens(document.tokens, document.mask & ~is_image, images[:count])

    def _num_images(self, tokens: np.ndarray, images: Sequence[Picture]) -> int:
        """Return how many of the images, in order, the image tokens are of."""
        assert self._processor is not None
        there = int((tokens == self._processor.image_id).sum())
        ends = np.cumsum([0, *(image.tokens for image in images)])
        count = int(np.searchsorted(ends, there))
        if count == len(ends) or ends[count] != there:
            raise UserError(
                f"expected the tokens {self._processor.image_token!r} of the record's images alone, and its text has "
                "others: remove them"
            )
        return count

    def _filled_template(self, side: ChatExample) -> Any:
        template = self.template(side)
        return FilledTemplate(template, side, self._processor.placeholder) if self._processor else template

    def _conversation(self, side: ChatExample) -> list[MaskedTokens]:
        template = self._filled_template(side)
        check_roles(side.messages, template.source)
        text = template.render(side.messages, side.tools, add_generation_prompt=False)
        self._check_written(side, template, text)
        side = side if self._trained.completion_only else replace(side, first=0)
        if not self._trained.assistant_only:
            found = [self._whole(side, template, text)]
        elif _MARK.search(template.source):
            found = self._by_marks(side, template)
        else:
            found = self._by_prefixes(side, template, text)
        return [document for document in found if document.is_trained]

    def prompt(self, side: ChatExample | TextExample) -> np.ndarray:
        """Return [n] the tokens of the prompt that a model continues; its images are `Picture`s."""
        if isinstance(side, TextExample):
            tokens, images = np.asarray([*self._text.before, *self._text.encode(side.prompt).ids], np.int32), ()
        else:
            messages = side.messages[: side.first] if side.first else side.messages
            if self._processor is None and count_images(messages):
                raise UserError(f"the record has images: {NO_IMAGES}", param="model", code="no_images")
            text, images = self._filled_template(side).render(messages, side.tools), side.images
            tokens = self._text.encode(text).ids
        if self._processor:
            self._num_images(tokens, images)
        return tokens

    def text(self, text: str, images: Sequence[Picture] = ()) -> list[int]:
        """Return the tokens of a text within a conversation, with images in the place of their placeholders."""
        if self._processor is None:
            return self.tokenizer.encode(text, add_special=False)
        processed = [ProcessedImage(image.text, ()) for image in images]
        text = expand(text, processed, self._processor.placeholder, param="messages").text
        tokens = self.tokenizer.encode(text, add_special=False)
        self._num_images(np.asarray(tokens, np.int64), images)
        return tokens

    def decode(self, ids: np.ndarray) -> str:
        """Return the text of ids, special tokens included."""
        return self._text.backend.decode(ids.tolist(), skip_special_tokens=False)

    def template(self, side: ChatExample) -> ChatTemplate:
        """Return the template of a conversation; one with tools may have another."""
        with_tools = side.tools is not None
        if self._source is None and not self.tokenizer.chat_templates:
            raise UserError(
                "the model's tokenizer has no chat template, so messages cannot be rendered: set data.template=FILE to "
                "a file with one (Jinja), or give prompt and completion as text",
                param="data.template",
            )
        if with_tools not in self._templates:
            self._templates[with_tools] = self.tokenizer.chat(side.tools, self._source)
        return self._templates[with_tools]

    def _check_written(self, side: ChatExample, template: ChatTemplate, text: str) -> None:
        """Refuse a conversation whose tools, calls or messages the template leaves out."""
        remedy = "set data.template to one that does, or leave the record out"
        if side.tools and not all(_name_of(tool) in text for tool in side.tools):
            raise UserError(f"tools: {self.name} does not write them; {remedy}")
        for i, message in enumerate(side.messages):
            if not all(_name_of(call) in text for call in message.get("tool_calls") or ()):
                raise UserError(f"messages[{i}].tool_calls: {self.name} does not write them; {remedy}")
            if message["role"] != "assistant" and self._is_left_out(side, template, i, text):
                raise UserError(f"messages[{i}], of role {message['role']!r}: {self.name} does not write it; {remedy}")

    def _is_left_out(self, side: ChatExample, template: ChatTemplate, at: int, text: str) -> bool:
        """Return whether the text does not depend on the message, which need not be in it literally."""
        content = side.messages[at].get("content")
        if not isinstance(content, str) or not content.strip() or content.strip() in text:
            return False
        other = [*side.messages]
        other[at] = {**other[at], "content": f"{content} {content}"}
        return template.render(other, side.tools, add_generation_prompt=False) == text

    # --- text without a template --------------------------------------------------------------------------------------

    def _plain(self, side: TextExample) -> MaskedTokens:
        """Return BOS where the tokenizer adds one, the prompt, the completion, and one EOS."""
        eos = self.tokenizer.eos_id
        if eos is None:
            raise UserError(
                "the tokenizer must have an end-of-text token, to end a completion, and this one has none: name "
                "eos_token in its tokenizer_config.json"
            )
        found = self._text.split(side.prompt, side.completion)
        if found is None:
            raise UserError(
                f"expected tokens to end where the prompt ends, and one spans {side.prompt[-12:]!r} and "
                f"{side.completion[:12]!r}; move the space between them from the prompt's end to the completion's start"
            )
        before, after = found
        if not len(after) or after[-1] != eos:  # the completion may spell it out itself
            after = np.append(after, eos)
        tokens = np.concatenate([self._text.before, before, after]).astype(np.int32)
        first = len(tokens) - len(after) if self._trained.completion_only else 0
        return MaskedTokens(tokens, np.arange(len(tokens)) >= first)

    # --- every token --------------------------------------------------------------------------------------------------

    def _whole(self, side: ChatExample, template: ChatTemplate, text: str) -> MaskedTokens:
        """Train every token after the prompt, if there is one."""
        tokens = self._text.encode(text)
        mask = np.ones(len(tokens.ids), bool)
        if side.first:
            mask[: tokens.within(0, len(self._prompt(side, template, text))).stop] = False
        return MaskedTokens(tokens.ids, mask)

    def _prompt(self, side: ChatExample, template: ChatTemplate, text: str) -> str:
        prompt = template.render(side.messages[: side.first], side.tools, add_generation_prompt=False)
        if not text.startswith(prompt):
            raise self._refusal("renders a prompt differently once it is answered, so that its end is unknown")
        return prompt

    # --- templates with marks -----------------------------------------------------------------------------------------

    def _by_marks(self, side: ChatExample, template: ChatTemplate) -> list[MaskedTokens]:
        text, spans = template.render_with_spans(side.messages, side.tools)
        if side.first:
            prompt = self._prompt(side, template, text)
            spans = [span for span in spans if span[0] >= len(prompt)]
        elif begins_with_assistant(side):
            spans = spans[len(template.render_with_spans(side.messages[:1], side.tools)[1]) :]
        tokens = self._text.encode(text)
        mask = np.zeros(len(tokens.ids), bool)
        for start, end in spans:
            mask[tokens.within(start, end)] = True
        return [MaskedTokens(tokens.ids, mask)]

    # --- templates without marks --------------------------------------------------------------------------------------

    def _by_prefixes(self, side: ChatExample, template: ChatTemplate, text: str) -> list[MaskedTokens]:
        tokens = self._text.encode(text)
        mask, alone = np.zeros(len(tokens.ids), bool), []
        for at in range(max(side.first, 1), len(side.messages)):  # a first turn answers nothing
            if side.messages[at]["role"] != "assistant":
                continue
            turn = self._turn(side, template, at, text)
            if text.startswith(turn.ended) and tokens.cut_at(len(turn.before)) and tokens.cut_at(len(turn.ended)):
                mask[self._written(tokens.ids, tokens.within(len(turn.before), len(turn.ended)))] = True
            else:
                alone.append(self._alone(turn))
        return [*alone, MaskedTokens(tokens.ids, mask)]

    def _turn(self, side: ChatExample, template: ChatTemplate, at: int, whole: str) -> _Turn:
        before = template.render(side.messages[:at], side.tools, add_generation_prompt=True)
        ended = whole  # the conversation's text ends with its last turn
        if at + 1 < len(side.messages):
            ended = template.render(side.messages[: at + 1], side.tools, add_generation_prompt=False)
        if not ended.startswith(before):
            raise self._refusal(
                "has no generation marks, and does not write an answer after the prompt of add_generation_prompt"
            )
        return _Turn(before, ended)

    def _alone(self, turn: _Turn) -> MaskedTokens:
        found = self._text.split(turn.before, turn.ended[len(turn.before) :])
        if found is None:
            raise self._refusal("has no generation marks, and a token spans the end of the prompt")
        ids = np.concatenate(found)
        mask = np.zeros(len(ids), bool)
        mask[self._written(ids, slice(len(found[0]), len(ids)))] = True
        return MaskedTokens(ids, mask)

    def _written(self, ids: np.ndarray, turn: slice) -> slice:
        """Return a turn up to the token at which a model stops, without what the template writes after it."""
        ends = np.flatnonzero(np.isin(ids[turn], self._ends))
        return slice(turn.start, turn.start + int(ends[-1]) + 1) if len(ends) else turn

    def _refusal(self, why: str) -> UserError:
        return UserError(
            f"{self.name} {why}: put {{% generation %}} .. {{% endgeneration %}} around the assistant's text in a copy "
            "of it, and set data.template to that file",
            param="data.template",
        )


class FilledTemplate:
    """Render a conversation, or its beginning, with the text of its images in the place of their placeholders."""

    def __init__(self, template: ChatTemplate, side: ChatExample, placeholder: str):
        self.source, self._template, self._placeholder = template.source, template, placeholder
        self._count = len(side.messages)
        self._images = [ProcessedImage(image.text, ()) for image in side.images]

    def render(self, messages: Sequence[Mapping[str, Any]], *args: Any, **how: Any) -> str:
        """Return the text of messages: see ChatTemplate."""
        return self._filled(messages, self._template.render(messages, *args, **how)).text

    def render_with_spans(self, messages: Sequence[Mapping[str, Any]], *args: Any) -> tuple[str, list[tuple[int, int]]]:
        """Return the text and the characters of its {% generation %} blocks."""
        text, spans = self._template.render_with_spans(messages, *args)
        filled = self._filled(messages, text)
        return filled.text, [(filled.moved(start), filled.moved(end)) for start, end in spans]

    def _filled(self, messages: Sequence[Mapping[str, Any]], text: str) -> ExpandedText:
        partly = len(messages) < self._count
        return expand(text, self._images, self._placeholder, partly=partly, param="messages")


def _name_of(tool: Any) -> str:
    """Return the name of a tool, or of the tool that is called; empty where it has none."""
    function = tool.get("function", tool) if isinstance(tool, Mapping) else {}
    return str(function.get("name") or "") if isinstance(function, Mapping) else ""


# --- examples that are too long ---------------------------------------------------------------------------------------


class Fitted(NamedTuple):
    """Hold the documents of an example that fit into a row."""

    documents: list[list[MaskedTokens]]  # of each side
    outcome: str


def fit(encoder: ExampleEncoder, sides: Sides, length: int, overlong: str) -> Fitted:
    """Encode an example to at most `length` tokens per document; the two sides of a preference together.

    An example that is too long loses its oldest exchanges, is cut at its end, or is left out (`data.overlong`). An
    exchange is a user's message and everything up to the next one. The system message and the last exchange stay; both
    sides of a preference lose the same exchanges.
    """
    whole = [encoder.encode(side) for side in sides]
    if _fits(whole, length):
        return Fitted(whole, WHOLE)
    if overlong == "skip":
        return Fitted([], LEFT_OUT)
    if overlong == "turns" and (shorter := _fewer_turns(sides)):
        encoded = {0: whole}

        def fitting(dropped: int) -> bool:
            encoded[dropped] = [encoder.encode(side) for side in shorter[dropped - 1]]
            return _fits(encoded[dropped], length)

        # Fewer turns are fewer tokens, so bisection finds the least number to drop.
        dropped = bisect_left(range(1, len(shorter) + 1), True, key=fitting) + 1
        if dropped <= len(shorter):
            return Fitted(encoded[dropped], SHORTENED)
        whole = [encoder.encode(side) for side in shorter[-1]]
    return _cut(whole, length, encoder.image_id)


def _fits(documents: list[list[MaskedTokens]], length: int) -> bool:
    longest = [max((len(document.tokens) for document in side), default=0) for side in documents]
    return sum(longest) <= length


def _fewer_turns(sides: Sides) -> list[Sides]:
    """Return the example without its first exchange, without its first two, ..; empty where there is none to lose."""
    chats = [side for side in sides if isinstance(side, ChatExample)]
    if len(chats) < len(sides):
        return []
    each = [_without_oldest(chat) for chat in chats]
    return [list(one) for one in zip(*each, strict=False)]


def _without_oldest(chat: ChatExample) -> list[ChatExample]:
    roles = [message["role"] for message in chat.messages]
    head = next((i for i, role in enumerate(roles) if role not in ("system", "developer")), 0)
    # What is trained must remain, with the user's message that it answers.
    last = chat.first - 1 if chat.first else max((i for i, role in enumerate(roles) if role == "assistant"), default=0)
    starts = [i for i, role in enumerate(roles) if role == "user" and head < i <= last]
    return [_without(chat, head, i) for i in starts]


def _without(chat: ChatExample, start: int, stop: int) -> ChatExample:
    """Return the chat without some of its messages and their images."""
    messages, first = chat.messages[:start] + chat.messages[stop:], max(0, chat.first - (stop - start))
    kept, dropped = count_images(chat.messages[:start]), count_images(chat.messages[start:stop])
    return replace(chat, messages=messages, first=first, images=chat.images[:kept] + chat.images[kept + dropped :])


def _cut(documents: list[list[MaskedTokens]], length: int, image_id: int) -> Fitted:
    """Cut each document at its end. Of two sides, the shorter keeps at most half of the row, the longer the rest.

    An image that does not fit whole is left out, with everything after it.
    """
    room = [length]
    if len(documents) == 2:
        sizes = [max((len(document.tokens) for document in side), default=0) for side in documents]
        shorter = min(*sizes, length // 2)
        room = [min(size, length - shorter) for size in sizes] if min(sizes) == shorter else [length // 2] * 2
    cut = [
        [shorter for shorter in (shortened(document, most, image_id) for document in side) if shorter.is_trained]
        for side, most in zip(documents, room, strict=True)
    ]
    return Fitted(cut, CUT) if all(cut) else Fitted([], LEFT_OUT)


def shortened(document: MaskedTokens, most: int, image_id: int) -> MaskedTokens:
    """Return the first tokens of a document with the images that are whole among them."""
    at = np.flatnonzero(document.tokens == image_id) if document.images else np.zeros(0, int)
    ends = np.cumsum([0, *(image.tokens for image in document.images)])
    within = int((at < most).sum())
    count = int(np.searchsorted(ends, within, "right")) - 1
    most = most if ends[count] == within else int(at[ends[count]])
    return MaskedTokens(document.tokens[:most], document.mask[:most], document.images[:count])
