"""Malformed tool calls, text that resembles one, and how early a client gets a call."""

from __future__ import annotations

import json
import re

import pytest
from refusals import refuses
from tool_call_cases import TOOLS, events_of

from dovetail.core.errors import RequestError
from dovetail.io.tool_formats.events import CallArguments, CallEnd, CallStart, Content, merge
from dovetail.io.tool_formats.formats import TOOL_FORMATS, format_for, special_ids
from dovetail.io.tool_formats.named import typed
from dovetail.io.tool_formats.notation import GEMMA, JSON, PYTHON, State, ValueReader, as_json
from dovetail.io.tool_formats.stream import StreamParser, parse
from dovetail.io.tool_formats.tools import parameters_by_name, types_of

# --- values -----------------------------------------------------------------------------------------------------------

READ = [
    (JSON, '{"a": [1, {"b": null}], "c": "\\u00e9\\n"}', '{"a": [1, {"b": null}], "c": "\\u00e9\\n"}'),
    (JSON, '{"raw": "two\nlines\tand a tab"}', '{"raw": "two\\nlines\\tand a tab"}'),
    (JSON, "{'single': 'it\\'s \"so\"'}", '{"single": "it\'s \\"so\\""}'),
    (
        JSON,
        '{"a": True, "b": None, "c": .5, "d": +1, "e": 0x1F, "f": 1_000}',
        '{"a": true, "b": null, "c": 0.5, "d": 1, "e": 31, "f": 1000}',
    ),
    (JSON, '{"a": [1, 2, ], }', '{"a": [1, 2]}'),
    (JSON, '{"regex": "\\d+\\.\\w", "path": "C:\\Users"}', '{"regex": "\\\\d+\\\\.\\\\w", "path": "C:\\\\Users"}'),
    (JSON, "{bare: 1}", '{"bare": 1}'),
    (PYTHON, "(a=1, b='x', c=[(1, 2), {'k': False}],)", '{"a": 1, "b": "x", "c": [[1, 2], {"k": false}]}'),
    (
        PYTHON,
        '(code="""a "b"\n\'c\'""", e="", q=\'\\x41\\U0001F600\')',
        '{"code": "a \\"b\\"\\n\'c\'", "e": "", "q": "\\u0041😀"}',
    ),
    (PYTHON, "()", "{}"),
    (
        GEMMA,
        '{a:<|"|>x "y" \\n {z}<|"|>,b:-1.5,c:[true,None],d:{e:<|"|><|"|>}}',
        '{"a":"x \\"y\\" \\\\n {z}","b":-1.5,"c":[true,null],"d":{"e":""}}',
    ),
    (
        GEMMA,
        '{<|"|>quoted<|"|>:1,"json":"\\n",word:hello there,zip:007,at:10:30}',
        '{"quoted":1,"json":"\\n","word":"hello there","zip":"007","at":"10:30"}',
    ),
]
BROKEN = [
    (JSON, '{"a": b}', '{"a": '),
    (JSON, '{"a": "x" "y"}', '{"a": "x" '),
    (JSON, '{"a" 1}', '{"a" '),
    (JSON, '{"a": [1}', '{"a": [1'),
    (JSON, '{"a": NaN}', '{"a": '),
    (JSON, '{"a": 1]', '{"a": 1'),
    (PYTHON, "(a=f(x))", '{"a": '),
    (PYTHON, "(1, 2)", '{"1"'),
    (PYTHON, "(a=1+2)", '{"a": '),
    (GEMMA, "{a:<b}", '{"a":'),
]


@pytest.mark.parametrize(("notation", "text", "expected"), READ)
def test_a_value_becomes_json(notation, text: str, expected: str):
    for size in (len(text), 1, 2):
        reader, rest, written = ValueReader(notation), "", ""
        for at in range(0, len(text), size):
            rest += text[at : at + size]
            rest = rest[reader.push(rest) :]
            written += reader.take()
        assert reader.state is State.DONE and not rest
        assert written == expected and json.loads(written) is not None


@pytest.mark.parametrize(("notation", "text", "expected"), BROKEN)
def test_an_invalid_value_stops_the_reader_where_it_begins(notation, text: str, expected: str):
    reader = ValueReader(notation)
    reader.push(text)
    assert reader.state is State.BROKEN and reader.take() == expected


def test_a_value_of_any_depth():
    deep = "[" * 5000 + "]" * 5000
    assert as_json(deep) == deep
    (call,) = parse(
        f'<tool_call>{{"id": {deep}, "name": "f", "arguments": {{"a": {deep}}}}}', TOOL_FORMATS["hermes"]
    ).calls
    assert call.complete and call.arguments == f'{{"a": {deep}}}'


