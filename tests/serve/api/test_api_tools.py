"""Tool calls and reasoning over the API: enforced with the real model, and with scripted answers."""

from __future__ import annotations

import json
import re

import httpx
import jsonschema
import numpy as np
import pytest
from later import later
from refusals import refuses
from serve.servers import MODEL, Script, openai_refuses, running

from dovetail.core.errors import RequestError
from dovetail.engine.grammar import compile
from dovetail.engine.request.params import StructuredOutputsParams
from dovetail.io.tool_formats.formats import TOOL_FORMATS
from dovetail.io.tool_formats.grammar import grammar_for
from dovetail.io.tool_formats.notation import read_cut_off
from dovetail.io.tool_formats.stream import parse

openai = later("openai")

pytestmark = pytest.mark.slow

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 16}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "The weather.", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]
ASK = dict(model=MODEL, messages=[{"role": "user", "content": "What is the weather in Paris?"}], tools=TOOLS)
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris", "unit": "C"}}\n</tool_call>'


@pytest.fixture
def client(scripted):
    with openai.OpenAI(base_url=f"{scripted.url}/v1", api_key="none", max_retries=0) as found:
        yield found


def streamed(client, **asked):
    """Return the message of the chunks and its finish reason."""
    message, reason = {"content": "", "reasoning": "", "calls": {}}, None
    for chunk in client.chat.completions.create(stream=True, **asked):
        for choice in chunk.choices:
            message["content"] += choice.delta.content or ""
            message["reasoning"] += getattr(choice.delta, "reasoning_content", None) or ""
            for call in choice.delta.tool_calls or ():
                if call.id:
                    message["calls"][call.index] = [call.id, call.function.name, ""]
                message["calls"][call.index][2] += call.function.arguments or ""
            reason = choice.finish_reason or reason
    return message, reason


NAMED = {"type": "function", "function": {"name": "weather"}}


@pytest.mark.parametrize("choice", [NAMED, pytest.param("required", marks=pytest.mark.thorough)])
def test_required_and_named_calls_are_enforced(openai_client, choice):
    asked = ASK | dict(tool_choice=choice, parallel_tool_calls=False, temperature=0, max_tokens=64)
    answer = openai_client.chat.completions.create(**asked).choices[0]
    (call,) = answer.message.tool_calls
    assert answer.finish_reason == "tool_calls" and answer.message.content is None
    if choice != "required":
        assert call.function.name == "weather"
    if call.function.name == "weather":
        jsonschema.validate(json.loads(call.function.arguments), WEATHER)
    message, reason = streamed(openai_client, **asked)
    assert reason == "tool_calls"
    assert message["calls"][0][1:] == [call.function.name, call.function.arguments]


def test_a_tool_loop_of_two_turns(scripted, client):
    scripted.engine.texts = [CALL, "It is 20 degrees."]
    first = client.chat.completions.create(**ASK).choices[0]
    (call,) = first.message.tool_calls
    assert first.finish_reason == "tool_calls" and json.loads(call.function.arguments) == {"city": "Paris", "unit": "C"}
    messages = [*ASK["messages"], first.message, {"role": "tool", "tool_call_id": call.id, "content": '{"t": 20}'}]
    second = client.chat.completions.create(**ASK | {"messages": messages}).choices[0]
    assert second.message.content == "It is 20 degrees." and second.finish_reason == "stop"
    prompt = scripted.engine.asked[-1][0]  # SmolLM2's template does not take tools: they are described in the prompt
    assert '"name": "weather", "description"' in prompt and CALL in prompt and '{"t": 20}' in prompt


def test_calls_streamed_say_the_same(scripted, client):
    two = "Let me see. " + CALL + "\n" + CALL.replace("Paris", "Rome\\u00e9")
    scripted.engine.texts = [two, two]
    whole = client.chat.completions.create(**ASK).choices[0]
    message, reason = streamed(client, **ASK)
    assert reason == whole.finish_reason == "tool_calls"
    assert message["content"] == whole.message.content == "Let me see."
    assert [call[2] for call in message["calls"].values()] == [c.function.arguments for c in whole.message.tool_calls]
    assert [json.loads(call[2])["city"] for call in message["calls"].values()] == ["Paris", "Romeé"]


def test_one_call_ends_the_answer_where_parallel_ones_are_off(scripted, client):
    scripted.engine.texts = [CALL + "\n" + CALL] * 2
    one = client.chat.completions.create(**ASK, parallel_tool_calls=False).choices[0]
    assert len(one.message.tool_calls) == 1 and one.finish_reason == "tool_calls"
    assert len(streamed(client, **ASK, parallel_tool_calls=False)[0]["calls"]) == 1


