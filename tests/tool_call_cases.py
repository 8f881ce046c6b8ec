"""Tool calls in every format, as the models' chat templates write them, for the tests of parsers and grammars."""

from __future__ import annotations

import itertools
import json
from typing import Any

from dovetail.io.tool_formats.events import merge
from dovetail.io.tool_formats.stream import StreamParser

PROPERTIES = {
    "text": {"type": "string"},
    "count": {"type": "integer"},
    "ratio": {"type": "number"},
    "flag": {"type": "boolean"},
    "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    "data": {"$ref": "#/$defs/anything"},
    "items": {"type": ["array", "null"]},
}
PARAMETERS = {"type": "object", "properties": PROPERTIES, "$defs": {"anything": {"type": "object"}}}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in ("look_up", "run-it.now")
]

# --- the formats, written as the models' templates write them ---------------------------------------------------------

Call = tuple[str, dict[str, Any]]


def dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def hermes(calls: list[Call]) -> str:
    return "\n".join(f'<tool_call>\n{{"name": "{n}", "arguments": {dumps(a)}}}\n</tool_call>' for n, a in calls)


def qwen3_coder(calls: list[Call]) -> str:
    def parameter(key: str, value: Any) -> str:
        return f"<parameter={key}>\n{value if isinstance(value, str) else dumps(value)}\n</parameter>\n"

    bodies = ["".join(itertools.starmap(parameter, a.items())) for _, a in calls]
    calls_and_bodies = zip(calls, bodies, strict=True)
    return "\n".join(
        f"<tool_call>\n<function={n}>\n{body}</function>\n</tool_call>" for (n, _), body in calls_and_bodies
    )


def llama3_json(calls: list[Call]) -> str:
    return "; ".join(f'{{"name": "{n}", "parameters": {dumps(a)}}}' for n, a in calls)


def llama3_tagged(calls: list[Call]) -> str:
    return "<|python_tag|>" + llama3_json(calls)


def pythonic(calls: list[Call]) -> str:
    return "[" + ", ".join(f"{n}({', '.join(f'{k}={v!r}' for k, v in a.items())})" for n, a in calls) + "]"


def pythonic_tagged(calls: list[Call]) -> str:
    return f"<|python_start|>{pythonic(calls)}<|python_end|>"


def mistral(calls: list[Call]) -> str:
    return "[TOOL_CALLS]" + dumps([{"name": n, "arguments": a, "id": "abcdefghi"} for n, a in calls])


def mistral_v11(calls: list[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{n}[ARGS]{dumps(a)}" for n, a in calls)


def deepseek(calls: list[str], between: str) -> str:
    each = [f"<｜tool▁call▁begin｜>{call}<｜tool▁call▁end｜>" for call in calls]
    return f"<｜tool▁calls▁begin｜>{between.join(each)}<｜tool▁calls▁end｜>"


def deepseek_v3(calls: list[Call]) -> str:
    return deepseek([f"function<｜tool▁sep｜>{n}\n```json\n{dumps(a)}\n```" for n, a in calls], "\n")


def deepseek_v31(calls: list[Call]) -> str:
    return deepseek([f"{n}<｜tool▁sep｜>{dumps(a)}" for n, a in calls], "")


def gemma4(calls: list[Call]) -> str:
    def write(value: Any) -> str:
        match value:
            case str():
                return f'<|"|>{value}<|"|>'
            case dict():
                return "{" + ",".join(f"{key}:{write(item)}" for key, item in value.items()) + "}"
            case list():
                return f"[{','.join(map(write, value))}]"
        return dumps(value)

    return "".join(f"<|tool_call>call:{n}{write(a)}<tool_call|>" for n, a in calls)


WRITTEN = {
    "hermes": ("hermes", hermes),
    "qwen3_coder": ("qwen3_coder", qwen3_coder),
    "llama3_json": ("llama3_json", llama3_json),
    "llama3_json, tagged": ("llama3_json", llama3_tagged),
    "llama4_pythonic": ("llama4_pythonic", pythonic),
    "llama4_pythonic, tagged": ("llama4_pythonic", pythonic_tagged),
    "llama4_pythonic, as JSON": ("llama4_pythonic", llama3_json),
    "mistral": ("mistral", mistral),
    "mistral_v11": ("mistral_v11", mistral_v11),
    "deepseek_v3": ("deepseek_v3", deepseek_v3),
    "deepseek_v31": ("deepseek_v31", deepseek_v31),
    "gemma4": ("gemma4", gemma4),
}


def events_of(parser: StreamParser, pieces: list[str], truncated: bool = False) -> list:
    return merge([event for piece in pieces for event in parser.push(piece)] + parser.finish(truncated))