TYPED = [
    ("5", {"integer"}, "5"),
    ("-1.5", {"number"}, "-1.5"),
    ("True", {"boolean"}, "true"),
    ("null", {"string", "null"}, "null"),
    ("{'a': [None]}", {"object"}, '{"a": [null]}'),
    ("[1, 2]", {"array"}, "[1, 2]"),
    ("text", {"string", "null"}, '"text"'),
    ("five", {"integer"}, '"five"'),
    ("[1", {"array"}, '"[1"'),
    ("true", {"integer"}, '"true"'),
    ("", {"object"}, '""'),
]


@pytest.mark.parametrize(("text", "types", "expected"), TYPED)
def test_a_tags_value_has_its_schemas_type(text: str, types: set, expected: str):
    assert typed(text, frozenset(types)) == expected


TYPES = [
    ({"type": "integer"}, {"integer"}),
    ({"type": ["string", "null"]}, {"string", "null"}),
    ({"enum": ["a", 1]}, {"string", "integer"}),
    ({"const": True}, {"boolean"}),
    ({"anyOf": [{"type": "number"}, {"$ref": "#/$defs/a~1b"}]}, {"number", "array"}),
    ({"properties": {}}, {"object"}),
    ({"items": {}}, {"array"}),
    ({}, {"string"}),
    (True, {"string"}),
    ({"$ref": "#/$defs/loop"}, {"string"}),
]


@pytest.mark.parametrize(("schema", "expected"), TYPES)
def test_types_of_a_parameter(schema, expected: set):
    definitions = {"a/b": {"type": "array"}, "loop": {"anyOf": [{"$ref": "#/$defs/loop"}]}}
    assert types_of({"properties": {"x": schema}, "$defs": definitions}, "x") == expected
    assert types_of({"properties": {"x": schema}}, "y") == types_of(None, "x") == {"string"}


# --- texts that are almost calls, or calls that are almost right ------------------------------------------------------

