"""Tool calls of every format, whole and cut anywhere: the same message, with JSON arguments."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tool_call_cases import TOOLS, WRITTEN, Call, events_of

from dovetail.io.tool_formats.events import CallArguments, CallEnd, CallStart, Content, collect
from dovetail.io.tool_formats.formats import REASONING_FORMATS, TOOL_FORMATS
from dovetail.io.tool_formats.stream import StreamParser, parse

MARKERS = "</tool_call><tool_call>{[<|python_end|>]}[TOOL_CALLS]<｜tool▁call▁end｜><tool_call|></function></parameter>"

# name -> the text before, the calls
MESSAGES: dict[str, tuple[str, list[Call]]] = {
    "no call": ("Just a text: 1 < 2, {braces}, [brackets](x), `code`.\n\nAnd a <tag>.\n", []),
    "one": ("", [("look_up", {"text": "Paris", "count": 3})]),
    "no arguments": ("", [("look_up", {}), ("run-it.now", {})]),
    "text before": ("Let me see.\nOne moment", [("look_up", {"text": "naïve 你好 👍"})]),
    "types": ("", [("run-it.now", {"ratio": -1.5e-7, "flag": True, "maybe": None, "count": -12, "text": ""})]),
    "nested": ("", [("look_up", {"data": {"a": {"b": [1, {"c": []}, {}], "d": "x"}}, "items": [[1.5, None], "]"]})]),
    "quotes": ("", [("look_up", {"text": 'a "b" \\ \'c\' \n\t\\n }] </x> "', "flag": False})]),
    "markers": (
        "I use { and [ and <",
        [("look_up", {"text": MARKERS, "count": 1}), ("run-it.now", {"text": "<tool_"})],
    ),
}
SAMPLES = {f"{written}: {message}": (written, message) for written in WRITTEN for message in MESSAGES}


def parser_for(written: str, **options: Any) -> StreamParser:
    numbers = itertools.count()
    options = {"tools": TOOLS, "new_id": lambda: f"id{next(numbers)}"} | options
    return StreamParser(TOOL_FORMATS[WRITTEN[written][0]], **options)


def text_of(written: str, message: str) -> str:
    before, calls = MESSAGES[message]
    return before + (("\n" if before else "") + WRITTEN[written][1](calls) if calls else "")


@pytest.mark.parametrize("sample", SAMPLES)
def test_a_whole_text(sample: str):
    written, message = SAMPLES[sample]
    before, calls = MESSAGES[message]
    events = events_of(parser_for(written), [text_of(written, message)])
    found = collect(events)
    assert found.content == before and not found.reasoning
    assert [(call.name, json.loads(call.arguments)) for call in found.calls] == calls
    assert [(call.id, call.complete) for call in found.calls] == [(f"id{i}", True) for i in range(len(calls))]
    kinds = [type(event) for event in events]
    assert kinds == [Content] * bool(before) + [CallStart, CallArguments, CallEnd] * len(calls)


@pytest.mark.slow
@pytest.mark.parametrize("sample", SAMPLES)
def test_a_text_cut_anywhere_gives_the_same_result(sample: str):
    written, message = SAMPLES[sample]
    text = text_of(written, message)
    whole = events_of(parser_for(written), [text])
    for at in range(1, len(text)):
        assert events_of(parser_for(written), [text[:at], text[at:]]) == whole, (text[:at], text[at:])
    rng = random.Random(0)
    for size in (1, 2, 3, 7, 0, 0, 0, 0):
        sizes = iter(lambda size=size: size or rng.randint(1, 20), None)
        pieces, at = [], 0
        while at < len(text):
            pieces.append(text[at : (at := at + next(sizes))])
        assert events_of(parser_for(written), pieces) == whole, pieces


@pytest.mark.slow
@pytest.mark.parametrize("sample", SAMPLES)
def test_a_truncated_text_keeps_its_certain_part(sample: str):
    written, message = SAMPLES[sample]
    text, tool_format = text_of(written, message), TOOL_FORMATS[WRITTEN[written][0]]
    whole = collect(events_of(parser_for(written), [text]))
    for at in range(len(text)):
        found = collect(events_of(parser_for(written), [text[:at]], truncated=True))
        for call, full in zip(found.calls, whole.calls, strict=False):
            assert call.name == full.name and full.arguments.startswith(call.arguments)
            assert call.complete == (call.arguments == full.arguments)
        if not whole.content.startswith(found.content):
            # not decided yet: less than a marker, or what may begin a call that has none
            extra = found.content.removeprefix(whole.content).strip()
            beginnings = (*tool_format.opens, *tool_format.closes, text[len(whole.content) :].strip())
            assert text[:at].rstrip().endswith(extra) and any(full.startswith(extra) for full in beginnings)
        ended = collect(events_of(parser_for(written), [text[:at]]))
        assert ended.calls == found.calls and ended.content.startswith(found.content)


@pytest.mark.slow
@pytest.mark.parametrize("sample", SAMPLES)
def test_cut_off_after_a_call_no_part_of_a_marker_is_content(sample: str):
    """Wherever an answer that is only calls is cut off, nothing of it is text; nor is half the marker after a call."""
    written, message = SAMPLES[sample]
    text = text_of(written, message)
    for at in range(len(text)):
        assert not collect(events_of(parser_for(written, only_calls=True), [text[:at]], truncated=True)).content
        found = collect(events_of(parser_for(written), [text[:at]], truncated=True))
        if found.calls and not MESSAGES[message][0]:
            assert not found.content, text[:at]


# --- any arguments ----------------------------------------------------------------------------------------------------

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
keys = st.from_regex(r"[A-Za-z_]\w{0,8}", fullmatch=True)  # Gemma's notation has no quotes around keys
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3), max_leaves=8
)
arguments = st.fixed_dictionaries(
    {},
    optional={
        "text": st.text()
        | st.sampled_from([MARKERS, "\n", "\r\n", " x ", "\\", "\\u12", '"""', "'''\"", "<|", "null"]),
        "count": st.integers(),
        "ratio": st.floats(allow_nan=False, allow_infinity=False),
        "flag": st.booleans(),
        "maybe": st.none() | st.integers(),
        "data": st.dictionaries(keys, values, max_size=4),
        "items": st.lists(values, max_size=4),
    },
)
calls = st.lists(st.tuples(st.sampled_from(["look_up", "run-it.now"]), arguments), min_size=1, max_size=3)


