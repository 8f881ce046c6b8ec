"""Structured output over the API.

Grammars over a limit are refused with the reason, and properties that a schema does not list are not generated.
"""

from __future__ import annotations

import json
import logging

import httpx
import pytest
from serve.api.test_api_tools import accepts
from serve.servers import SHORT_JSON

from dovetail.serve.request_context import MAX_TRACEBACK, traceback_text

pytestmark = pytest.mark.slow

MANY = {"type": "object", "properties": {f"secret{i}": {"type": "string"} for i in range(600)}}
WITHIN = {"type": "object", "properties": {"a": MANY}, "required": ["a"]}  # over the limit after some tokens
CHOICES = {"structured_outputs": {"choice": [f"secret {i}" for i in range(3000)]}}


def formatted(schema: dict, **more) -> dict:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **more}}}


def ask(real, **body) -> httpx.Response:
    asked = dict(messages=[{"role": "user", "content": "Answer."}], temperature=0, max_tokens=24) | body
    asked["logit_bias"] = SHORT_JSON
    return httpx.post(f"{real.url}/v1/chat/completions", json=asked, timeout=120)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (CHOICES, "3001 items; max is 2000"),
        (formatted(MANY), "max is 2000"),
        (formatted(WITHIN), "max is 2000"),
        (formatted({"$ref": "#"}), "no text matches this grammar"),
        ({"structured_outputs": {"json": '{"a":' * 3000 + "1" + "}" * 3000}}, "recursion"),
    ],
    ids=["choices", "optional properties", "optional properties within", "a reference to itself", "deep"],
)
def test_a_grammar_over_a_limit_is_refused_with_the_reason(real, caplog, body, reason):
    with caplog.at_level(logging.WARNING):
        answer = ask(real, **body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["type"] == "invalid_request_error" and reason in error["message"]
    assert "secret" not in answer.text and len(answer.text) < 1000
    assert not caplog.records, "neither the reason nor what the user sent belongs in the log"


def test_a_grammar_limit_reached_during_decoding_ends_only_that_stream(real):
    answer = ask(real, **formatted(WITHIN), stream=True)
    last = [line for line in answer.text.splitlines() if line][-1]
    error = json.loads(last.removeprefix("data: "))["error"]
    assert "max is 2000" in error["message"] and error["code"] == "structured_output_failed"
    assert ask(real, max_tokens=2).status_code == 200


def test_an_error_in_the_log_is_bounded():
    try:
        try:
            raise RuntimeError("secret\n" * 10**6)
        except RuntimeError as error:
            raise ValueError("x" * 10**6) from error
    except ValueError as error:
        text = traceback_text(error)
    assert len(text) <= MAX_TRACEBACK + 100 and text.count("secret") < 100
    assert "RuntimeError" in text and "ValueError" in text and "more characters" in text


# As instructor 1.17 sends it in its JSON_SCHEMA mode, for a pydantic model with another in it.
INSTRUCTOR = {
    "messages": [{"role": "user", "content": "Tom is a cat, 4 years old, who lives in Paris."}],
    "max_tokens": 96,
    "response_format": {
        "type": "json_schema",
        "json_schema": {
            "name": "User",
            "schema": {
                "$defs": {
                    "Address": {
                        "properties": {"city": {"title": "City", "type": "string", "maxLength": 16}},
                        "required": ["city"], "title": "Address", "type": "object",
                    }
                },
                "properties": {
                    "name": {"title": "Name", "type": "string", "maxLength": 16},
                    "age": {"title": "Age", "type": "integer"},
                    "kind": {"enum": ["cat", "dog"], "title": "Kind", "type": "string"},
                    "address": {"anyOf": [{"$ref": "#/$defs/Address"}, {"type": "null"}], "default": None},
                },
                "required": ["name", "age", "kind"], "title": "User", "type": "object",
            },
        },
    },
}  # fmt: skip


def test_a_request_of_instructor_is_answered_with_the_listed_properties(real):
    choice = ask(real, **INSTRUCTOR).json()["choices"][0]
    found = json.loads(choice["message"]["content"])
    assert choice["finish_reason"] == "stop" and {"name", "age", "kind"} <= set(found)
    assert set(found) <= {"name", "age", "kind", "address"} and set(found.get("address") or ()) <= {"city"}


PERSON = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
LISTED, INVENTED = '{"name": "Tom"}', '{"name": "Tom", "age": 4}'
SCHEMA = {"type": "json_schema", "name": "x", "schema": PERSON}
TALK = {"messages": [{"role": "user", "content": "Hi"}]}
CLAUDE = {"max_tokens": 9, **TALK}
TOOL = {"type": "function", "function": {"name": "f", "parameters": PERSON}}
CLAUDE_FORMAT = {"type": "json_schema", "schema": PERSON}
CLAUDE_TOOL = {"name": "f", "input_schema": PERSON}
CALL = '<tool_call>\n{"name": "f", "arguments": %s}\n</tool_call>'
BODIES = {
    "response_format": ("chat/completions", formatted(PERSON) | TALK, "%s"),
    "strict": ("chat/completions", formatted(PERSON, strict=True) | TALK, "%s"),
    "structured_outputs": ("completions", {"prompt": "Hi", "structured_outputs": {"json": json.dumps(PERSON)}}, "%s"),
    "tools": ("chat/completions", {"tools": [TOOL], "tool_choice": "required"} | TALK, CALL),
    "text.format": ("responses", {"input": "Hi", "text": {"format": SCHEMA}}, "%s"),
    "output_config": (
        "messages",
        {"output_config": {"format": {"type": "json_schema", "schema": PERSON}}} | CLAUDE,
        "%s",
    ),
    "Anthropic's tools": ("messages", {"tools": [CLAUDE_TOOL], "tool_choice": {"type": "any"}} | CLAUDE, CALL),
}


@pytest.mark.parametrize("name", BODIES)
def test_schemas_are_closed_on_every_route(scripted, tokenizer, name):
    path, body, written = BODIES[name]
    answer = httpx.post(f"{scripted.url}/v1/{path}", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    structured = scripted.engine.asked[-1][1].structured_outputs
    assert accepts(structured, tokenizer, written % LISTED)
    assert not accepts(structured, tokenizer, written % INVENTED)
