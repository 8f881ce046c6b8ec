"""An example's tokens, and which of them the model is taught to write: the assistant's, each turn with its end, unless
a recipe asks for all of them.

Which they are comes from the chat template. One with {% generation %} marks says so itself. Of any other, a turn is
what the template adds to the prompt that a model would be given there (the messages before it, rendered with
add_generation_prompt). Some templates write a turn otherwise once the conversation has gone on (Qwen3 takes the
thinking out): such a turn becomes a document of its own that ends with it, as the model sees it. Nothing is found by
searching text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from dovetail.core.errors import UserError
from dovetail.data.examples import Chat, Text
from dovetail.data.messages import check_roles
from dovetail.data.text_tokens import TextTokens
from dovetail.data.tuning import TrainedTokens
from dovetail.io.chat import ChatTemplate
from dovetail.io.tokenizer import Tokenizer

_MARK = re.compile(r"\{%[-+]?\s*generation\b")


class Trained(NamedTuple):
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


def begins_with_assistant(side: Chat | Text) -> bool:
    """Return whether the first turn is the assistant's. It has no prompt, so it is not trained."""
    return isinstance(side, Chat) and not side.first and side.messages[0]["role"] == "assistant"


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
        self._source, self._text = template, TextTokens(tokenizer)
        self._ends = np.asarray(tokenizer.eos_ids, np.int32)
        self._templates: dict[bool, ChatTemplate] = {}

    def encode(self, side: Chat | Text) -> list[Trained]:
        """Its documents: one, or more where turns are documents of their own; none where nothing is trained."""
        if isinstance(side, Text):
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

    def prompt(self, side: Chat | Text) -> np.ndarray:
        """[n] the tokens that a model is given to go on with."""
        if isinstance(side, Text):
            return np.asarray([*self._text.before, *self._text.encode(side.prompt).ids], np.int32)
        messages = side.messages[: side.first] if side.first else side.messages
        return self._text.encode(self.template(side).render(messages, side.tools)).ids

    def decode(self, ids: np.ndarray) -> str:
        return self._text.backend.decode(ids.tolist(), skip_special_tokens=False)

    def template(self, side: Chat) -> ChatTemplate:
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

    def _check_written(self, side: Chat, template: ChatTemplate, text: str) -> None:
        """Refuse a conversation of which the template leaves out tools, calls or whole messages."""
        remedy = "set data.template to one that does, or leave the record out"
        if side.tools and not all(_name_of(tool) in text for tool in side.tools):
            raise UserError(f"tools: {self.name} does not write them; {remedy}")
        for i, message in enumerate(side.messages):
            if not all(_name_of(call) in text for call in message.get("tool_calls") or ()):
                raise UserError(f"messages[{i}].tool_calls: {self.name} does not write them; {remedy}")
            if message["role"] != "assistant" and self._is_left_out(side, template, i, text):
                raise UserError(f"messages[{i}], of role {message['role']!r}: {self.name} does not write it; {remedy}")

    def _is_left_out(self, side: Chat, template: ChatTemplate, at: int, text: str) -> bool:
        """Whether the text is the same whatever the message says; it need not be there letter by letter."""
        said = side.messages[at].get("content")
        if not isinstance(said, str) or not said.strip() or said.strip() in text:
            return False
        other = [*side.messages]
        other[at] = {**other[at], "content": f"{said} {said}"}
        return template.render(other, side.tools, add_generation_prompt=False) == text

    # --- text without a template --------------------------------------------------------------------------------------

    def _plain(self, side: Text) -> Trained:
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
        return Trained(tokens, np.arange(len(tokens)) >= first)

    # --- every token --------------------------------------------------------------------------------------------------

    def _whole(self, side: Chat, template: ChatTemplate, text: str) -> Trained:
        """All that follows the prompt, where there is one."""
        tokens = self._text.encode(text)
        mask = np.ones(len(tokens.ids), bool)
        if side.first:
            mask[: tokens.within(0, len(self._prompt(side, template, text))).stop] = False
        return Trained(tokens.ids, mask)

    def _prompt(self, side: Chat, template: ChatTemplate, text: str) -> str:
        prompt = template.render(side.messages[: side.first], side.tools, add_generation_prompt=False)
        if not text.startswith(prompt):
            raise self._refusal("writes a prompt otherwise once it is answered, so that its end cannot be told")
        return prompt

    # --- templates with marks -----------------------------------------------------------------------------------------

    def _by_marks(self, side: Chat, template: ChatTemplate) -> list[Trained]:
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
        return [Trained(tokens.ids, mask)]

    # --- templates without --------------------------------------------------------------------------------------------

    def _by_prefixes(self, side: Chat, template: ChatTemplate, text: str) -> list[Trained]:
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
        return [*alone, Trained(tokens.ids, mask)]

    def _turn(self, side: Chat, template: ChatTemplate, at: int, whole: str) -> _Turn:
        before = template.render(side.messages[:at], side.tools, add_generation_prompt=True)
        ended = whole  # the conversation's text, which the last turn ends
        if at + 1 < len(side.messages):
            ended = template.render(side.messages[: at + 1], side.tools, add_generation_prompt=False)
        if not ended.startswith(before):
            raise self._refusal(
                "has no generation marks, and does not write an answer after the prompt of add_generation_prompt"
            )
        return _Turn(before, ended)

    def _alone(self, turn: _Turn) -> Trained:
        found = self._text.split(turn.before, turn.ended[len(turn.before) :])
        if found is None:
            raise self._refusal("has no generation marks, and a token reaches from the prompt into the answer")
        ids = np.concatenate(found)
        mask = np.zeros(len(ids), bool)
        mask[self._written(ids, slice(len(found[0]), len(ids)))] = True
        return Trained(ids, mask)

    def _written(self, ids: np.ndarray, turn: slice) -> slice:
        """Up to the token at which a model stops: what the template writes after it, such as a new line, is not its."""
        ends = np.flatnonzero(np.isin(ids[turn], self._ends))
        return slice(turn.start, turn.start + int(ends[-1]) + 1) if len(ends) else turn

    def _refusal(self, why: str) -> ValueError:
        return ValueError(
            f"{self.name} {why}: put {{% generation %}} .. {{% endgeneration %}} around what the assistant writes in a "
            "copy of it, and set data.template to that file"
        )
