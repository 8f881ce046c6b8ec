"""Grammars that make a model call a tool: for tool_choice "required" or a function's name, and for strict tools."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dovetail.core.errors import RequestError
from dovetail.core.json_schema import closed, resolve
from dovetail.io.tool_formats.formats import ReasoningFormat, ToolFormat
from dovetail.io.tool_formats.tools import parameters_by_name, types_of

# As templates write JSON. Flexible white space would let the model write white space without end.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_COMPACT = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}


class _Lark:
    """Write a grammar in llguidance's Lark notation.

    `special` has the ids of special tokens by text. They are matched as tokens, since ordinary tokens with the same
    text mean something else to the model.
    """

    def __init__(self, special: Mapping[str, int]):
        self._special = dict(special)
        self._rules: list[str] = []

    def rule(self, body: str, options: str = "") -> str:
        """Add a rule and return its name."""
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{options}: {body}")
        return name

    def text(self, text: str) -> str:
        """Match exactly this text."""
        if not self._special:
            return _literal(text)
        pieces = re.split(f"({'|'.join(map(re.escape, self._special))})", text)
        return " ".join(
            f"<[{self._special[piece]}]>" if piece in self._special else _literal(piece) for piece in pieces if piece
        )

    def until(self, end: str) -> str:
        """Match any text up to and including the first `end`."""
        if end in self._special:
            return f"{self.rule('/(?s:.*)/')} {self.text(end)}"
        return self.rule("/(?s:.*)/", f"[suffix={_literal(end)}]")

    def without(self, texts: Sequence[str]) -> str:
        """Match any text that contains none of these; special tokens are never text."""
        written = [re.escape(text).replace("/", r"\/") for text in texts if text not in self._special]
        if not written:
            return self.rule("/(?s:.*)/")
        name = f"T{len(self._rules)}"  # only a terminal, which is in capitals, can be an intersection
        self._rules.append(f"{name}: /(?s:.*)/ & ~/(?s:.*)({'|'.join(written)})(?s:.*)/")
        return name

    def json(self, schema: Mapping[str, Any], compact: bool = False) -> str:
        """Match JSON that follows a schema, without properties that it does not list."""
        return f"%json {json.dumps({**closed(schema), 'x-guidance': _COMPACT if compact else _SPACING})}"

    def one_of(self, bodies: list[str]) -> str:
        return self.rule(" | ".join(bodies))

    def source(self, start: str) -> str:
        return "\n".join([f"start: {start}", *self._rules]) + "\n"


def _literal(text: str) -> str:
    return json.dumps(text)  # a JSON string is a Lark string


# --- arguments that are not JSON: one field per declared parameter, in the schema's order ---

_Schema = Mapping[str, Any]
_COUNTED = ("minItems", "maxItems", "uniqueItems", "prefixItems", "contains")
_COMBINED = ("$ref", "anyOf", "oneOf", "allOf", "not", "if", "patternProperties", "dependentRequired")


@dataclass(frozen=True)
class _FieldStyle:
    before: str  # before a field's value; {key} is its name
    between: str
    value: Callable[[_Lark, _Schema, _Schema], str]  # from the field's schema and the document it is part of


def _are_declared(schema: _Schema) -> bool:
    """Return whether the schema declares every argument."""
    properties = schema.get("properties")
    if not isinstance(properties, Mapping) or any(word in schema for word in _COMBINED):
        return False
    return bool(properties) or not schema.get("additionalProperties")


def _write_fields(lark: _Lark, style: _FieldStyle, schema: _Schema, root: _Schema | None = None) -> str:
    """Return the rule of all fields in the schema's order; optional ones may be missing.

    `rest` matches what may follow a field, `none` what may come before the first one.
    """
    root = schema if root is None else root
    between = lark.text(style.between) + " " if style.between else ""
    rest = none = lark.rule('""')
    for key, part in reversed(schema["properties"].items()):
        value = style.value(lark, part if isinstance(part, Mapping) else {}, root)
        field = lark.rule(f"{lark.text(style.before.replace('{key}', key))} {value}")
        if key in schema.get("required", ()):
            rest, none = lark.rule(f"{between}{field} {rest}"), lark.rule(f"{field} {rest}")
        else:
            rest, none = lark.rule(f"({between}{field})? {rest}"), lark.rule(f"{field} {rest} | {none}")
    return none


# --- values in each style ---------------------------------------------------------------------------------------------


def _tag_value(lark: _Lark, schema: _Schema, root: _Schema) -> str:
    """Match a string followed by a newline and the closing tag, or another value as JSON."""
    end = "\n</parameter>\n"
    if _listed(schema, root):
        values = [value if isinstance(value, str) else json.dumps(value) for value in _listed(schema, root)]
        return lark.one_of([lark.text(value + end) for value in values])
    if "string" in _types(schema, root):
        return lark.until(end)
    return f"{_json(lark, schema, root)} {lark.text(end)}"


def _python_value(lark: _Lark, schema: _Schema, root: _Schema) -> str:
    return '("True" | "False")' if _types(schema, root) == {"boolean"} else _json(lark, schema, root)


def _gemma_value(lark: _Lark, schema: _Schema, root: _Schema) -> str:
    quote = '<|"|>'
    types = _types(schema, root)
    if types == {"string"} and _listed(schema, root):
        return lark.one_of([lark.text(quote + value + quote) for value in _listed(schema, root)])
    if types == {"string"}:
        return f"{lark.text(quote)} {lark.until(quote)}"
    if types == {"object"} and _are_declared(schema):
        return f'"{{" {_write_fields(lark, _GEMMA, schema, root)} "}}"'
    if types == {"array"} and isinstance(schema.get("items"), Mapping) and not any(word in schema for word in _COUNTED):
        item = lark.rule(_gemma_value(lark, schema["items"], root))
        return f'"[" ({item} ("," {item})*)? "]"'
    return _json(lark, schema, root, compact=True)


def _listed(schema: _Schema, root: _Schema) -> list:
    """Return the values that the schema lists, if it does."""
    schema = resolve(schema, root)
    return schema.get("enum", [schema["const"]] if "const" in schema else [])


def _types(schema: _Schema, root: _Schema) -> frozenset[str]:
    return types_of({**root, "properties": {"": schema}}, "")


def _json(lark: _Lark, schema: _Schema, root: _Schema, compact: bool = False) -> str:
    definitions = {word: root[word] for word in ("$defs", "definitions") if word in root}
    return lark.json({**definitions, **schema}, compact)


_TAGS = _FieldStyle("<parameter={key}>\n", "", _tag_value)
_PYTHON = _FieldStyle("{key}=", ", ", _python_value)
_GEMMA = _FieldStyle("{key}:", ",", _gemma_value)


# --- calls ---


@dataclass(frozen=True)
class _Written:
    """Describe how a format's calls are written in the models' templates; {name} stands for the function's name."""

    before: str  # before its arguments
    after: str
    first: str = ""  # before the first call
    between: str = ""
    last: str = ""
    fields: _FieldStyle | None = None  # how arguments are written; None: as JSON


