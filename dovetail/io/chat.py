"""Render chat templates.

From messages to the text that a model was trained on, as Hugging Face's templates write it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

from dovetail.core.errors import UserError
from dovetail.io import sandbox

# Unicode's noncharacters are reserved for use inside a program and do not occur in text.
_MARKS = [chr(code) for code in range(0xFDD0, 0xFDF0)]
# Names under which clients send a message's reasoning; templates read the first (gpt-oss's reads `thinking`).
_REASONING = ("reasoning_content", "thinking", "reasoning")
# Types of a part of a message's content that is an image: Hugging Face's, and OpenAI's two. Templates know the first.
IMAGE_PARTS = ("image", "image_url", "input_image")


class ChatTemplate:
    """Hold a Jinja chat template and the special tokens that it may name (bos_token, eos_token, ...).

    Rendering is sandboxed (see `sandbox`): a template that reaches outside, or fails, raises a UserError with its line.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None):
        if not isinstance(source, str):
            raise UserError(
                f"expected a chat template as text, got {type(source).__name__}; pass its Jinja source",
                param="chat_template",
            )
        self.source = source
        self.special_tokens = dict(special_tokens or {})
        sandbox.compile_source(source)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """Return the text of a prompt.

        Args:
            messages: The conversation.
            tools: Tools in OpenAI's format.
            add_generation_prompt: End with the beginning of the assistant's message.
            continue_final_message: End right after the last message's content, for the model to continue it.
            kwargs: Further names that the template can read (documents, enable_thinking, ...).
        """
        names = self._names(messages, tools, add_generation_prompt, kwargs)
        if not continue_final_message:
            return sandbox.render(self.source, names, sandbox.Rendering())
        if add_generation_prompt:
            raise UserError(
                "expected one of add_generation_prompt and continue_final_message, got both: "
                "a new turn cannot begin while the last one goes on; set add_generation_prompt=False",
                param="continue_final_message",
            )
        return self._render_open(names)

    def render_with_spans(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = False,
        **kwargs: Any,
    ) -> tuple[str, list[tuple[int, int]]]:
        """Return the text and the [start, end) characters of its {% generation %} blocks; no spans if it has none.

        It renders twice, the second time with marks around the blocks: positions are then right wherever the text ends
        up (in a macro, a captured block), and a template that changes its blocks afterwards is detected.
        """
        names = self._names(messages, tools, add_generation_prompt, kwargs)
        plain = sandbox.Rendering()
        text = sandbox.render(self.source, names, plain)
        start, end = _unused_marks(text)
        marked = sandbox.render(self.source, names, sandbox.Rendering((start, end), plain.now))
        found, spans = _take_spans(marked, start, end)
        if found != text:
            raise UserError(
                "expected the text of {% generation %} blocks to reach the prompt as it is, but this chat template "
                "changes it afterwards (a trim or a length around the block?); move the tag inside that expression",
                param="chat_template",
            )
        return text, spans

    def _names(self, messages: Any, tools: Any, add_generation_prompt: bool, kwargs: dict) -> dict[str, Any]:
        messages = checked_messages(messages)
        return {
            "documents": None,
            **self.special_tokens,
            **{name: _plain(value, name) for name, value in kwargs.items()},
            "messages": _in_parts(messages) if reads_parts(self.source) else messages,
            "tools": checked_tools(tools),
            "add_generation_prompt": add_generation_prompt,
        }

    def _render_open(self, names: dict[str, Any]) -> str:
        last = names["messages"][-1]
        key, content = "content", last.get("content")
        if isinstance(content, list) and content and "text" in content[-1]:  # a part of a message with images
            last, key = content[-1], "text"
        if not isinstance(last.get(key), str):
            raise UserError(
                f"continue_final_message needs text in the last message's content, got {content!r}",
                param="continue_final_message",
            )
        mark = _unused_marks(last[key])[0]
        # The space tells whether the template trims contents; if so, the cut text must be trimmed as well.
        last[key] += mark + " "
        head, found, tail = sandbox.render(self.source, names, sandbox.Rendering()).rpartition(mark)
        if not found:
            message = "continue_final_message: this chat template does not write the last message's content"
            raise UserError(message, param="continue_final_message")
        return head if tail.startswith(" ") else head.rstrip()


