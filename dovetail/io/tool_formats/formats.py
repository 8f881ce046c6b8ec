"""Formats of tool calls and reasoning: one small table each, and the choice of a model's format.

To add a format, add a table; if its arguments have their own notation, add that to `notation`.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dovetail.core.errors import UserError
from dovetail.io.tool_formats.envelope import Envelope
from dovetail.io.tool_formats.named import ARGUMENTS, KEY, NAME, SPACE, ArgumentReader, Head, Named, Parameters
from dovetail.io.tool_formats.notation import GEMMA, JSON, PYTHON, Notation, ValueReader
from dovetail.io.tool_formats.tools import types_of

if TYPE_CHECKING:
    from dovetail.io.tokenizer import Tokenizer


SHORT_ID_LENGTH = 9  # letters and digits


def call_id() -> str:
    """Return a new id as OpenAI's API has them: `call_` and 24 characters."""
    return "call_" + secrets.token_hex(12)


def short_id() -> str:
    """Return a new id of 9 letters and digits, the only ids that Mistral's templates accept."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(SHORT_ID_LENGTH))


@dataclass(frozen=True)
class ToolFormat:
    """Describe how a model writes tool calls."""

    name: str
    opens: tuple[str, ...] = ()  # markers before a call, or before a list of them
    closes: tuple[str, ...] = ()  # markers after it
    bare: tuple[str, ...] = ()  # how a call may begin without a marker; then only a known function is a call
    envelope: bool = False  # a call may be {"name": ..., "arguments": {...}}
    heads: tuple[Head, ...] = ()  # a call may be a name and then its arguments ...
    notation: Notation | None = JSON  # ... in this notation; None: as <parameter=...> tags
    inner: tuple[str, ...] = ()  # other special texts of the format, which must reach the parser
    new_id: Callable[[], str] = call_id

    @property
    def markers(self) -> tuple[str, ...]:
        """Return the texts that the parser must see: a detokenizer keeps them even if they are special tokens."""
        return tuple(marker for marker in self.opens + self.closes + self.inner if len(marker) > 1)

    def call(self, first: str, certain: bool, parameters: Mapping[str, Mapping[str, Any]]) -> Envelope | Named | None:
        """Return the reader of a call that begins with the character `first`; None if no call can begin so."""
        if first == "{":
            return Envelope(certain) if self.envelope else None
        return Named(self.heads, lambda name: self._arguments(parameters.get(name))) if self.heads else None

    def _arguments(self, schema: Mapping[str, Any] | None) -> ArgumentReader:
        return Parameters(lambda key: types_of(schema, key)) if self.notation is None else ValueReader(self.notation)


@dataclass(frozen=True)
class ReasoningFormat:
    """Describe how a model marks its reasoning."""

    name: str
    open: str
    close: str
    tokens: tuple[str, ...] = ()  # the tokens in `open` and `close`, where they are not these two themselves
    starts_inside: bool = False  # whether the prompt opens it, unless the caller says otherwise
    anywhere: bool = False  # whether it may open after the answer has begun; else the marker is text there

    @property
    def markers(self) -> tuple[str, ...]:
        """Return the texts that a detokenizer must keep."""
        return self.tokens or (self.open, self.close)

    def opened_by(self, prompt: str) -> bool:
        """Return whether this prompt ends with the opening marker, so that the output starts inside the reasoning."""
        return prompt.rstrip().endswith(self.open)


_BEGIN_CALLS, _END_CALLS = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_BEGIN_CALL, _END_CALL, _SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
_DEEPSEEK_HEADS = (
    Head("function", _SEPARATOR, NAME, SPACE, "```json", SPACE, ARGUMENTS, "{"),
    Head("function", _SEPARATOR, NAME, SPACE, ARGUMENTS, "{"),
    Head(NAME, _SEPARATOR, SPACE, ARGUMENTS, "{"),
)
_MISTRAL_HEADS = (
    Head(NAME, "[ARGS]", SPACE, ARGUMENTS, "{"),
    Head(NAME, "[CALL_ID]", KEY, "[ARGS]", SPACE, ARGUMENTS, "{"),
    Head(NAME, SPACE, ARGUMENTS, "{"),
)


def _deepseek(name: str) -> ToolFormat:
    opens, closes = (_BEGIN_CALLS, _BEGIN_CALL), (_END_CALL, _END_CALLS)
    return ToolFormat(name, opens, closes, heads=_DEEPSEEK_HEADS, inner=(_SEPARATOR,))


def _mistral(name: str) -> ToolFormat:
    inner = ("[ARGS]", "[CALL_ID]")
    return ToolFormat(name, ("[TOOL_CALLS]",), envelope=True, heads=_MISTRAL_HEADS, inner=inner, new_id=short_id)


# Formats of one family are read alike; they differ in what `grammar_for` writes.
TOOL_FORMATS = {
    each.name: each
    for each in (
        # <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>
        ToolFormat("hermes", ("<tool_call>",), ("</tool_call>",), envelope=True),
        # <tool_call><function=f><parameter=a>1</parameter></function></tool_call>; the outer tag is sometimes left out
        ToolFormat(
            "qwen3_coder", ("<tool_call>",), ("</tool_call>",), bare=("<function=",), envelope=True,
            heads=(Head("<function=", NAME, ">", ARGUMENTS),), notation=None,
        ),
        # {"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}
        ToolFormat("llama3_json", ("<|python_tag|>",), bare=("{",), envelope=True),
        # [f(a=1, b="x"), g()]; where a template asks for JSON, these models write Llama 3's
        ToolFormat(
            "llama4_pythonic", ("<|python_start|>",), ("<|python_end|>", "]"), bare=("[", "{"), envelope=True,
            heads=(
                Head(NAME, ARGUMENTS, "(", SPACE, ")"),
                Head(NAME, ARGUMENTS, "(", SPACE, KEY, SPACE, "="),
            ), notation=PYTHON,
        ),
        _mistral("mistral"),  # [TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]
        _mistral("mistral_v11"),  # [TOOL_CALLS]f[ARGS]{"a": 1}, from the eleventh version of their tokenizer on
        _deepseek("deepseek_v3"),  # ...function<｜tool▁sep｜>f\n```json\n{"a": 1}\n```...
        _deepseek("deepseek_v31"),  # ...f<｜tool▁sep｜>{"a": 1}...
        # <|tool_call>call:f{a:1,b:<|"|>x<|"|>}<tool_call|>
        ToolFormat(
            "gemma4", ("<|tool_call>",), ("<tool_call|>",), heads=(Head("call:", SPACE, NAME, SPACE, ARGUMENTS, "{"),),
            notation=GEMMA, inner=('<|"|>',),
        ),
    )
}  # fmt: skip

REASONING_FORMATS = {
    each.name: each
    for each in (
        ReasoningFormat("qwen3", "<think>", "</think>"),
        ReasoningFormat("deepseek_r1", "<think>", "</think>", starts_inside=True),
        ReasoningFormat("gemma4", "<|channel>thought", "<channel|>", ("<|channel>", "<channel|>"), anywhere=True),
        ReasoningFormat("mistral", "[THINK]", "[/THINK]"),
    )
}


def format_for(template: str = "", tokens: Collection[str] = (), *, name: str | None = None) -> ToolFormat | None:
    """Return the format of a model's tool calls.

    It is the one named ("none" for None), else that of the chat template, else that of the special tokens (fine-tunes
    keep those of their base model, so the template comes first), else Hermes's, which most models have seen in
    training.
    """
    if name is not None:
        return _named("tool call parser", "tool_call_parser", name, TOOL_FORMATS)
    return TOOL_FORMATS[_tool_format_in(template) or _tool_format_in("\n".join(tokens)) or "hermes"]


def reasoning_for(
    template: str = "", tokens: Collection[str] = (), *, name: str | None = None
) -> ReasoningFormat | None:
    """Return the format of a model's reasoning, chosen as in `format_for`.

    None if neither template nor tokens show one.

    Whether a prompt has already opened it is seen in the prompt (`ReasoningFormat.opened_by`), not in the template.
    """
    if name is not None:
        return _named("reasoning parser", "reasoning_parser", name, REASONING_FORMATS)
    return REASONING_FORMATS.get(_reasoning_format_in(template) or _reasoning_format_in("\n".join(tokens)))


def special_ids(tokenizer: Tokenizer, *formats: ToolFormat | ReasoningFormat | None) -> dict[str, int]:
    """Return the markers of the formats that are special tokens of this model, with their ids."""
    special = {tokenizer.token(token): token for token in tokenizer.special_ids}
    return {marker: special[marker] for each in formats if each for marker in each.markers if marker in special}


def _tool_format_in(text: str) -> str:
    if "<|tool_call>" in text:
        return "gemma4"
    if _BEGIN_CALLS in text:
        return "deepseek_v3" if "```json" in text else "deepseek_v31"
    if "[TOOL_CALLS]" in text:
        return "mistral_v11" if "[ARGS]" in text else "mistral"
    if "<|python_start|>" in text:
        return "llama4_pythonic"
    if "<tool_call>" in text:
        return "qwen3_coder" if "<function=" in text else "hermes"
    # A part of the sentence that tells Llama 3 how to answer: the smaller models' templates have no python_tag.
    return "llama3_json" if "<|python_tag|>" in text or '{"name": function name, "parameters"' in text else ""


def _reasoning_format_in(text: str) -> str:
    if "<|channel>" in text:
        return "gemma4"
    if "[THINK]" in text:
        return "mistral"
    if "<think>" in text:
        return "qwen3"
    # A template that only removes reasoning is that of the first R1 models, which may leave out the opening.
    return "deepseek_r1" if "</think>" in text else ""


def _named(what: str, param: str, name: str, formats: Mapping[str, Any]) -> Any:
    if name != "none" and name not in formats:
        raise UserError(f"the {what} must be one of {', '.join(sorted(formats))} or none, got {name!r}", param=param)
    return formats.get(name)
