"""An answer: what the policy wrote in one turn, taken apart as the server would: reasoning, content, tool calls."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dovetail.io.tokenizer import Tokenizer
from dovetail.io.tool_formats.events import ToolCall
from dovetail.io.tool_formats.formats import ReasoningFormat, ToolFormat, format_for, reasoning_for, special_ids
from dovetail.io.tool_formats.grammar import grammar_for
from dovetail.io.tool_formats.stream import parse

CONTEXT = 32  # tokens before an answer that tell whether they open the reasoning


@dataclass(frozen=True)
class Answer:
    text: str  # all of it
    content: str  # without reasoning and calls
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()  # of the environment's tools

    @property
    def message(self) -> dict[str, Any]:
        """As a conversation holds it."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [_as_message(call) for call in self.calls]
        return message


def _as_message(call: ToolCall) -> dict[str, Any]:
    arguments = json.loads(call.arguments) if call.complete else call.arguments
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


class Listener:
    """Makes answers of tokens. `template`: the chat template's source, which shows the formats; "": plain text."""

    def __init__(self, tokenizer: Tokenizer, template: str):
        names = [tokenizer.token(token) for token in tokenizer.special_ids]
        self._tokenizer = tokenizer
        self.tools: ToolFormat | None = format_for(template, names) if template else None
        self.reasoning: ReasoningFormat | None = reasoning_for(template, names) if template else None

    def ended(self, tokens: np.ndarray) -> bool:
        """Whether the policy chose to end its turn: a stop string leaves the end token to others."""
        return len(tokens) > 0 and int(tokens[-1]) in self._tokenizer.eos_ids

    def hear(
        self, before: np.ndarray, tokens: np.ndarray, tools: Sequence[dict[str, Any]], turn: int, truncated: bool
    ) -> Answer:
        """`before`: the tokens that it follows. `turn` numbers the calls: ids that chance chose would differ when a run
        is repeated, and some templates write them.
        """
        wanted = self.tools if tools else None
        keep = frozenset(special_ids(self._tokenizer, wanted, self.reasoning).values())
        text = self._text(tokens[:-1] if self.ended(tokens) else tokens, keep)
        count = itertools.count()
        found = parse(
            text, wanted, self.reasoning, truncated=truncated, tools=tools, in_reasoning=self._is_inside(before),
            new_id=lambda: f"call{turn:02d}{next(count):03d}",
        )  # fmt: skip
        return Answer(text, found.content, found.reasoning, found.calls)

    def grammar(self, before: np.ndarray, tools: Sequence[dict[str, Any]], choice: str, parallel: bool) -> str:
        """That keeps an answer to what can be heard of these tools: the server's, of its tool_choice (auto: with strict
        tools).
        """
        assert self.tools is not None, "tools are shown by a chat template"
        special = special_ids(self._tokenizer, self.tools, self.reasoning)
        inside = bool(self._is_inside(before))
        return grammar_for(
            self.tools, tools, choice, parallel, special=special, reasoning=self.reasoning, in_reasoning=inside
        )  # fmt: skip

    def _text(self, tokens: np.ndarray, keep: frozenset[int]) -> str:
        stream = self._tokenizer.stream(keep=keep)
        return "".join(map(stream.push, tokens.tolist())) + stream.flush()

    def _is_inside(self, before: np.ndarray) -> bool | None:
        """Whether the reasoning was opened before the answer; None: as its format says."""
        if self.reasoning is None:
            return None
        stream = self._tokenizer.stream(skip_special=False)
        shown = ("".join(map(stream.push, before[-CONTEXT:].tolist())) + stream.flush()).rstrip()
        if self.reasoning.opened_by(shown):
            return True
        return False if shown.endswith(self.reasoning.close) else None
