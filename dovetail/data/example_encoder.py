"""An example's tokens, and which of them the model is taught to write: the assistant's, each turn with its end, unless
a recipe asks for all of them.

Which they are comes from the chat template. One with {% generation %} marks says so itself. Of any other, a turn is
what the template adds to the prompt that a model would be given there (the messages before it, rendered with
add_generation_prompt). Some templates write a turn otherwise once the conversation has gone on (Qwen3 takes the
thinking out): such a turn becomes a document of its own that ends with it, as the model sees it. Nothing is found by
searching text.

Examples that are longer than a row: they lose their oldest turns, are cut at their end, or are left out.

An exchange is a user's message and all that follows it up to the next one. The system message stays, and so does the
last exchange; both sides of a preference lose the same ones.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dovetail.core.errors import UserError
from dovetail.data.encoder import OffsetTokenizer
from dovetail.data.examples import ChatExample, TextExample
from dovetail.data.messages import check_roles
from dovetail.data.settings import TrainedTokens, TuningData
from dovetail.io.chat import ChatTemplate
from dovetail.io.tokenizer import Tokenizer

_MARK = re.compile(r"\{%[-+]?\s*generation\b")


class MaskedTokens(NamedTuple):
    """One document."""

    tokens: np.ndarray  # [n] int32
    mask: np.ndarray  # [n] bool: what is trained

    @property
    def teaches(self) -> bool:
        """A document's first token has nothing before it to be predicted from."""
        return bool(self.mask[1:].any())


class _Turn(NamedTuple):
    before: str  # the prompt that the assistant answers
    ended: str  # the same, with its answer


def begins_with_assistant(side: ChatExample | TextExample) -> bool:
    """Return whether the first turn is the assistant's. It has no prompt, so it is not trained."""
    return isinstance(side, ChatExample) and not side.first and side.messages[0]["role"] == "assistant"


def _name_of(tool: Any) -> str:
    """Return the name of a tool, or of the tool that is called; empty where it has none."""
    function = tool.get("function", tool) if isinstance(tool, Mapping) else {}
    return str(function.get("name") or "") if isinstance(function, Mapping) else ""


