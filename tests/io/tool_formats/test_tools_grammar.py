"""Under the grammar a model can only call its tools, in its own format, and the parser reads the calls."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers
from tool_call_cases import WRITTEN, dumps

from dovetail.core.errors import RequestError
from dovetail.engine import grammar
from dovetail.engine.request.params import StructuredOutputsParams
from dovetail.io.gguf import GgufCheckpoint
from dovetail.io.tokenizer import Tokenizer
from dovetail.io.tool_formats.formats import REASONING_FORMATS, TOOL_FORMATS, special_ids
from dovetail.io.tool_formats.grammar import grammar_for
from dovetail.io.tool_formats.stream import parse

LOOK_UP = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "unit": {"enum": ["c", "f"]},
        "count": {"$ref": "#/$defs/small"},
        "flag": {"type": "boolean"},
        "data": {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}}}},
        "pair": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2},
        "words": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["text", "count"],
    "additionalProperties": False,
    "$defs": {"small": {"type": "integer", "minimum": 0, "maximum": 99}},
}
TOOLS = [
    {"type": "function", "function": {"name": "look", "parameters": LOOK_UP}},
    {"type": "function", "function": {"name": "look_up", "description": "takes nothing"}},
    {"type": "function", "function": {"name": "free", "parameters": {"type": "object"}}},
]
FORMATS = {name: WRITTEN[name][1] for name in TOOL_FORMATS}
MARKERS = sorted({marker for each in TOOL_FORMATS.values() for marker in each.markers} | {"<think>", "</think>"})


@pytest.fixture(scope="module")
def real(smollm2_gguf) -> Tokenizer:
    """Here every marker is plain text."""
    return GgufCheckpoint(smollm2_gguf).tokenizer()


@pytest.fixture(scope="module")
def marked() -> Tokenizer:
    """Here every marker is a special token."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=["<end>", *MARKERS], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator([json.dumps(TOOLS)] * 3, trainer)
    return Tokenizer(backend, eos="<end>")


def source_for(name: str, tokenizer: Tokenizer, *args: Any, tools: Any = TOOLS, **options: Any) -> str:
    special = special_ids(tokenizer, TOOL_FORMATS[name], options.get("reasoning"))
    return grammar_for(TOOL_FORMATS[name], tools, *args, special=special, **options)


def admits(source: str, tokenizer: Tokenizer, text: str) -> bool:
    """Return whether the grammar accepts the text as a whole."""
    matcher = grammar.compile(StructuredOutputsParams(grammar=source), tokenizer).start()
    try:
        for token in tokenizer.encode(text, add_special=False):
            matcher.accept(token)
    except ValueError:
        return False
    return bool({*tokenizer.eos_ids} & {*allowed_by(matcher, tokenizer)})