@pytest.mark.slow
@pytest.mark.parametrize("written", WRITTEN)
@settings(max_examples=6, deadline=None, derandomize=True, database=None)
@given(calls, st.randoms(use_true_random=False))
def test_any_arguments_come_back(written: str, calls: list[Call], rng: random.Random):
    text = WRITTEN[written][1](calls)
    if written == "gemma4":
        assume('<|"|>' not in repr(calls))
    found = collect(whole := events_of(parser_for(written), [text]))
    assert [(call.name, json.loads(call.arguments)) for call in found.calls] == calls
    assert not found.content and all(call.complete for call in found.calls)
    cuts = sorted(rng.sample(range(len(text) + 1), min(len(text), 12)))
    pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
    assert events_of(parser_for(written), pieces) == whole


@pytest.mark.parametrize("written", ["hermes", "llama3_json", "mistral", "mistral_v11", "deepseek_v3", "deepseek_v31"])
def test_json_passes_as_it_is_written(written: str):
    odd = '{"a" :[ 1,\t2.50 ,1E5],\n "b":"\\u00e9\\/ \\ud83d\\ude00"  }'
    text = WRITTEN[written][1]([("look_up", {"here": 1})]).replace('{"here": 1}', odd)
    assert [call.arguments for call in parse(text, TOOL_FORMATS[WRITTEN[written][0]]).calls] == [odd]


@pytest.mark.slow
@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(
    st.sampled_from(sorted(WRITTEN)),
    st.lists(
        st.sampled_from(
            [
                "<tool_call>",
                "</tool_call>",
                "<function=",
                "look_up",
                ">",
                "<parameter=text>",
                "</parameter>",
                "</function>",
            ]
            + [
                "{",
                "}",
                "[",
                "]",
                "(",
                ")",
                '"name"',
                '"arguments"',
                '"parameters"',
                ":",
                '"look_up"',
                ",",
                ";",
                "=",
                "x",
            ]
            + [
                "<|python_tag|>",
                "<|python_start|>",
                "<|python_end|>",
                "[TOOL_CALLS]",
                "[ARGS]",
                '"',
                "'",
                "\\",
                " ",
                "\n",
            ]
            + [
                "<｜tool▁calls▁begin｜>",
                "<｜tool▁call▁begin｜>",
                "<｜tool▁sep｜>",
                "<｜tool▁call▁end｜>",
                "<｜tool▁calls▁end｜>",
            ]
            + [
                "<|tool_call>",
                "call:",
                "<tool_call|>",
                '<|"|>',
                "1",
                "true",
                "<think>",
                "</think>",
                "function",
                "```json\n",
            ]
        ),
        max_size=30,
    ),
    st.booleans(),
    st.booleans(),
)
def test_any_text_cut_anywhere_gives_the_same_result(written, parts, truncated, thinks):
    reasoning = REASONING_FORMATS["qwen3"] if thinks else None
    text = "".join(parts)

    def read(pieces: list[str]) -> list:
        return events_of(parser_for(written, reasoning_format=reasoning), pieces, truncated)

    assert read([text]) == read(parts) == read(list(text))
    for call in collect(read(parts)).calls:
        if call.complete:
            assert isinstance(json.loads(call.arguments), dict)
    if not any(part in text for part in "{[(<"):
        assert collect(read(parts)).content == text