class ExampleEncoder:
    """template: the Jinja source to use in place of the tokenizer's own; name: what to call it in a message."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: str | None = None,
        name: str = "the model's chat template",
        trained: TrainedTokens = TrainedTokens(),
    ):
        self.tokenizer, self.name, self._trained = tokenizer, name, trained
        self._source, self._text = template, OffsetTokenizer(tokenizer)
        self._ends = np.asarray(tokenizer.eos_ids, np.int32)
        self._templates: dict[bool, ChatTemplate] = {}

    def encode(self, side: ChatExample | TextExample) -> list[MaskedTokens]:
        """Its documents: one, or more where turns are documents of their own; none where nothing is trained."""
        if isinstance(side, TextExample):
            return [self._plain(side)]
        template = self.template(side)
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
        return [document for document in found if document.teaches]

    def prompt(self, side: ChatExample | TextExample) -> np.ndarray:
        """[n] the tokens that a model is given to go on with."""
        if isinstance(side, TextExample):
            return np.asarray([*self._text.before, *self._text.encode(side.prompt).ids], np.int32)
        messages = side.messages[: side.first] if side.first else side.messages
        return self._text.encode(self.template(side).render(messages, side.tools)).ids

    def decode(self, ids: np.ndarray) -> str:
        return self._text.backend.decode(ids.tolist(), skip_special_tokens=False)

    def template(self, side: ChatExample) -> ChatTemplate:
        """That of its messages: one with tools may have another."""
        with_tools = side.tools is not None
        if self._source is None and not self.tokenizer.chat_templates:
            raise UserError(
                "the model's tokenizer has no chat template, so messages cannot be written: set data.template=FILE to "
                "a file with one (Jinja), or give prompt and completion as text"
            )
        if with_tools not in self._templates:
            self._templates[with_tools] = self.tokenizer.chat(side.tools, self._source)
        return self._templates[with_tools]

    def _check_written(self, side: ChatExample, template: ChatTemplate, text: str) -> None:
        """Refuse a conversation of which the template leaves out tools, calls or whole messages."""
        remedy = "set data.template to one that does, or leave the record out"
        if side.tools and not all(_name_of(tool) in text for tool in side.tools):
            raise UserError(f"tools: {self.name} does not write them; {remedy}")
        for i, message in enumerate(side.messages):
            if not all(_name_of(call) in text for call in message.get("tool_calls") or ()):
                raise UserError(f"messages[{i}].tool_calls: {self.name} does not write them; {remedy}")
            if message["role"] != "assistant" and self._is_left_out(side, template, i, text):
                raise UserError(f"messages[{i}], of role {message['role']!r}: {self.name} does not write it; {remedy}")

    def _is_left_out(self, side: ChatExample, template: ChatTemplate, at: int, text: str) -> bool:
        """Whether the text is the same whatever the message says; it need not be there letter by letter."""
        said = side.messages[at].get("content")
        if not isinstance(said, str) or not said.strip() or said.strip() in text:
            return False
        other = [*side.messages]
        other[at] = {**other[at], "content": f"{said} {said}"}
        return template.render(other, side.tools, add_generation_prompt=False) == text

    # --- text without a template --------------------------------------------------------------------------------------

    def _plain(self, side: TextExample) -> MaskedTokens:
        """BOS where the tokenizer adds one, the prompt, the completion, one EOS."""
        eos = self.tokenizer.eos_id
        if eos is None:
            raise UserError(
                "expected a tokenizer with an end-of-text token, to end a completion with, and this one has none; name "
                "eos_token in its tokenizer_config.json"
            )
        found = self._text.split(side.prompt, side.completion)
        if found is None:
            raise UserError(
                f"expected tokens to end where the prompt does, and one reaches from {side.prompt[-12:]!r} into "
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
        """All that follows the prompt, where there is one."""
        tokens = self._text.encode(text)
        mask = np.ones(len(tokens.ids), bool)
        if side.first:
            mask[: tokens.within(0, len(self._prompt(side, template, text))).stop] = False
        return MaskedTokens(tokens.ids, mask)

    def _prompt(self, side: ChatExample, template: ChatTemplate, text: str) -> str:
        prompt = template.render(side.messages[: side.first], side.tools, add_generation_prompt=False)
        if not text.startswith(prompt):
            raise self._refusal("writes a prompt otherwise once it is answered, so that its end cannot be told")
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

    # --- templates without --------------------------------------------------------------------------------------------

    def _by_prefixes(self, side: ChatExample, template: ChatTemplate, text: str) -> list[MaskedTokens]:
        tokens = self._text.encode(text)
        mask, alone = np.zeros(len(tokens.ids), bool), []
        for at in range(max(side.first, 1), len(side.messages)):  # a turn before any other answers nothing
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
        ended = whole  # the conversation's text, which the last turn ends
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
            raise self._refusal("has no generation marks, and a token reaches from the prompt into the answer")
        ids = np.concatenate(found)
        mask = np.zeros(len(ids), bool)
        mask[self._written(ids, slice(len(found[0]), len(ids)))] = True
        return MaskedTokens(ids, mask)

    def _written(self, ids: np.ndarray, turn: slice) -> slice:
        """Up to the token at which a model stops: what the template writes after it, such as a new line, is not its."""
        ends = np.flatnonzero(np.isin(ids[turn], self._ends))
        return slice(turn.start, turn.start + int(ends[-1]) + 1) if len(ends) else turn

    def _refusal(self, why: str) -> ValueError:
        return ValueError(
            f"{self.name} {why}: put {{% generation %}} .. {{% endgeneration %}} around what the assistant writes in a "
            "copy of it, and set data.template to that file"
        )


WHOLE, SHORTENED, CUT, LEFT_OUT = "whole", "shortened", "cut", "left out"
Sides = Sequence[ChatExample | TextExample]


class Fitted(NamedTuple):
    documents: list[list[MaskedTokens]]  # of each side
    outcome: str


def fit(encoder: ExampleEncoder, sides: Sides, length: int, overlong: str) -> Fitted:
    """The documents of an example in at most `length` tokens each; those of a preference together."""
    whole = [encoder.encode(side) for side in sides]
    if fits(whole, length):
        return Fitted(whole, WHOLE)
    if overlong == "skip":
        return Fitted([], LEFT_OUT)
    if overlong == "turns" and (shorter := _fewer_turns(sides)):
        encoded = {0: whole}

        def fitting(dropped: int) -> bool:
            encoded[dropped] = [encoder.encode(side) for side in shorter[dropped - 1]]
            return fits(encoded[dropped], length)

        # Fewer turns are fewer tokens, so the least number to drop is found by halving.
        dropped = bisect_left(range(1, len(shorter) + 1), True, key=fitting) + 1
        if dropped <= len(shorter):
            return Fitted(encoded[dropped], SHORTENED)
        whole = [encoder.encode(side) for side in shorter[-1]]
    return _cut(whole, length)


def fits(documents: list[list[MaskedTokens]], length: int) -> bool:
    longest = [max((len(document.tokens) for document in side), default=0) for side in documents]
    return sum(longest) <= length


def _fewer_turns(sides: Sides) -> list[Sides]:
    """The example without its first exchange, without its first two, ..; empty where there is none to lose."""
    chats = [side for side in sides if isinstance(side, ChatExample)]
    if len(chats) < len(sides):
        return []
    each = [_without_oldest(chat) for chat in chats]
    return [list(one) for one in zip(*each, strict=False)]


def _without_oldest(chat: ChatExample) -> list[ChatExample]:
    roles = [message["role"] for message in chat.messages]
    head = next((i for i, role in enumerate(roles) if role not in ("system", "developer")), 0)
    # What is trained must still be there, with the user's message that it answers.
    last = chat.first - 1 if chat.first else max((i for i, role in enumerate(roles) if role == "assistant"), default=0)
    starts = [i for i, role in enumerate(roles) if role == "user" and head < i <= last]
    return [
        replace(chat, messages=chat.messages[:head] + chat.messages[i:], first=max(0, chat.first - (i - head)))
        for i in starts
    ]


def _cut(documents: list[list[MaskedTokens]], length: int) -> Fitted:
    """Each at its end. Of two sides the shorter keeps half of the row or what it needs, and the longer has the rest."""
    room = [length]
    if len(documents) == 2:
        sizes = [max((len(document.tokens) for document in side), default=0) for side in documents]
        shorter = min(*sizes, length // 2)
        room = [min(size, length - shorter) for size in sizes] if min(sizes) == shorter else [length // 2] * 2
    cut = [
        [document for document in (MaskedTokens(t[:most], m[:most]) for t, m in side) if document.teaches]
        for side, most in zip(documents, room, strict=True)
    ]
    return Fitted(cut, CUT) if all(cut) else Fitted([], LEFT_OUT)


def example_encoder(
    settings: TuningData, tokenizer: Tokenizer, trained: TrainedTokens = TrainedTokens()
) -> ExampleEncoder:
    """With the template that the settings name, or the tokenizer's own."""
    template = template_source(settings)
    if template is None:
        return ExampleEncoder(tokenizer, trained=trained)
    name = f"the chat template {Path(settings.template).expanduser()}"
    return ExampleEncoder(tokenizer, template, name, trained)


def template_source(settings: TuningData) -> str | None:
    """Return the Jinja source of `data.template`; None: the tokenizer's own template is used."""
    if not settings.template:
        return None
    path = Path(settings.template).expanduser()
    if not path.is_file():
        raise UserError(f"template must be a file with a chat template's Jinja source; there is no {str(path)!r}")
    return path.read_text(encoding="utf-8")
