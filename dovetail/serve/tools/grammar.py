"""Grammars that make a model call a tool: for tool_choice "required", a function's name, and strict tools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dovetail.core.errors import UserError
from dovetail.serve.tools import grammar_fields
from dovetail.serve.tools.formats import ReasoningFormat, ToolFormat
from dovetail.serve.tools.lark import Lark
from dovetail.serve.tools.schema import parameters_by_name


@dataclass(frozen=True)
class _Written:
    """How a format's calls are written, as in the models' templates. {name} is the function's."""

    before: str  # before its arguments
    after: str
    first: str = ""  # before the first call
    between: str = ""
    last: str = ""
    fields: grammar_fields.Style | None = None  # how arguments are written; None: as JSON


_WRITTEN = {
    "hermes": _Written('<tool_call>\n{"name": "{name}", "arguments": ', "}\n</tool_call>", between="\n"),
    "qwen3_coder": _Written(
        "<tool_call>\n<function={name}>\n", "</function>\n</tool_call>", between="\n", fields=grammar_fields.TAGS
    ),
    "llama3_json": _Written('{"name": "{name}", "parameters": ', "}", between="; "),
    "llama4_pythonic": _Written("{name}(", ")", "[", ", ", "]", grammar_fields.PYTHON),
    "mistral": _Written('{"name": "{name}", "arguments": ', "}", "[TOOL_CALLS][", ", ", "]"),
    "mistral_v11": _Written("[TOOL_CALLS]{name}[ARGS]", ""),
    "deepseek_v3": _Written(
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n", "\n```<｜tool▁call▁end｜>",
        "<｜tool▁calls▁begin｜>", "\n", "<｜tool▁calls▁end｜>",
    ),
    "deepseek_v31": _Written(
        "<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>", "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁begin｜>", "", "<｜tool▁calls▁end｜>",
    ),
    "gemma4": _Written("<|tool_call>call:{name}{", "}<tool_call|>", fields=grammar_fields.GEMMA),
}  # fmt: skip
# Where a tool's arguments are not a set of declared ones, there are no fields to write: the call is then written in
# the format's own wrapper with JSON arguments, which the format's parser reads as well.
_AS_JSON = {
    "qwen3_coder": _WRITTEN["hermes"],
    "llama4_pythonic": _Written('{"name": "{name}", "parameters": ', "}", "[", ", ", "]"),
    "gemma4": _Written("<|tool_call>call:{name}", "<tool_call|>"),
}


def grammar_for(
    tool_format: ToolFormat,
    tools: Sequence[Mapping[str, Any]],
    choice: str | Mapping[str, Any] = "required",
    parallel: bool = True,
    *,
    special: Mapping[str, int] | None = None,
    reasoning: ReasoningFormat | None = None,
    in_reasoning: bool = False,
) -> str:
    """The Lark grammar, for `Structured(grammar=...)`, of an output that is calls of these tools and nothing else.

    choice: "required" for one or, if `parallel`, several calls of any tools; a function's name, or OpenAI's
    {"type": "function", "function": {"name": ...}}, for one call of that function; "auto" for any text, or text and
    then calls: whatever opens as a call must be one (ValueError for a format whose calls have no opening marker).
    special: the ids of those of the formats' markers that are special tokens (`special_ids` finds them).
    reasoning: lets a block of reasoning come first; with `in_reasoning`, its end must come, since the prompt opened it.

    Arguments follow the tools' JSON schemas, closed (see core.json_schema). In qwen3_coder, llama4_pythonic and gemma4
    they come in the schema's order and only the declared ones do; in qwen3_coder and gemma4, whose strings have no
    quotes to count on, a string's length, pattern and format are not enforced.
    """
    lark = Lark(special or {})
    allowed = _allowed(parameters_by_name(tools), choice)
    several = parallel and choice in ("required", "auto")
    if choice == "auto":
        thinking = _thinking(lark, reasoning, True) if in_reasoning else ""  # else it is ordinary text
        return lark.source(thinking + _text_or_calls(lark, tool_format, allowed, several))
    calls = _calls(lark, tool_format.name, allowed, several)
    return lark.source(_thinking(lark, reasoning, in_reasoning) + calls)


def _allowed(parameters: dict[str, Mapping[str, Any]], choice: str | Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    if not parameters:
        raise UserError(f"tool_choice {choice!r} needs tools to choose from, and there are none; send 'tools'")
    if choice in ("required", "auto"):
        return parameters
    function = choice.get("function", choice) if isinstance(choice, Mapping) else {"name": choice}
    name = function.get("name") if isinstance(function, Mapping) else None
    if name not in parameters:
        raise UserError(
            f"expected tool_choice to be 'required' or to name one of the tools {sorted(parameters)}, got {choice!r}"
        )
    return {name: parameters[name]}


def _text_or_calls(lark: Lark, form: ToolFormat, allowed: dict[str, Mapping[str, Any]], several: bool) -> str:
    """One lexer reads text and calls, so the text ends with the opening marker and the call follows without it."""
    written = _WRITTEN[form.name]
    opening = next((m for m in form.opens if (written.first or written.before).startswith(m)), None)
    if opening is None:
        raise UserError(f"strict is not supported with tool_choice auto: a call in {form.name} has no opening marker")
    calls = _calls(lark, form.name, allowed, several, opening)
    return lark.rule(f"{lark.without((*form.opens, *form.bare))} | {lark.until(opening)} {calls}")


def _calls(lark: Lark, name: str, allowed: dict[str, Mapping[str, Any]], several: bool, opened: str = "") -> str:
    """`opened`: the beginning of the first call that is written already."""
    written = _WRITTEN[name]
    call = lark.one_of([_call(lark, name, function, schema) for function, schema in allowed.items()])
    first = call
    if opened and not written.first:
        first = lark.one_of([_call(lark, name, function, schema, opened) for function, schema in allowed.items()])
    more = f"({_text(lark, written.between)}{call})*" if several else ""
    head = _text(lark, written.first.removeprefix(opened))
    return f"{head}{first} {more} {_text(lark, written.last)}".rstrip()


def _call(lark: Lark, name: str, function: str, schema: Mapping[str, Any], opened: str = "") -> str:
    written = _WRITTEN[name]
    if written.fields is None or not grammar_fields.are_declared(schema):
        written = _AS_JSON.get(name, written)
        arguments = lark.json(schema)
    else:
        arguments = grammar_fields.write(lark, written.fields, schema)
    before = _text(lark, written.before.removeprefix(opened).replace("{name}", function))
    return f"{before}{arguments} {_text(lark, written.after)}".rstrip()


def _thinking(lark: Lark, reasoning: ReasoningFormat | None, inside: bool) -> str:
    if reasoning is None:
        return ""
    space = lark.rule(r"/[ \n]{1,4}/")
    block = f"{lark.until(reasoning.close)} {space}? "
    return block if inside else f"({lark.text(reasoning.open)} {block})? "


def _text(lark: Lark, text: str) -> str:
    return lark.text(text) + " " if text else ""
