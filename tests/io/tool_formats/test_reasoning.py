"""Reasoning is separated from content and calls, in every format, for every cut of the text."""

from __future__ import annotations

import pytest
from refusals import refuses
from tool_call_cases import TOOLS, events_of

from dovetail.io.tool_formats.events import Content, Reasoning, collect
from dovetail.io.tool_formats.formats import REASONING_FORMATS, TOOL_FORMATS, reasoning_for
from dovetail.io.tool_formats.stream import StreamParser, parse

CALL = '<tool_call>\n{"name": "look_up", "arguments": {"text": "</think>"}}\n</tool_call>'
GEMMA_CALL = '<|tool_call>call:look_up{text:<|"|><channel|><|"|>}<tool_call|>'

# format, whether the prompt opened it, text -> reasoning, content, names of calls
SAMPLES = {
    "thought and answer": (
        "qwen3",
        None,
        "<think>\nHm, 1 < 2 </ok>.\n\nYes\n</think>\n\nYes: 3.\n",
        "Hm, 1 < 2 </ok>.\n\nYes",
        "Yes: 3.\n",
        [],
    ),
    "no thought": ("qwen3", None, "Just this.", "", "Just this.", []),
    "an empty thought": ("qwen3", None, "<think>\n\n</think>\n\nHi", "", "Hi", []),
    "space first": ("qwen3", None, "\n <think>a</think>b", "a", "b", []),
    "and a call": ("qwen3", None, f"<think>\na\n</think>\n\n{CALL}", "a", "", ["look_up"]),
    "content and a call": ("qwen3", None, f"<think>a</think>\n\nb\n{CALL}", "a", "b", ["look_up"]),
    "a call within": (
        "qwen3",
        None,
        f"<think>I write {CALL} now</think>c",
        f"I write {CALL.partition('</think>')[0]}",
        None,
        None,
    ),
    "a marker within": (
        "qwen3",
        None,
        "<think>as <tool_call>{ or <think></think>c",
        "as <tool_call>{ or <think>",
        "c",
        [],
    ),
    "named in the answer": ("qwen3", None, "The tag <think> and </think>", "", "The tag <think> and </think>", []),
    "named after a thought": ("qwen3", None, "<think>a</think>The <think> tag", "a", "The <think> tag", []),
    "again after a call": ("qwen3", None, f"{CALL}\n<think>b</think>c", "b", "c", ["look_up"]),
    "cut off": ("qwen3", None, "<think>\nI was thin", "I was thin", "", []),
    "cut off in the close": ("qwen3", None, "<think>a</thi", "a</thi", "", []),
    "cut off in the open": ("qwen3", None, "<thi", "", "<thi", []),
    "opened by the prompt": ("qwen3", True, "\na\n</think>\n\nb", "a", "b", []),
    "R1": ("deepseek_r1", None, "a\n</think>\n\nb", "a", "b", []),
    "R1 that opens it": ("deepseek_r1", None, "<think>\na\n</think>\n\nb", "a", "b", []),
    "R1 that does not end": ("deepseek_r1", None, "a <tool_call>", "a <tool_call>", "", []),
    "R1, closed by the caller": ("deepseek_r1", False, "b", "", "b", []),
    "R1 and a call": ("deepseek_r1", None, f"a</think>{CALL}", "a", "", ["look_up"]),
    "gemma": ("gemma4", None, "<|channel>thought\na\n<channel|>b", "a", "b", []),
    "gemma, empty": ("gemma4", None, "<|channel>thought\n<channel|>b", "", "b", []),
    "gemma, opened": ("gemma4", True, "a\n<channel|>b", "a", "b", []),
    "gemma, late": ("gemma4", None, "---<|channel>thought\na<channel|>b", "a", "---b", []),
    "gemma and calls": (
        "gemma4",
        None,
        f"<|channel>thought\na<channel|>{GEMMA_CALL}{GEMMA_CALL}",
        "a",
        "",
        ["look_up"] * 2,
    ),
    "gemma, between calls": (
        "gemma4",
        None,
        f"{GEMMA_CALL}<|channel>thought\na<channel|>{GEMMA_CALL}",
        "a",
        "",
        ["look_up"] * 2,
    ),
    "gemma, another channel": ("gemma4", None, "<|channel>final", "", "<|channel>final", []),
    "mistral": ("mistral", None, "[THINK]a[/THINK]b", "a", "b", []),
    "mistral, after a call": ("mistral", None, "[TOOL_CALLS]f[ARGS]{}[THINK]a[/THINK]b", "a", "b", ["f"]),
}
TOOLS_OF = {"gemma4": "gemma4", "mistral": "mistral_v11"}


