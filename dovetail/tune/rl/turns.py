"""Turns of an episode, between tokens and messages: parse the policy's turns, encode the observations between them.

Sampled tokens are never tokenised again. To find the tokens that follow a policy's turn, the conversation is rendered
with a placeholder in place of each policy's turn: the text after the last placeholder is the chat template's, up to the
start of the next turn.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from dovetail.core.errors import RecipeError, UserError
from dovetail.data.example_encoder import ExampleEncoder
from dovetail.data.examples import ChatExample, TextExample, placed_images
from dovetail.data.messages import Messages, say
from dovetail.data.pictures import Picture
from dovetail.io.tokenizer import Tokenizer
from dovetail.io.tool_formats.events import ToolCall
from dovetail.io.tool_formats.formats import ReasoningFormat, ToolFormat, format_for, reasoning_for, special_ids
from dovetail.io.tool_formats.grammar import grammar_for
from dovetail.io.tool_formats.stream import parse
from dovetail.io.tool_formats.tools import spell

PLACEHOLDER = chr(0xFDD0)  # a Unicode noncharacter, which occurs in no text
CONTEXT = 32  # tokens before a turn that show whether they open the reasoning
Tools = list[dict[str, Any]]


@dataclass(frozen=True)
class PolicyTurn:
    """A turn of the policy, parsed as the server parses a completion.

    Attributes:
        text: The whole text.
        content: The text without reasoning and tool calls.
        reasoning: The reasoning.
        calls: Calls of the environment's tools.
    """

    text: str
    content: str
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()

    @property
    def message(self) -> dict[str, Any]:
        """The turn as a message of a conversation."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [_call_message(call) for call in self.calls]
        return message

    @property
    def placeholder(self) -> dict[str, Any]:
        """A message of the same form without text. One call stands for several: some templates refuse more."""
        if not self.calls:
            return say("assistant", PLACEHOLDER)
        call = {"id": self.calls[0].id, "type": "function", "function": {"name": PLACEHOLDER, "arguments": {}}}
        return say("assistant", "") | {"tool_calls": [call]}


def _call_message(call: ToolCall) -> dict[str, Any]:
    arguments = json.loads(call.arguments) if call.complete else call.arguments
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


# --- tokens to turns --------------------------------------------------------------------------------------------------


class TurnParser:
    """Parse the policy's tokens into turns.

    Args:
        tokenizer: The policy's tokenizer.
        template: The source of the chat template, which shows the formats of tool calls and reasoning; "": plain text.
    """

    def __init__(self, tokenizer: Tokenizer, template: str):
        names = [tokenizer.token(token) for token in tokenizer.special_ids]
        self._tokenizer = tokenizer
        self.tools: ToolFormat | None = format_for(template, names) if template else None
        self.reasoning: ReasoningFormat | None = reasoning_for(template, names) if template else None

    def has_end(self, tokens: np.ndarray) -> bool:
        """Return whether the turn ends with an end token; a turn that ends with a stop string does not."""
        return len(tokens) > 0 and int(tokens[-1]) in self._tokenizer.eos_ids

    def parse(
        self, before: np.ndarray, tokens: np.ndarray, tools: Sequence[dict[str, Any]], number: int, truncated: bool
    ) -> PolicyTurn:
        """Return the turn that the tokens are.

        Args:
            before: The tokens of the episode before the turn.
            tokens: The tokens of the turn.
            tools: The tools that the prompt shows.
            number: Of the turn. It is part of the ids of calls: some templates write the ids, and random ones would
                differ when a run is repeated.
            truncated: Whether the turn was cut off at its length limit.
        """
        tool_format = self.tools if tools else None
        keep = frozenset(special_ids(self._tokenizer, tool_format, self.reasoning).values())
        text = self._text(tokens[:-1] if self.has_end(tokens) else tokens, keep)
        count = itertools.count()
        parsed = parse(
            text, tool_format, self.reasoning, truncated=truncated, tools=tools,
            in_reasoning=self._is_in_reasoning(before), new_id=lambda: f"call{number:02d}{next(count):03d}",
        )  # fmt: skip
        return PolicyTurn(text, parsed.content, parsed.reasoning, parsed.calls)

    def grammar(self, before: np.ndarray, tools: Sequence[dict[str, Any]], choice: str, parallel: bool) -> str:
        """Return the server's grammar for a turn with these tools and this tool_choice (auto: as with strict tools)."""
        assert self.tools is not None, "only a chat template shows tools"
        special = special_ids(self._tokenizer, self.tools, self.reasoning)
        inside = bool(self._is_in_reasoning(before))
        return grammar_for(
            self.tools, tools, choice, parallel, special=special, reasoning=self.reasoning, in_reasoning=inside
        )  # fmt: skip

    def _text(self, tokens: np.ndarray, keep: frozenset[int]) -> str:
        stream = self._tokenizer.stream(keep=keep)
        return "".join(map(stream.push, tokens.tolist())) + stream.flush()

    def _is_in_reasoning(self, before: np.ndarray) -> bool | None:
        """Return whether the tokens before the turn open the reasoning; None: the format's default."""
        if self.reasoning is None:
            return None
        stream = self._tokenizer.stream(skip_special=False)
        shown = ("".join(map(stream.push, before[-CONTEXT:].tolist())) + stream.flush()).rstrip()
        if self.reasoning.opened_by(shown):
            return True
        return False if shown.endswith(self.reasoning.close) else None