def test_choice_none_leaves_text_alone(scripted, client):
    scripted.engine.texts = [CALL]
    answer = client.chat.completions.create(**ASK, tool_choice="none").choices[0]
    assert answer.message.content == CALL and not answer.message.tool_calls
    assert "weather" not in scripted.engine.asked[-1][0].replace("the weather in Paris", "")


def test_a_call_cut_off_has_finish_reason_length(scripted, client):
    scripted.engine.texts = [CALL]
    answer = client.chat.completions.create(**ASK, max_tokens=22).choices[0]
    assert answer.finish_reason == "length"  # not tool_calls: what came is not whole
    arguments = answer.message.tool_calls[0].function.arguments
    with pytest.raises(ValueError):
        json.loads(arguments)


@pytest.mark.parametrize("most", [18, 22, 26])
def test_a_call_cut_off_may_be_sent_back(scripted, client, most):
    """The truncated call is sent back as it came, with the tool's answer; the template gets its certain part."""
    scripted.engine.texts = [CALL, "Again?"]
    first = client.chat.completions.create(**ASK, max_tokens=most).choices[0]
    (call,) = first.message.tool_calls
    given = {"role": "tool", "tool_call_id": call.id, "content": "The arguments are not JSON."}
    second = client.chat.completions.create(**ASK | {"messages": [*ASK["messages"], first.message, given]})
    assert second.choices[0].message.content == "Again?"
    assert '{"name": "weather", "arguments": {' in scripted.engine.asked[-1][0]
    item = {"type": "function_call", "call_id": "a", "name": "weather", "arguments": call.function.arguments}
    turns = [{"role": "user", "content": "?"}, item, {"type": "function_call_output", "call_id": "a", "output": "No."}]
    assert client.responses.create(model=MODEL, input=turns).status == "completed"
    broken = ASK["messages"] + [
        {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "{a"}}]}
    ]
    with openai_refuses(openai.BadRequestError, "messages.1.tool_calls.0.function.arguments"):
        client.chat.completions.create(**ASK | {"messages": broken})


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('{"a": 1}', {"a": 1}), ("{", {}), ('{"a', {}), ('{"a": ', {}), ('{"a": tr', {}), ('{"a": "x', {"a": "x"}),
        ('{"a": "x\\', {}), ('{"a": [1, {"b": "y", "c', {"a": [1, {"b": "y"}]}), ('{"a": 1, ', {"a": 1}),
        ("", None), ("[1]", None), ("{a", None), ('{"a": 1}}', None), ("sunny", None), ('{"a" 1', None),
    ],
)  # fmt: skip
def test_the_beginning_of_an_object(text, found):
    assert read_cut_off(text) == found


FUNCTION = TOOLS[0]["function"]
CUT = {  # a request of each route, with the name of its limit, and how its text is found in an answer or an event
    "chat/completions": ({"tool_choice": "required"} | ASK, "max_tokens", r'"content":"([^"]*)"'),
    "responses": (
        {"input": "Weather?", "tools": [{"type": "function", **FUNCTION}], "tool_choice": "required"},
        "max_output_tokens",
        r'"(?:type":"output_text","text|type":"response.output_text.delta".*?"delta)":"([^"]*)"',
    ),
    "messages": (
        {
            "messages": ASK["messages"],
            "tools": [{"name": "weather", "input_schema": WEATHER}],
            "tool_choice": {"type": "any"},
        },
        "max_tokens",
        r'"text":"([^"]*)"',
    ),
}


