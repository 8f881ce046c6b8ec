"""Test that records of every form and file type become examples, and that others are refused."""

import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from refusals import refuses

from dovetail.core import recipe
from dovetail.core.errors import RecipeError
from dovetail.data import records
from dovetail.data.examples import ChatExample, TextExample, example, kind_of
from dovetail.data.records import Record
from dovetail.data.settings import Keys, TuningData, TuningSource

USER, BOT = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}
SYSTEM, OTHER = {"role": "system", "content": "Be kind."}, {"role": "assistant", "content": "no"}
TOOLS = [{"type": "function", "function": {"name": "add"}}]


def read(fields, kind="sft", form="auto", **keys):
    found = example(Record(fields, lambda: "here"), kind, form, Keys(**keys))
    return found and found.sides


# --- forms ------------------------------------------------------------------------------------------------------------

FORMS = {
    "chat": ({"messages": [USER, BOT]}, ChatExample([USER, BOT])),
    "chat with tools": ({"messages": [USER, BOT], "tools": TOOLS}, ChatExample([USER, BOT], TOOLS)),
    "tools as JSON": ({"messages": [USER, BOT], "tools": json.dumps(TOOLS)}, ChatExample([USER, BOT], TOOLS)),
    "sharegpt": (
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}], "system": "Be kind."},
        ChatExample([SYSTEM, USER, BOT]),
    ),
    "text": ({"prompt": "2+2=", "completion": "4"}, TextExample("2+2=", "4")),
    "messages after text": ({"prompt": "hi", "completion": [BOT]}, ChatExample([USER, BOT], None, 1)),
    "messages": ({"prompt": [SYSTEM, USER], "completion": [BOT]}, ChatExample([SYSTEM, USER, BOT], None, 2)),
    "text after messages": ({"prompt": [USER], "completion": "hello"}, ChatExample([USER, BOT], None, 1)),
    "alpaca": ({"instruction": "hi", "input": "", "output": "hello"}, ChatExample([USER, BOT])),
    "alpaca with an input": (
        {"instruction": "Add.", "input": "1 2", "output": "3"},
        ChatExample([{"role": "user", "content": "Add.\n\n1 2"}, {"role": "assistant", "content": "3"}]),
    ),
    "all of a text": ({"text": "Once upon a time"}, TextExample("", "Once upon a time")),
    "content in parts": (
        {"messages": [USER | {"content": [{"type": "text", "text": "hi"}]}, BOT | {"content": ["hel", "lo"]}]},
        ChatExample([USER, BOT | {"content": "hel\nlo"}]),
    ),
    "chat before text": ({"prompt": "hi", "completion": "x", "messages": [USER, BOT]}, ChatExample([USER, BOT])),
}


@pytest.mark.parametrize("form", FORMS)
def test_record_forms(form):
    fields, expected = FORMS[form]
    assert read(fields) == (expected,)


def test_keys_name_the_fields():
    assert read({"dialogue": [USER, BOT]}, messages="dialogue") == (ChatExample([USER, BOT]),)
    turns = [{"who": "user", "says": "hi"}, {"who": "gpt", "says": "hello"}]
    assert read({"messages": turns}, role="who", content="says") == (ChatExample([USER, BOT]),)
    assert read({"question": "a", "answer": "b"}, prompt="question", completion="answer") == (TextExample("a", "b"),)
    dolly = {"instruction": "Add.", "context": "1 2", "response": "3"}
    (chat,) = read(dolly, completion="response", input="context")
    assert chat.messages[0]["content"] == "Add.\n\n1 2"
    assert read({"prompt": "a", "chosen": "b", "rejected": "c"}, completion="chosen") == (TextExample("a", "b"),)
    both = {"prompt": "a", "completion": "b", "messages": [USER, BOT]}
    assert read(both, form="prompt") == (TextExample("a", "b"),)