def allowed_by(matcher: grammar.Matcher, tokenizer: Tokenizer) -> list[int]:
    bits = np.zeros(-(-tokenizer.vocab_size // 32) + 1, np.uint32)
    matcher.fill(bits)
    return np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist()


FIT = [
    (
        "look",
        {
            "text": 'naïve "你好"\n\\ {x}',
            "unit": "c",
            "count": 7,
            "flag": True,
            "data": {"a": [1, -2]},
            "pair": [3, 4],
            "words": ["x", "y"],
        },
    ),
    ("look", {"text": "", "count": 99}),
    ("look_up", {}),
    ("free", {"anything": {"at": ["all", None]}}),
]
UNFIT = [
    ("other", {}),
    ("look", {"text": "no count"}),
    ("look", {"text": "x", "count": 100}),
    ("look", {"text": "x", "count": 1, "unit": "k"}),
    ("look", {"text": "x", "count": 1, "pair": [1]}),
    ("look", {"text": "x", "count": 1, "more": 1}),
    ("look_up", {"more": 1}),
]


def write(name: str, calls: list) -> str:
    """As the format writes them, except that arguments which are not declared go as JSON in the format's wrapper."""
    if name in ("qwen3_coder", "llama4_pythonic", "gemma4") and any(call[0] == "free" for call in calls):
        assert len(calls) == 1
        text = json.dumps(calls[0][1])
        return {
            "qwen3_coder": f'<tool_call>\n{{"name": "free", "arguments": {text}}}\n</tool_call>',
            "llama4_pythonic": f'[{{"name": "free", "parameters": {text}}}]',
            "gemma4": f"<|tool_call>call:free{text}<tool_call|>",
        }[name]
    if name == "llama4_pythonic":  # strings as JSON has them
        body = [", ".join(f"{k}={v!r}" if v is True else f"{k}={dumps(v)}" for k, v in a.items()) for _, a in calls]
        return "[" + ", ".join(f"{n}({text})" for (n, _), text in zip(calls, body, strict=True)) + "]"
    text = FORMATS[name](calls)
    return text.replace(', "id": "abcdefghi"', "")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["real", "marked"])
@pytest.mark.parametrize("name", FORMATS)
def test_it_admits_what_fits_and_nothing_else(name: str, kind: str, request):
    tokenizer = request.getfixturevalue(kind)
    source = source_for(name, tokenizer)
    for call in FIT:
        text = write(name, [call])
        assert admits(source, tokenizer, text), text
        (found,) = parse(text, TOOL_FORMATS[name], tools=TOOLS).calls
        assert (found.name, json.loads(found.arguments), found.complete) == (*call, True)
    assert admits(source, tokenizer, write(name, FIT[:3]))
    for call in UNFIT:
        assert not admits(source, tokenizer, write(name, [call])), call
    for text in ("", "Hello", "Hello " + write(name, FIT[:1]), write(name, FIT[:1])[:-1], write(name, FIT[:1]) + " x"):
        assert not admits(source, tokenizer, text), text


@pytest.mark.parametrize("name", FORMATS)
def test_one_call_or_one_function(name: str, marked: Tokenizer):
    one = source_for(name, marked, "required", False)
    assert admits(one, marked, write(name, FIT[:1])) and admits(one, marked, write(name, FIT[2:3]))
    assert not admits(one, marked, write(name, FIT[:2]))
    for choice in ("look", {"type": "function", "function": {"name": "look"}}, {"type": "function", "name": "look"}):
        named = source_for(name, marked, choice)
        assert admits(named, marked, write(name, FIT[:1]))
        assert not admits(named, marked, write(name, FIT[2:3])) and not admits(named, marked, write(name, FIT[:2]))


@pytest.mark.parametrize("kind", ["real", "marked"])
def test_reasoning_may_come_first(kind: str, request):
    tokenizer, reasoning = request.getfixturevalue(kind), REASONING_FORMATS["qwen3"]
    source = source_for("hermes", tokenizer, reasoning=reasoning)
    call = write("hermes", FIT[:1])
    assert admits(source, tokenizer, call)
    assert admits(source, tokenizer, f"<think>\nI < you </ \n</think>\n\n{call}")
    assert not admits(source, tokenizer, f"I </think>{call}") and not admits(source, tokenizer, "<think>I")
    opened = source_for("hermes", tokenizer, reasoning=reasoning, in_reasoning=True)
    assert admits(opened, tokenizer, f"I think\n</think>\n\n{call}") and not admits(opened, tokenizer, call)


def test_a_special_token_is_not_spelled_out(marked: Tokenizer):
    matcher = grammar.compile(StructuredOutputsParams(grammar=source_for("gemma4", marked)), marked).start()
    assert allowed_by(matcher, marked) == [marked.id("<|tool_call>")]


BOUNDED = {
    "type": "object",
    "properties": {
        "unit": {"enum": ["c", "f"]},
        "flags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "inner": {"type": "object", "properties": {"deep": {"const": "x"}}, "additionalProperties": False},
    },
    "required": ["count"],
    "additionalProperties": False,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_random_calls_are_parsed(name: str, marked: Tokenizer):
    """Every text of the grammar is read as calls by the parser."""
    tools = [{"function": {"name": "b", "parameters": BOUNDED}}, {"function": {"name": "bo"}}]
    rng, seen = np.random.default_rng(0), set()
    compiled = grammar.compile(StructuredOutputsParams(grammar=source_for(name, marked, tools=tools)), marked)
    for _ in range(20):
        matcher, output = compiled.start(), []
        while marked.eos_id not in (allowed := allowed_by(matcher, marked)) or rng.random() < 0.5:
            output.append(int(rng.choice([token for token in allowed if token != marked.eos_id])))
            matcher.accept(output[-1])
            assert len(output) < 2000
            if matcher.is_done:
                break
        found = parse(marked.decode(output, skip_special=False), TOOL_FORMATS[name], tools=tools)
        assert found.calls and not found.content
        for call in found.calls:
            arguments = json.loads(call.arguments)
            assert call.complete and call.name in ("b", "bo")
            assert (
                arguments == {} if call.name == "bo" else {"count"} <= arguments.keys() <= BOUNDED["properties"].keys()
            )
            seen |= arguments.keys()
    assert len(seen) > 1


@pytest.mark.parametrize(
    ("tools", "choice", "param"),
    [
        ([], "required", "tool_choice"),
        (TOOLS, "nope", "tool_choice"),
        (TOOLS, {"type": "function", "function": {"name": "nope"}}, "tool_choice"),
        ([{"type": "function"}], "required", "tools"),
    ],
)
def test_a_choice_that_cannot_be_made_is_refused(tools, choice, param: str):
    with pytest.raises(RequestError) as error:
        grammar_for(TOOL_FORMATS["hermes"], tools, choice)
    assert error.value.param == param