CALL = '{"name": "f", "arguments": {"a": 1}}'
F = [("f", '{"a": 1}', True)]
LOOK_UP = ("look_up", "{}", True)
SAME = None  # the text is content, untouched
# format, text -> content, calls as (name, arguments, complete)
SLIPS = [
    ("hermes", "<tool_call> is the tag", SAME, []),
    ("hermes", f"<tool_call> is the tag: <tool_call>{CALL}</tool_call>", "<tool_call> is the tag:", F),
    ("hermes", "<tool_call></tool_call>", SAME, []),
    ("hermes", '<tool_call>{"name": "f"', SAME, []),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>', SAME, []),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', SAME, []),
    ("hermes", '<tool_call>{"name": "f", "extra": 1}</tool_call>', SAME, []),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}", True)]),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}", True)]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", F),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', "", F),
    (
        "hermes",
        '<tool_call>{"id": [1, {}], "type": "function", "name": "f", "arguments": {"a": 1}, "x": {}}</tool_call>',
        "",
        F,
    ),
    ("hermes", f"<tool_call>{CALL}", "", F),  # no end
    ("hermes", f"<tool_call>{CALL[:-1]}</tool_call>\nok", "ok", F),  # a brace too few
    ("hermes", f"<tool_call>{CALL}}}</tool_call>\nok", "ok", F),  # a brace too many
    ("hermes", f"<tool_call>{CALL}\n{CALL}</tool_call>", "", F * 2),
    ("hermes", f"<tool_call>[{CALL}, {CALL}]</tool_call>", "", F * 2),
    ("hermes", f"<tool_call>{CALL}<tool_call>{CALL}</tool_call>", "", F * 2),
    ("hermes", f"<tool_call>{CALL}\nNow, then", "Now, then", F),
    ("hermes", f"<tool_call>{CALL[:-1]}\nNow, then", "Now, then", F),
    ("hermes", f"<tool_call>\n<tool_call>{CALL}</tool_call>", "<tool_call>", F),
    ("hermes", f"One\n\n<tool_call>{CALL}</tool_call>\n\ntwo\n", "One\n\ntwo\n", F),
    (
        "hermes",
        f' \n<tool_call>{{"name": "f", "arguments": {{"a": "say "hi""}}}}</tool_call>\n<tool_call>{CALL}</tool_call>',
        "",
        [("f", '{"a": "say "', False), *F],
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1</tool_call>ok', "ok", [("f", '{"a": 1', False)]),
    ("qwen3_coder", "<function=look_up>\n</function>", "", [LOOK_UP]),
    ("qwen3_coder", "<function=other>\n</function>", SAME, []),
    (
        "qwen3_coder",
        "<tool_call><function=other><parameter=x>1</parameter></function></tool_call>",
        "",
        [("other", '{"x": "1"}', True)],
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=look_up>\n<parameter=count>\n3\n</parameter>\n</tool_call>\nok",
        "ok",
        [("look_up", '{"count": 3}', True)],
    ),
    ("qwen3_coder", "<tool_call><function=look_up>text</function></tool_call>", "", [("look_up", "{", False)]),
    ("qwen3_coder", f"<tool_call>{CALL}</tool_call>", "", F),
    ("qwen3_coder", "<parameter=x>", SAME, []),
    ("llama3_json", CALL.replace("f", "look_up"), "", [("look_up", '{"a": 1}', True)]),
    ("llama3_json", CALL, SAME, []),  # it is not known
    ("llama3_json", "<|python_tag|>" + CALL, "", F),
    ("llama3_json", '{"name": "look_up"}', SAME, []),
    ("llama3_json", '{"parameters": {}, "name": "look_up"}', SAME, []),
    ("llama3_json", '{"name": "look_up", "age": 3}', SAME, []),
    ("llama3_json", '<|python_tag|>brave.call(query="x")', SAME, []),
    ("llama3_json", 'I call: {"type": "function", "name": "look_up", "parameters": {}} now', "I call: now", [LOOK_UP]),
    ("llama3_json", '{"name": "look_up", "parameters": {}}, [a](b)', ", [a](b)", [LOOK_UP]),
    ("llama4_pythonic", "a[0], [link](x), [look_up]", SAME, []),
    ("llama4_pythonic", "[other(a=1)]", SAME, []),
    ("llama4_pythonic", "[look_up(x)]", SAME, []),
    ("llama4_pythonic", "<|python_start|>[f(a=b), g()]<|python_end|>ok", "ok", [("f", '{"a": ', False)]),
    ("llama4_pythonic", "[look_up(), look_up()] Done [1]", "Done [1]", [LOOK_UP] * 2),
    ("mistral", f"[TOOL_CALLS] [{CALL}]\nDone", "Done", F),
    ("mistral", "see [TOOL_CALLS] and [ARGS]", SAME, []),
    ("mistral_v11", '[TOOL_CALLS]f{"a": 1}[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"a": 1}', "", F * 2),
    ("mistral_v11", '[TOOL_CALLS]f[ARGS]{"a": 1}Sorry', "Sorry", F),
    ("deepseek_v3", '<｜tool▁call▁begin｜>\nfunction<｜tool▁sep｜>f\n{"a": 1}<｜tool▁call▁end｜>', "", F),
    (
        "deepseek_v31",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{"a": 1}',
        "",
        [("function", '{"a": 1}', True)],
    ),
    ("deepseek_v31", "<｜tool▁calls▁begin｜>nothing here", SAME, []),
    (
        "gemma4",
        "<|tool_call>call:f{a:1}<tool_call|><|tool_call>call: my.f {}<tool_call|>",
        "",
        [("f", '{"a":1}', True), ("my.f", "{}", True)],
    ),
    ("gemma4", "<|tool_call>f{a:1}<tool_call|>", SAME, []),
    ("gemma4", '<|tool_call>call:f{a:<|"|>x<tool_call|>', "", [("f", '{"a":"x<tool_call|>', False)]),
]


@pytest.mark.parametrize(("name", "text", "content", "calls"), SLIPS)
def test_malformed_calls(name: str, text: str, content: str, calls: list):
    def read(pieces: list[str]):
        return events_of(StreamParser(TOOL_FORMATS[name], tools=TOOLS, new_id=lambda: "id"), pieces)

    found = parse(text, TOOL_FORMATS[name], tools=TOOLS)
    assert (found.content, [(call.name, call.arguments, call.complete) for call in found.calls]) == (
        text if content is SAME else content,
        calls,
    )
    assert read([text]) == read(list(text)) == read(re.findall(".{1,3}", text, re.DOTALL))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", 'Hi <tool_call>\n{"name": "get_we'),
        ("mistral_v11", "Hi [TOOL_CALLS]get_we"),
        ("deepseek_v3", "Hi <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>func"),
    ],
)
def test_the_beginning_of_a_call_is_content_only_if_the_model_stopped_there(name: str, text: str):
    assert parse(text, TOOL_FORMATS[name], truncated=True).content == "Hi"
    assert parse(text, TOOL_FORMATS[name]).content == text
    assert parse("a <tool", TOOL_FORMATS["hermes"], truncated=True).content == "a"
    assert parse("a <tool", TOOL_FORMATS["hermes"]).content == "a <tool"
    assert parse("1 <", TOOL_FORMATS["hermes"], truncated=True).content == "1 <"


# --- how soon ---------------------------------------------------------------------------------------------------------