# --- messages to tokens -----------------------------------------------------------------------------------------------


class TurnEncoder:
    """Encode the prompt of an episode and the observations between the policy's turns by the chat template."""

    def __init__(self, encoder: ExampleEncoder):
        self._encoder, self._tokenizer = encoder, encoder.tokenizer
        self._parsers: dict[tuple[bool, bool], TurnParser] = {}
        self._writes_end: dict[bool, bool] = {}  # whether the template ends a turn, by whether the turn has calls
        self._describes_tools: bool | None = None  # whether the system message must describe the tools

    def prompt(self, example: ChatExample | TextExample) -> list[int]:
        """Return the tokens up to the policy's first turn."""
        if isinstance(example, ChatExample) and example.tools and self._must_describe(example.tools):
            messages = spell(example.messages, example.tools)
            example = replace(example, messages=messages, tools=None, first=len(messages))
        return [int(token) for token in self._encoder.prompt(example)]

    def text(self, observation: str) -> list[int]:
        """Return the tokens of an observation in an episode of plain text."""
        return self._encoder.text(observation)

    def with_pictures(self, observation: Messages) -> tuple[Messages, tuple[Picture, ...]]:
        """Return the messages of an observation with bare image parts, and their images read and processed."""
        found = self._encoder.pictured(placed_images(ChatExample(observation)), Path())
        assert isinstance(found, ChatExample)
        return found.messages, found.images

    def parser(self, is_chat: bool, tools: Tools) -> TurnParser:
        """Return the parser of the policy's turns."""
        key = is_chat, bool(tools)
        if key not in self._parsers:
            example = ChatExample([say("user", "")], tools or None)
            template = self._encoder.template(example).source if is_chat else ""
            self._parsers[key] = TurnParser(self._tokenizer, template)
        return self._parsers[key]

    def between(
        self,
        before: Messages,
        observation: Messages,
        tools: Tools,
        has_end: bool,
        images: Sequence[Picture] = (),
    ) -> list[int]:
        """Return the tokens from the end of the policy's last turn to the beginning of its next.

        Args:
            before: The conversation, with a placeholder for each of the policy's turns.
            observation: The messages after the last turn.
            tools: The tools that the prompt shows.
            has_end: Whether the sampled turn has its end token; after a stop string the template adds it.
            images: Those of the observation.
        """
        if PLACEHOLDER in json.dumps(observation, ensure_ascii=False):
            raise UserError("an observation must not contain the noncharacter U+FDD0", param="observation")
        tail = self._tail([*before, *observation], tools, continues=True, images=images)
        end = self._end_index(tail)
        if end is None or not self._template_ends(before, tools):
            return tail
        return tail[end + 1 :] if has_end else tail[end:]

    def check(self, example: ChatExample, turns: Sequence[PolicyTurn]) -> None:
        """Raise a RecipeError for a template that does not let the policy's turns be separated from the rest."""
        for turn in turns:
            before, tools = [*example.messages, turn.placeholder], example.tools or []
            result = say("tool", "0") | {"name": "f", "tool_call_id": "call00000"} if turn.calls else say("user", "0")
            alone = self._tail(before, tools, continues=False)
            followed = self._tail([*before, result], tools, continues=True)
            end = self._end_index(alone)
            if end is None and turn.calls:
                raise self._refusal("writes no end token after a turn of tool calls")
            if end is not None and followed[: end + 1] != alone[: end + 1]:
                raise self._refusal("ends an assistant's turn differently once the conversation continues")

    def _template_ends(self, before: Messages, tools: Tools) -> bool:
        has_calls = "tool_calls" in before[-1]
        if has_calls not in self._writes_end:
            tail = self._tail(before, tools, continues=False)
            self._writes_end[has_calls] = self._end_index(tail) is not None
        return self._writes_end[has_calls]

    def _tail(self, messages: Messages, tools: Tools, continues: bool, images: Sequence[Picture] = ()) -> list[int]:
        """Return the tokens after the last placeholder."""
        _, separator, tail = self._render(messages, tools, continues).rpartition(PLACEHOLDER)
        if not separator:
            raise self._refusal("does not write the assistant's text")
        return self._encoder.text(tail, images) if tail else []

    def _render(self, messages: Messages, tools: Tools, continues: bool) -> str:
        if tools and self._must_describe(tools):
            messages, tools = spell(messages, tools), []
        given = tools or None
        return self._encoder.template(ChatExample(messages, given)).render(
            messages, given, add_generation_prompt=continues
        )

    def _must_describe(self, tools: Tools) -> bool:
        """Return whether the template ignores tools. As in the server, the system message then describes them."""
        if self._describes_tools is None:
            question = [say("user", "?")]
            shown = self._encoder.template(ChatExample(question, tools)).render(question, tools)
            self._describes_tools = shown == self._encoder.template(ChatExample(question)).render(question)
            tool_format = self.parser(True, tools).tools
            if self._describes_tools and (tool_format is None or tool_format.name != "hermes"):
                raise self._refusal("does not read tools, though the model has its own format of tool calls")
        return self._describes_tools

    def _end_index(self, tokens: Sequence[int]) -> int | None:
        """Return the index of the first end token."""
        return next((i for i, token in enumerate(tokens) if token in self._tokenizer.eos_ids), None)

    def _refusal(self, problem: str) -> RecipeError:
        return RecipeError(
            f"{self._encoder.name} {problem}, so an environment cannot add messages between the policy's turns: set "
            "data.template to a corrected copy of it, or give prompts of plain text",
            param="data.template",
        )


def with_observation(example: ChatExample | TextExample, observation: Any) -> ChatExample | TextExample:
    """Return a prompt with an environment's first observation after it."""
    if not observation:
        return example
    if isinstance(example, TextExample):
        return replace(example, prompt=example.prompt + observation_text(observation))
    shown = placed_images(ChatExample(observation_messages(observation)))
    messages = [*example.messages, *shown.messages]
    return replace(example, messages=messages, first=len(messages), images=example.images + shown.images)


def observation_messages(observation: Any) -> Messages:
    """Return an observation as messages; text is a user message."""
    if isinstance(observation, str):
        return [say("user", observation)]
    return [dict(message) for message in observation or ()]


def observation_text(observation: Any) -> str:
    """Return an observation in an episode of plain text, which must be text."""
    if not isinstance(observation, str):
        raise UserError(
            f"an observation after a prompt of plain text must be text; got {type(observation).__name__}: give the "
            "prompt as messages",
            param="observation",
        )
    return observation