_WRITTEN = {
    "hermes": _Written('<tool_call>\n{"name": "{name}", "arguments": ', "}\n</tool_call>", between="\n"),
    "qwen3_coder": _Written(
        "<tool_call>\n<function={name}>\n", "</function>\n</tool_call>", between="\n", fields=_TAGS
    ),
    "llama3_json": _Written('{"name": "{name}", "parameters": ', "}", between="; "),
    "llama4_pythonic": _Written("{name}(", ")", "[", ", ", "]", _PYTHON),
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
    "gemma4": _Written("<|tool_call>call:{name}{", "}<tool_call|>", fields=_GEMMA),
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
    """Return the Lark grammar of an output that consists of calls of these tools.

    Arguments follow the tools' JSON schemas, closed (see core.json_schema). In qwen3_coder, llama4_pythonic and gemma4
    they come in the schema's order, and only declared ones; in qwen3_coder and gemma4, whose strings have no reliable
    quotes, a string's length, pattern and format are not enforced.

    Args:
        tool_format: The format of the calls.
        tools: The tools, as in OpenAI's requests.
        choice: "required" for one or, if `parallel`, several calls of any tools; a function's name, or OpenAI's
            {"type": "function", "function": {"name": ...}}, for one call of that function; "auto" for any text, or text
            and then calls: whatever opens like a call must be one.
        parallel: Whether several calls are allowed.
        special: The ids of the formats' markers that are special tokens (see `special_ids`).
        reasoning: Allow a block of reasoning first.
        in_reasoning: The prompt has opened the reasoning, so its end must come.

    Raises:
        RequestError: `choice` names no tool, or is "auto" with a format whose calls have no opening marker.
    """
    lark = _Lark(special or {})
    allowed = _allowed(parameters_by_name(tools), choice)
    several = parallel and choice in ("required", "auto")
    if choice == "auto":
        thinking = _thinking(lark, reasoning, True) if in_reasoning else ""  # else it is ordinary text
        return lark.source(thinking + _text_or_calls(lark, tool_format, allowed, several))
    calls = _calls(lark, tool_format.name, allowed, several)
    return lark.source(_thinking(lark, reasoning, in_reasoning) + calls)


def _allowed(parameters: dict[str, Mapping[str, Any]], choice: str | Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    if not parameters:
        raise RequestError(f"`tool_choice` {choice!r} requires `tools`, got none", param="tool_choice")
    if choice in ("required", "auto"):
        return parameters
    function = choice.get("function", choice) if isinstance(choice, Mapping) else {"name": choice}
    name = function.get("name") if isinstance(function, Mapping) else None
    if name not in parameters:
        message = f"`tool_choice` must be 'required' or name one of {sorted(parameters)}, got {choice!r}"
        raise RequestError(message, param="tool_choice")
    return {name: parameters[name]}


def _text_or_calls(lark: _Lark, tool_format: ToolFormat, allowed: dict[str, Mapping[str, Any]], several: bool) -> str:
    """Match text, or text that ends with the opening marker and the rest of a call: one lexer reads both."""
    written = _WRITTEN[tool_format.name]
    opening = next((m for m in tool_format.opens if (written.first or written.before).startswith(m)), None)
    if opening is None:
        raise RequestError(
            f"strict is not supported with tool_choice auto: a call in {tool_format.name} has no opening marker",
            param="tools",
        )
    calls = _calls(lark, tool_format.name, allowed, several, opening)
    return lark.rule(f"{lark.without((*tool_format.opens, *tool_format.bare))} | {lark.until(opening)} {calls}")


def _calls(lark: _Lark, name: str, allowed: dict[str, Mapping[str, Any]], several: bool, opened: str = "") -> str:
    """Match one call or several; `opened` is the beginning of the first call that is matched already."""
    written = _WRITTEN[name]
    call = lark.one_of([_call(lark, name, function, schema) for function, schema in allowed.items()])
    first = call
    if opened and not written.first:
        first = lark.one_of([_call(lark, name, function, schema, opened) for function, schema in allowed.items()])
    more = f"({_text(lark, written.between)}{call})*" if several else ""
    head = _text(lark, written.first.removeprefix(opened))
    return f"{head}{first} {more} {_text(lark, written.last)}".rstrip()


def _call(lark: _Lark, name: str, function: str, schema: Mapping[str, Any], opened: str = "") -> str:
    written = _WRITTEN[name]
    if written.fields is None or not _are_declared(schema):
        written = _AS_JSON.get(name, written)
        arguments = lark.json(schema)
    else:
        arguments = _write_fields(lark, written.fields, schema)
    before = _text(lark, written.before.removeprefix(opened).replace("{name}", function))
    return f"{before}{arguments} {_text(lark, written.after)}".rstrip()


def _thinking(lark: _Lark, reasoning: ReasoningFormat | None, inside: bool) -> str:
    if reasoning is None:
        return ""
    space = lark.rule(r"/[ \n]{1,4}/")
    block = f"{lark.until(reasoning.close)} {space}? "
    return block if inside else f"({lark.text(reasoning.open)} {block})? "


def _text(lark: _Lark, text: str) -> str:
    return lark.text(text) + " " if text else ""