SOON = [
    ("hermes", '<tool_call>\n{"name": "look_up", "arguments": ', '{"text": "hel', '{"text": "hel'),
    ("hermes", '<tool_call>\n{"name": "look_up", "arguments": ', '{"text": "a\\', '{"text": "a'),
    ("mistral_v11", "[TOOL_CALLS]look_up[ARGS]", '{"text": "hel', '{"text": "hel'),
    ("qwen3_coder", "<tool_call>\n<function=look_up>\n", "<parameter=text>\nhel\nlo\n", '{"text": "hel\\nlo'),
    ("qwen3_coder", "<tool_call>\n<function=look_up>\n", "<parameter=text>\nhel\n</para", '{"text": "hel'),
    ("llama4_pythonic", "[look_up", "(count=3, text='hel", '{"count": 3, "text": "hel'),
    ("gemma4", "<|tool_call>call:look_up", '{count:3,text:<|"|>hel<', '{"count":3,"text":"hel'),
]


@pytest.mark.parametrize(("name", "head", "begun", "expected"), SOON)
def test_arguments_come_as_they_are_written(name: str, head: str, begun: str, expected: str):
    parser = StreamParser(TOOL_FORMATS[name], tools=TOOLS, new_id=lambda: "id")
    start, *written = parser.push(head) + parser.push(begun)
    assert start == CallStart(0, "id", "look_up")
    assert merge(written) == [CallArguments(0, expected)]
    assert parser.finish(truncated=True) == [CallEnd(0, complete=False)]


def test_text_that_resembles_a_call_is_not_buffered_for_long():
    parser = StreamParser(TOOL_FORMATS["hermes"])
    assert parser.push("The tag <tool") == [Content("The tag")]
    assert parser.push("_call> is") == [Content(" <tool_call> is")]
    assert parser.push(" here\n") == [Content(" here")]
    assert parser.finish() == [Content("\n")]


def test_without_formats_text_is_text():
    parser = StreamParser()
    assert parser.push("<think> <tool_call>{") == [Content("<think> <tool_call>{")]
    assert parser.finish() == []


# --- ids, and which format a model has --------------------------------------------------------------------------------


def test_ids():
    ids = [call.id for call in parse(f"<tool_call>{CALL}{CALL}", TOOL_FORMATS["hermes"]).calls]
    assert len({*ids}) == 2 and all(re.fullmatch("call_[0-9a-f]{24}", each) for each in ids)
    (call,) = parse("[TOOL_CALLS]f[ARGS]{}", TOOL_FORMATS["mistral"]).calls
    assert re.fullmatch("[a-zA-Z0-9]{9}", call.id)


TEMPLATES = {
    "{{ '<tool_call>\\n{\"name\": ' }}": "hermes",
    "<tool_call>\n<function=example>\n<parameter=x>": "qwen3_coder",
    "{{- '<|tool_call>call:' + name }}": "gemma4",
    "{{ '[TOOL_CALLS][' }}": "mistral",
    "{{ '[TOOL_CALLS]' + name + '[ARGS]' }}": "mistral_v11",
    "'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + type + '<｜tool▁sep｜>' + name + '\\n```json\\n'": "deepseek_v3",
    "'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>'+ name + '<｜tool▁sep｜>' + arguments": "deepseek_v31",
    "<|python_start|>": "llama4_pythonic",
    "{{- '<|python_tag|>' }}": "llama3_json",
    'Respond in the format {"name": function name, "parameters": dictionary of ...}': "llama3_json",
    "{{ messages }}": "hermes",
    "": "hermes",
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_format_of_a_template(template: str):
    found = format_for(template, ["<pad>"])
    assert found is not None and found.name == TEMPLATES[template]


def test_the_format_of_special_tokens_or_by_name():
    for tokens, name in ((["[TOOL_CALLS]", "[ARGS]"], "mistral_v11"), (["<|python_tag|>"], "llama3_json")):
        found = format_for("{{ messages }}", tokens)
        assert found is not None and found.name == name
    fine_tuned = format_for("<tool_call>", ["[TOOL_CALLS]"])  # its base model's vocabulary
    assert fine_tuned is TOOL_FORMATS["hermes"]
    assert format_for("<tool_call>", name="gemma4") is TOOL_FORMATS["gemma4"] and format_for(name="none") is None
    with refuses("tool_call_parser", naming="deepseek_v3"):
        format_for(name="qwen")


def test_tools_in_both_of_openais_shapes_or_refused():
    tools = [{"type": "function", "function": {"name": "a"}}, {"type": "function", "name": "b", "parameters": {"x": 1}}]
    assert parameters_by_name(tools) == {"a": {"type": "object", "properties": {}}, "b": {"x": 1}}
    with refuses("tools", RequestError, naming="tools[0]"):
        StreamParser(tools=[{"type": "function", "function": "f"}])


def test_markers_that_are_special_tokens():
    class Vocabulary:
        special_ids = frozenset({0, 1})

        def token(self, token_id: int) -> str:
            return ["<|tool_call>", "<pad>"][token_id]

    assert special_ids(Vocabulary(), TOOL_FORMATS["gemma4"], None) == {"<|tool_call>": 0}
