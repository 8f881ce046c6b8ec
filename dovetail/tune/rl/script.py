"""The script: what stands in an episode besides the policy's own tokens, as tokens of the model's chat template.

What was sampled is never tokenised again. To find what follows a turn of the policy, the conversation is rendered with
a mark in the place of all that it wrote: what comes after the last mark is the template's, up to where the next turn
begins.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dovetail.core.errors import UserError
from dovetail.data.example_encoder import ExampleEncoder
from dovetail.data.examples import ChatExample, TextExample
from dovetail.data.messages import Messages, say
from dovetail.io.tool_formats.tools import spell
from dovetail.tune.rl.answer import Answer, Listener

MARK = chr(0xFDD0)  # one of Unicode's noncharacters, which are in no text
Tools = list[dict[str, Any]]


class Script:
    def __init__(self, encoder: ExampleEncoder):
        self._encoder, self._tokenizer = encoder, encoder.tokenizer
        self._listeners: dict[tuple[bool, bool], Listener] = {}
        self._ends: dict[bool, bool] = {}  # whether the template ends a turn; one of calls may differ
        self._spelled: bool | None = None  # whether the tools must be described in the system's message

    # --- the parts of an episode --------------------------------------------------------------------------------------

    def prompt(self, side: ChatExample | TextExample) -> list[int]:
        """Up to where the policy begins."""
        if isinstance(side, ChatExample) and side.tools and self._spells(side.tools):
            messages = spell(side.messages, side.tools)
            side = ChatExample(messages, None, len(messages))
        return [int(token) for token in self._encoder.prompt(side)]

    def text(self, said: str) -> list[int]:
        """What is said where there is no template."""
        return self._tokenizer.encode(said, add_special=False)

    def listener(self, is_chat: bool, tools: Tools) -> Listener:
        """Reads the policy's turns."""
        key = is_chat, bool(tools)
        if key not in self._listeners:
            shown = ChatExample([say("user", "")], tools or None)
            template = self._encoder.template(shown).source if is_chat else ""
            self._listeners[key] = Listener(self._tokenizer, template)
        return self._listeners[key]

    def after(self, before: Messages, said: Messages, tools: Tools, ended: bool) -> list[int]:
        """The tokens from the end of the policy's last turn to the beginning of its next.

        before: the conversation, with a `stand_in` for each of the policy's turns; said: what it is answered. ended:
        whether the turn has its end token; a stop string leaves that to the template.
        """
        if MARK in json.dumps(said, ensure_ascii=False):
            raise UserError("what an environment says must be text, without the noncharacter U+FDD0; leave that out")
        tail = self._tail([*before, *said], tools, goes_on=True)
        end = self._end_of(tail)
        if end is None or not self._ends_turns(before, tools):
            return tail
        return tail[end + 1 :] if ended else tail[end:]

    def check(self, side: ChatExample, answers: Sequence[Answer]) -> None:
        """ValueError where this template does not let the policy's turns be told from the rest."""
        for answer in answers:
            before, tools = [*side.messages, stand_in(answer)], side.tools or []
            said = say("tool", "0") | {"name": "f", "tool_call_id": "call00000"} if answer.calls else say("user", "0")
            alone = self._tail(before, tools, goes_on=False)
            followed = self._tail([*before, said], tools, goes_on=True)
            end = self._end_of(alone)
            if end is None and answer.calls:
                raise self._refusal("writes no end token after a turn of tool calls, so that its end cannot be told")
            if end is not None and followed[: end + 1] != alone[: end + 1]:
                raise self._refusal("ends an assistant's turn otherwise once the conversation goes on")

    def _ends_turns(self, before: Messages, tools: Tools) -> bool:
        of_calls = "tool_calls" in before[-1]
        if of_calls not in self._ends:
            self._ends[of_calls] = self._end_of(self._tail(before, tools, goes_on=False)) is not None
        return self._ends[of_calls]

    # --- the template -------------------------------------------------------------------------------------------------

    def _tail(self, messages: Messages, tools: Tools, goes_on: bool) -> list[int]:
        """What follows the last mark."""
        _, found, tail = self._render(messages, tools, goes_on).rpartition(MARK)
        if not found:
            raise self._refusal("does not write what the assistant says")
        return self._tokenizer.encode(tail, add_special=False) if tail else []

    def _render(self, messages: Messages, tools: Tools, goes_on: bool) -> str:
        if tools and self._spells(tools):
            messages, tools = spell(messages, tools), []
        given = tools or None
        return self._encoder.template(ChatExample(messages, given)).render(
            messages, given, add_generation_prompt=goes_on
        )

    def _spells(self, tools: Tools) -> bool:
        """Whether the template does not read tools. As the server does, they are then told in the system's message."""
        if self._spelled is None:
            asked = [say("user", "?")]
            shown = self._encoder.template(ChatExample(asked, tools)).render(asked, tools)
            self._spelled = shown == self._encoder.template(ChatExample(asked)).render(asked)
            wanted = self.listener(True, tools).tools
            if self._spelled and (wanted is None or wanted.name != "hermes"):
                raise self._refusal("does not read tools, though the model has a form of its own for calling them")
        return self._spelled

    def _end_of(self, tokens: Sequence[int]) -> int | None:
        """Where the first end token is."""
        return next((i for i, token in enumerate(tokens) if token in self._tokenizer.eos_ids), None)

    def _refusal(self, why: str) -> ValueError:
        return ValueError(
            f"{self._encoder.name} {why}: an environment cannot speak between the policy's turns; set data.template to "
            "a copy of it that can, or give prompts that are plain text"
        )


def stand_in(answer: Answer) -> dict[str, Any]:
    """Of an answer, its form alone. One call stands for several: some templates refuse more."""
    if not answer.calls:
        return say("assistant", MARK)
    call = {"id": answer.calls[0].id, "type": "function", "function": {"name": MARK, "arguments": {}}}
    return say("assistant", "") | {"tool_calls": [call]}


def with_said(side: ChatExample | TextExample, said: Any) -> ChatExample | TextExample:
    """A prompt, and what an environment says after it."""
    if not said:
        return side
    if isinstance(side, TextExample):
        return replace(side, prompt=side.prompt + said_text(said))
    messages = [*side.messages, *said_messages(said)]
    return replace(side, messages=messages, first=len(messages))


def said_messages(said: Any) -> Messages:
    return [say("user", said)] if isinstance(said, str) else [dict(message) for message in said or ()]


def said_text(said: Any) -> str:
    if not isinstance(said, str):
        raise UserError(
            f"after a prompt that is plain text an environment says text; got {type(said).__name__}: give the prompt "
            "as messages"
        )
    return said