def test_tool_calls_become_objects_and_nulls_are_dropped():
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    given = [USER | {"tool_calls": None}, {"role": "assistant", "content": None, "tool_calls": [call]}, BOT]
    (chat,) = read({"messages": given})
    assert chat.messages[0] == USER
    assert chat.messages[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}
    (chat,) = read({"conversations": [
        {"from": "human", "value": "hi"}, {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
        {"from": "observation", "value": "1"}, {"from": "gpt", "value": "hello"},
    ]})  # fmt: skip
    assert [m["role"] for m in chat.messages] == ["user", "assistant", "tool", "assistant"]
    assert chat.messages[1]["tool_calls"][0]["function"]["arguments"] == {"a": 1}


PREFERENCES = {
    "text": ({"prompt": "a", "chosen": "b", "rejected": "c"}, (TextExample("a", "b"), TextExample("a", "c"))),
    "messages": (
        {"prompt": [USER], "chosen": [BOT], "rejected": [OTHER]},
        (ChatExample([USER, BOT], None, 1), ChatExample([USER, OTHER], None, 1)),
    ),
    "whole conversations": (
        {"chosen": [SYSTEM, USER, BOT], "rejected": [SYSTEM, USER, OTHER]},
        (ChatExample([SYSTEM, USER, BOT], None, 2), ChatExample([SYSTEM, USER, OTHER], None, 2)),
    ),
    "whole conversations and the prompt again": (
        {"prompt": "hi", "chosen": [USER, BOT], "rejected": [USER, OTHER]},
        (ChatExample([USER, BOT], None, 1), ChatExample([USER, OTHER], None, 1)),
    ),
    "text after messages": (
        {"prompt": [USER], "chosen": "hello", "rejected": "no"},
        (ChatExample([USER, BOT], None, 1), ChatExample([USER, OTHER], None, 1)),
    ),
}


@pytest.mark.parametrize("form", PREFERENCES)
def test_preferences(form):
    fields, expected = PREFERENCES[form]
    assert read(fields, "preference") == expected
    assert kind_of(Record(fields, lambda: ""), Keys()) == "preference"


def test_unpaired_and_prompts():
    fields = {"prompt": "a", "completion": "b", "label": False}
    found = example(Record(fields, lambda: ""), "unpaired")
    assert found and found.label is False and found.sides == (TextExample("a", "b"),)
    assert kind_of(Record(fields, lambda: ""), Keys()) == "unpaired"
    assert read({"prompt": "a"}, "prompts") == (TextExample("a", ""),)
    assert read({"messages": [USER, BOT]}, "prompts") == (ChatExample([USER], None, 1),)
    assert kind_of(Record({"prompt": "a"}, lambda: ""), Keys()) == "prompts"


def test_records_without_a_trained_turn_are_none():
    assert read({"messages": [SYSTEM, USER]}) is None
    assert read({"prompt": [USER], "completion": [USER]}) is None


# --- refusals ---------------------------------------------------------------------------------------------------------

# name -> the record, arguments of `example`, what the message must contain: the place in the record, the value, the key
WRONG = {
    "no form": ({"story": "x"}, {}, "data.keys.messages=story"),
    "other names": (
        {"id": 1, "question": "x", "answer": "y"}, {}, "data.keys.prompt=question data.keys.completion=answer"
    ),
    "one other name": ({"prompt": "x", "response": "y"}, {}, "data.keys.completion=response"),
    "no keys": ({}, {}, "its keys are none"),
    "another kind": ({"messages": [USER]}, {"kind": "preference"}, "chosen and rejected"),
    "a number as text": ({"text": 3}, {}, "text to be a string, got int"),
    "a number as prompt": ({"prompt": 3, "completion": "x"}, {}, "got int"),
    "an empty turn": ({"messages": [USER, BOT, USER, BOT | {"content": " "}]}, {}, "messages[3]: "),
    "an empty question": ({"messages": [USER | {"content": ""}, BOT]}, {}, "messages[0]: "),
    "an empty completion": ({"prompt": "x", "completion": ""}, {}, "the completion is empty"),
    "a video": (
        {"messages": [USER | {"content": [{"type": "video", "url": "x"}]}, BOT]}, {}, "messages[0].content[0]: "
    ),
    "a misspelt role": ({"messages": [USER, BOT | {"role": "asistant"}]}, {}, "Did you mean 'assistant'"),
    "no messages": ({"messages": []}, {}, "messages: "),
    "messages as text": ({"messages": "hi"}, {}, "got 'hi'"),
    "no role": ({"messages": [{"content": "x"}]}, {}, "messages[0]: expected a 'role'"),
    "no content": ({"messages": [{"role": "user"}, BOT]}, {}, "messages[0]: content"),
    "a tool": ({"messages": [USER, BOT], "tools": [{"name": "x"}]}, {}, "tools[0]: "),
    "tools": ({"messages": [USER, BOT], "tools": "[{"}, {}, "tools: "),
    "arguments": (
        {"messages": [USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
        {},
        "messages[1].tool_calls[0]: ",
    ),
    "a label": ({"prompt": "a", "completion": "b", "label": "good"}, {"kind": "unpaired"}, "got 'good'"),
    "no prompt": ({"chosen": "a", "rejected": "b"}, {"kind": "preference"}, "expected a prompt"),
    "nothing shared": (
        {"chosen": [USER, BOT], "rejected": [SYSTEM, BOT]}, {"kind": "preference"}, "give what they share as prompt"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_records_that_do_not_fit_are_refused(case):
    fields, how, naming = WRONG[case]
    with refuses(naming=naming) as refused:
        read(fields, **how)
    assert str(refused.value).startswith("here: ")


def test_a_format_of_another_kind_is_refused():
    with refuses("data.format", RecipeError, naming="'chat', 'prompt', 'text'"):
        read({"messages": [USER]}, form="preference")


# --- files ------------------------------------------------------------------------------------------------------------

ROWS = [{"messages": [USER, BOT]}, {"messages": [USER, BOT | {"name": "bot"}]}, {"messages": [USER, OTHER]}]


def write(path, rows=ROWS):
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    table = pa.Table.from_pylist(rows)
    if path.suffix in (".jsonl", ".gz"):
        path.write_bytes(gzip.compress(lines) if path.suffix == ".gz" else lines)
    elif path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=2)
    else:
        path.mkdir()
        with pa.ipc.new_stream(path / "data.arrow", table.schema) as stream:
            stream.write_table(table)
        (path / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data.arrow"}]}))


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet", "dataset"])
def test_every_file_type_gives_the_same_records(tmp_path, name):
    write(tmp_path / name)
    assert [record.fields for record in records.from_path(str(tmp_path / name))] == ROWS


def test_a_folder_is_read_in_the_order_of_its_names(tmp_path):
    write(tmp_path / "b.jsonl", ROWS[1:])
    write(tmp_path / "a.jsonl", ROWS[:1])
    told = []
    found = list(records.from_path(str(tmp_path), lambda *said: told.append(said)))
    assert [record.fields for record in found] == ROWS
    assert found[2].where() == f"{tmp_path / 'b.jsonl'} line 2"
    assert told[-1][1] == told[-1][2], "the bar ends full"


def test_where_names_the_row_or_the_record(tmp_path):
    write(tmp_path / "a.parquet")
    assert list(records.from_path(str(tmp_path)))[2].where() == f"{tmp_path / 'a.parquet'} row 3"
    assert [record.where() for record in records.from_list(ROWS)][1] == "record 1"


def test_files_without_records_are_refused(tmp_path):
    (tmp_path / "a.txt").write_text("hi")
    with refuses("data.path", naming=str(tmp_path)):
        list(records.from_path(str(tmp_path)))
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n[1]\n')
    found = list(records.from_path(str(tmp_path / "a.jsonl")))[1]  # what comes after it is read all the same
    with refuses(naming="a.jsonl line 2: "):
        example(found, "sft")
    with refuses(naming="record 1: "):
        example(list(records.from_list([{}, "hi"]))[1], "sft")
    with refuses("data", naming="got dict"):
        list(records.from_list({"messages": []}))


# --- settings ---------------------------------------------------------------------------------------------------------


def test_settings_are_read_from_a_recipe():
    found = recipe.read(TuningData, {"path": "x.jsonl", "keys": {"messages": "dialogue"}, "held_out": 0.1})
    assert found.all_sources == (TuningSource("x.jsonl", keys=Keys(messages="dialogue")),)
    several = {
        "sources": [{"path": "a", "keys": {"prompt": "q"}}, {"path": "b"}],
        "keys": {"prompt": "p", "tools": "t"},
    }
    sources = recipe.read(TuningData, several).all_sources
    assert recipe.read(TuningData, recipe.dump(TuningData(path="a", keys=Keys(label="good")))).keys.label == "good"
    assert [source.keys for source in sources] == [Keys(prompt="q", tools="t"), Keys(prompt="p", tools="t")]


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"format": "chats"}, "format"),
        ({"overlong": "drop"}, "overlong"),
        ({"held_out": 1.5}, "held_out"),
        ({"path": "a", "sources": [{"path": "b"}]}, "path"),
        ({"sources": [{"path": "b", "weight": 0}]}, "sources.0.weight"),
    ],
)
def test_bad_settings_are_refused(given, param):
    with refuses(param, RecipeError):
        recipe.read(TuningData, given)


def test_an_unknown_key_is_refused_with_the_closest_one():
    with refuses("keys.message", RecipeError, code="unknown_key", naming="keys.messages"):
        recipe.read(TuningData, {"keys": {"message": "x"}})
