"""Structured output over the API: grammars over a limit are refused with the reason, and properties that a schema does
not list are not written."""

from __future__ import annotations

import json
import logging

import httpx
import pytest

from dovetail.serve.log_text import LONGEST, traceback_text

pytestmark = pytest.mark.slow

MANY = {"type": "object", "properties": {f"secret{i}": {"type": "string"} for i in range(600)}}
WITHIN = {"type": "object", "properties": {"a": MANY}, "required": ["a"]}  # over the limit after some tokens
CHOICES = {"structured_outputs": {"choice": [f"secret {i}" for i in range(3000)]}}


def formatted(schema: dict) -> dict:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


def ask(real, **body) -> httpx.Response:
    asked = dict(messages=[{"role": "user", "content": "Answer."}], temperature=0, max_tokens=24) | body
    return httpx.post(f"{real.url}/v1/chat/completions", json=asked, timeout=120)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (CHOICES, "3001 items; max is 2000"),
        (formatted(MANY), "max is 2000"),
        (formatted(WITHIN), "max is 2000"),
        (formatted({"$ref": "#"}), "no text fits this grammar"),
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


def test_a_limit_met_under_way_ends_that_stream_alone(real):
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
    assert len(text) <= LONGEST + 100 and text.count("secret") < 100
    assert "RuntimeError" in text and "ValueError" in text and "more characters" in text