def checked_messages(messages: Any) -> list[dict[str, Any]]:
    """Return a plain copy of `messages`; raise UserError for a wrong one."""
    if not isinstance(messages, list | tuple) or not messages:
        raise UserError(
            f"expected a list of at least one message, got {messages!r:.80}; {_MESSAGE_HELP}", param="messages"
        )
    return [_checked_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


_MESSAGE_HELP = "a message is a dict such as {'role': 'user', 'content': 'Hello'}"


def _checked_message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise _wrong_message(where, "a dict", type(message).__name__)
    if not isinstance(message.get("role"), str):
        raise _wrong_message(where, "a 'role' that is a string", repr(message.get("role")))
    content = message.get("content")
    if content is None and not message.get("tool_calls"):
        raise _wrong_message(where, "'content' or 'tool_calls'", f"keys {sorted(message)}")
    if not isinstance(content, str | list | tuple | Mapping | None):
        raise _wrong_message(where, "'content' to be text or a list of parts", type(content).__name__)
    if isinstance(content, list | tuple):
        message = {**message, "content": [{"type": "image"} if is_image(part) else part for part in content]}
    plain = _plain(message, where)
    reasoning = next((plain[name] for name in _REASONING if plain.get(name) is not None), None)
    return plain if reasoning is None else {"thinking": reasoning} | plain | {"reasoning_content": reasoning}


def is_image(part: Any) -> bool:
    """Return whether a part of a message's content is an image."""
    return isinstance(part, Mapping) and part.get("type") in IMAGE_PARTS


def has_images(messages: Any) -> bool:
    """Return whether a message has an image part; False for what `checked_messages` refuses."""
    contents = (
        [m.get("content") for m in messages if isinstance(m, Mapping)] if isinstance(messages, list | tuple) else []
    )
    return any(is_image(part) for content in contents if isinstance(content, list | tuple) for part in content)


def image_source(part: Mapping[str, Any]) -> Any:
    """Return the image, URL or path that an image part brings; None if it has none."""
    found = next((part[name] for name in (*IMAGE_PARTS[:2], "url", "path") if part.get(name) is not None), None)
    return found.get("url") if isinstance(found, Mapping) else found


@lru_cache(maxsize=64)
def reads_parts(source: str) -> bool:
    """Return whether a template leaves out a content that is text: those of some vision models read lists of parts."""
    if "image" not in source:
        return False
    text = _MARKS[0]
    try:
        as_text, as_parts = (
            sandbox.render(source, {"messages": messages, "tools": None, "documents": None}, sandbox.Rendering())
            for messages in ([{"role": "user", "content": text}], _in_parts([{"role": "user", "content": text}]))
        )
    except UserError:  # it asks for more than this message: it is rendered as it is
        return False
    return text not in as_text and text in as_parts


def _in_parts(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with each text as a list of one part."""
    return [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        if isinstance(message.get("content"), str)
        else message
        for message in messages
    ]


def _wrong_message(where: str, expected: str, got: str) -> UserError:
    return UserError(f"{where}: expected {expected}, got {got}; {_MESSAGE_HELP}", param="messages")


def checked_tools(tools: Any) -> list[dict[str, Any]] | None:
    """Return a plain copy of `tools`, which are dicts in OpenAI's format."""
    if tools is None:
        return None
    if not isinstance(tools, list | tuple):
        raise UserError(f"expected a list of tools, got {type(tools).__name__}; {_TOOL_HELP}", param="tools")
    for i, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise UserError(f"tools[{i}]: expected a dict, got {type(tool).__name__}; {_TOOL_HELP}", param="tools")
        function = tool.get("function")
        named = isinstance(function, Mapping) and isinstance(function.get("name"), str)
        if tool.get("type", "function") == "function" and not named:
            got = f"keys {sorted(tool)}; {_TOOL_HELP}"
            raise UserError(f"tools[{i}]: expected a 'function' with a 'name', got {got}", param="tools")
    return _plain(tools, "tools")


_TOOL_HELP = (
    "a tool is a dict such as {'type': 'function', 'function': {'name': 'add', 'description': '...', 'parameters': "
    "{'type': 'object', 'properties': {...}}}}"
)


def _plain(value: Any, where: str) -> Any:
    """Return a copy made of JSON types alone: other objects have methods that a template must not call."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {_plain(key, where): _plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{where}[{i}]") for i, item in enumerate(value)]
    raise UserError(
        f"{where}: expected what JSON can hold (text, number, true/false, null, list, dict), "
        f"got {type(value).__name__}; convert it first",
        param=re.split(r"[.\[]", where)[0],
    )


def _unused_marks(text: str) -> tuple[str, str]:
    for start, end in pairwise(_MARKS):
        if start not in text and end not in text:
            return start, end
    raise UserError("expected text, got every one of Unicode's noncharacters U+FDD0 to U+FDEF; remove them")


def _take_spans(marked: str, start: str, end: str) -> tuple[str, list[tuple[int, int]]]:
    """Remove the marks and return where they were; of nested blocks, the outermost counts."""
    pieces: list[str] = []
    spans: list[tuple[int, int]] = []
    length = depth = begin = 0
    for piece in re.split(f"([{start}{end}])", marked):
        if piece == start:
            begin = begin if depth else length
            depth += 1
        elif piece == end:
            depth -= 1
            if depth == 0:
                spans.append((begin, length))
        else:
            pieces.append(piece)
            length += len(piece)
    return "".join(pieces), spans