@pytest.mark.parametrize("path", CUT)
def test_a_required_call_cut_off_anywhere_leaks_no_text(scripted, tokenizer, path):
    """From half of the opening tag to half of the closing one."""
    body, limit, text = CUT[path]
    count = len(tokenizer.encode(CALL, add_special=False))
    for most in [1, 2, 3, count // 2, *range(count - 7, count)]:
        for stream in (False, True):
            scripted.engine.texts = [CALL]
            answer = httpx.post(f"{scripted.url}/v1/{path}", json=body | {limit: most, "stream": stream}, timeout=60)
            assert answer.status_code == 200 and "".join(re.findall(text, answer.text)) == "", (most, answer.text)


def test_strict_lets_the_model_choose_and_enforces_the_schema(scripted, client, tokenizer):
    strict = [{"type": "function", "function": TOOLS[0]["function"] | {"strict": True}}]
    scripted.engine.texts = ["I look.\n" + CALL]
    answer = client.chat.completions.create(**ASK | {"tools": strict}).choices[0]
    assert answer.message.content == "I look." and answer.message.tool_calls
    grammar = scripted.engine.asked[-1][1].structured_outputs
    assert accepts(grammar, tokenizer, "No tool is needed; 1 < 2.")
    assert accepts(grammar, tokenizer, "I look.\n" + CALL) and accepts(grammar, tokenizer, CALL + "\n" + CALL)
    assert not accepts(grammar, tokenizer, CALL.replace('"C"', '"K"'))
    assert not accepts(grammar, tokenizer, "Hm. <tool_call>\nweather")


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_a_grammar_for_auto_in_every_format(tokenizer, name):
    form = TOOL_FORMATS[name]
    if name in ("llama3_json", "llama4_pythonic"):
        with refuses("tools", RequestError):
            grammar_for(form, TOOLS, "auto")
        return
    auto = StructuredOutputsParams(grammar=grammar_for(form, TOOLS, "auto"))
    call = WRITTEN[name]
    (parsed,) = parse(call, form, tools=TOOLS).calls
    assert parsed.name == "weather" and parsed.complete
    assert accepts(auto, tokenizer, "Just text.") and accepts(auto, tokenizer, "Text. " + call)
    assert not accepts(auto, tokenizer, "Text. " + call.replace("Paris", "P" * 17).replace("weather", "whether"))


WRITTEN = {
    "hermes": CALL,
    "qwen3_coder": "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=unit>\nC\n"
    "</parameter>\n</function>\n</tool_call>",
    "mistral": '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Paris", "unit": "C"}}]',
    "mistral_v11": '[TOOL_CALLS]weather[ARGS]{"city": "Paris", "unit": "C"}',
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
    '{"city": "Paris", "unit": "C"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "deepseek_v31": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Paris", "unit": "C"}'
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "gemma4": '<|tool_call>call:weather{city:<|"|>Paris<|"|>,unit:<|"|>C<|"|>}<tool_call|>',
}


def accepts(structured, tokenizer, text) -> bool:
    """Return whether the grammar accepts this whole text."""
    matcher = compile(structured, tokenizer).start()
    bits = np.zeros(-(-tokenizer.vocab_size // 32), np.uint32)
    for token in [*tokenizer.encode(text, add_special=False), tokenizer.eos_id]:
        matcher.fill(bits)
        if not bits[token // 32] >> (token % 32) & 1:
            return False
        if token != tokenizer.eos_id:
            matcher.accept(token)
    return True


def test_named_of_another_tool_is_refused(client):
    with openai_refuses(openai.BadRequestError, "tool_choice"):
        client.chat.completions.create(**ASK, tool_choice={"type": "function", "function": {"name": "nothing"}})


@pytest.fixture
def thinking(tokenizer):
    async def engine():
        return Script(tokenizer)

    with running(engine, tokenizer, reasoning_parser="qwen3") as found:
        yield found


def test_reasoning_is_separate_from_content(thinking):
    text = "<think>\nHm, Paris.\n</think>\n\nIt is Paris."
    thinking.engine.texts = [text, text, text]
    with openai.OpenAI(base_url=f"{thinking.url}/v1", api_key="none") as client:
        whole = client.chat.completions.create(model=MODEL, messages=ASK["messages"])
        message = whole.choices[0].message
        assert (message.reasoning_content, message.content) == ("Hm, Paris.", "It is Paris.")
        assert whole.usage.completion_tokens_details.reasoning_tokens > 2
        parts, _ = streamed(client, model=MODEL, messages=ASK["messages"])
        assert (parts["reasoning"], parts["content"]) == ("Hm, Paris.", "It is Paris.")
        hidden = client.chat.completions.create(
            model=MODEL, messages=ASK["messages"], extra_body={"include_reasoning": False}
        )
        assert not hasattr(hidden.choices[0].message, "reasoning_content")


def test_special_tokens_that_are_markers_reach_the_parser(tokenizer):
    """SmolLM2 has none, so one of its special tokens is used as a marker."""
    from dovetail.io.tokenizer import Tokenizer

    marked = Tokenizer(
        type(tokenizer.backend).from_str(tokenizer.backend.to_str()), bos=tokenizer.bos, eos=tokenizer.eos,
        chat_template=tokenizer.chat_template, extra={"extra_special_tokens": ["<tool_call>", "</tool_call>"]},
    )  # fmt: skip
    assert marked.id("<tool_call>") in marked.special_ids

    async def engine():
        return Script(marked)

    with running(engine, marked) as server:
        server.engine.texts = [CALL, CALL]
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=ASK).json()["choices"][0]
        assert answer["message"]["tool_calls"][0]["function"]["name"] == "weather"
        plain = httpx.post(f"{server.url}/v1/chat/completions", json=ASK | {"tools": None}).json()["choices"][0]
        assert "tool_call" not in plain["message"]["content"]  # special tokens are left out of text