def parser_for(sample: str) -> StreamParser:
    name, opened, *_ = SAMPLES[sample]
    tool_format = TOOL_FORMATS[TOOLS_OF.get(name, "hermes")]
    return StreamParser(tool_format, REASONING_FORMATS[name], tools=TOOLS, in_reasoning=opened, new_id=lambda: "id")


@pytest.mark.parametrize("sample", SAMPLES)
def test_reasoning(sample: str):
    name, opened, text, reasoning, content, calls = SAMPLES[sample]
    tool_format = TOOL_FORMATS[TOOLS_OF.get(name, "hermes")]
    found = parse(text, tool_format, REASONING_FORMATS[name], tools=TOOLS, in_reasoning=opened)
    assert found.reasoning == reasoning
    if content is not None:
        assert (found.content, [call.name for call in found.calls]) == (content, calls)


@pytest.mark.parametrize("sample", SAMPLES)
def test_a_text_cut_anywhere_gives_the_same_result(sample: str):
    text = SAMPLES[sample][2]
    whole = events_of(parser_for(sample), [text])
    for at in range(1, len(text)):
        assert events_of(parser_for(sample), [text[:at], text[at:]]) == whole, (text[:at], text[at:])
    for size in (1, 2, 3, 7):
        assert events_of(parser_for(sample), [text[at : at + size] for at in range(0, len(text), size)]) == whole
    for at in range(len(text)):
        cut = collect(events_of(parser_for(sample), [text[:at]], truncated=True))
        assert not cut.reasoning.endswith(("</", "</thin", "[/", "[/THI", "<ch", "<chan")), cut


def test_reasoning_comes_as_it_is_written():
    parser = StreamParser(None, REASONING_FORMATS["qwen3"])
    assert parser.push("<think>\n") == []
    assert parser.push("I see. ") == [Reasoning("I see.")]
    assert parser.push("So</th") == [Reasoning(" So")]
    assert parser.push("e") == [Reasoning("</the")]
    assert parser.push("</think>\n\nHello") == [Content("Hello")]


def test_whether_the_prompt_opened_the_reasoning():
    qwen, gemma = REASONING_FORMATS["qwen3"], REASONING_FORMATS["gemma4"]
    assert qwen.opened_by("<|im_start|>assistant\n<think>\n")
    assert not qwen.opened_by("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert not qwen.opened_by("<|im_start|>user\nwhat is <think> for?<|im_end|>\n<|im_start|>assistant\n")
    assert gemma.opened_by("<tool_response|><|channel>thought\n") and not gemma.opened_by("<|turn>model\n")


@pytest.mark.parametrize(
    ("template", "tokens", "name"),
    [
        ("{{ '<think>\\n' + reasoning + '</think>' }}", [], "qwen3"),
        ("{{ content.split('</think>')[-1] }}", [], "deepseek_r1"),
        ("{{ '<|channel>thought\\n' }}", [], "gemma4"),
        ("{{ '[THINK]' }}", [], "mistral"),
        ("{{ messages }}", ["<think>", "</think>"], "qwen3"),
        ("{{ messages }}", ["[THINK]"], "mistral"),
        ("{{ messages }}", ["<pad>"], None),
    ],
)
def test_the_format_of_a_model(template: str, tokens: list[str], name: str | None):
    found = reasoning_for(template, tokens)
    assert (found and found.name) == name


def test_the_format_by_name():
    assert reasoning_for("<think>", name="gemma4") is REASONING_FORMATS["gemma4"]
    assert reasoning_for("<think>", name="none") is None
    with refuses("reasoning_parser", naming="deepseek_r1, gemma4, mistral, qwen3 or none"):
        reasoning_for(name="r1")
