"""JSON schemas: the same verdicts as the jsonschema package."""

import itertools
import json

import jsonschema
import pytest
from refusals import refuses

from dovetail.core.errors import RecipeError
from dovetail.tune.rl.rewards.completion import NoReward
from dovetail.tune.rl.rewards.json_schema import JsonReward, check_schema, fits

SCHEMAS = [
    True,
    {"type": "integer"},
    {"type": ["number", "null"], "minimum": 1, "exclusiveMaximum": 5},
    {"multipleOf": 0.5},
    {"multipleOf": 3},
    {"enum": [1, "a", None, [1]]},
    {"const": True},
    {"type": "string", "minLength": 1, "maxLength": 3, "pattern": "^a"},
    {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 2, "uniqueItems": True},
    {"prefixItems": [{"type": "string"}], "items": {"type": "boolean"}},
    {"contains": {"const": 2}},
    {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"$ref": "#/$defs/name"}},
        "required": ["a"],
        "additionalProperties": False,
        "$defs": {"name": {"type": "string"}},
    },
    {"patternProperties": {"^x": {"type": "integer"}}, "additionalProperties": {"type": "string"}, "maxProperties": 2},
    {"propertyNames": {"maxLength": 1}, "minProperties": 1},
    {"anyOf": [{"type": "string"}, {"minimum": 3}]},
    {"oneOf": [{"type": "integer"}, {"minimum": 3}]},
    {"not": {"type": "object"}},
    {"if": {"type": "integer"}, "then": {"minimum": 2}, "else": {"type": "string"}},
    {"type": "object", "properties": {"next": {"$ref": "#"}}, "additionalProperties": False},
]
VALUES = [
    None, True, False, 0, 1, 1.0, 2, 2.5, 3, 0.3, 5, 10**400, "", "a", "abc", "abcd", "b", [], [1], [1, 1], [1, True],
    [1, 1.0], [2, 3, 4], ["a", True], ["a", 1], {}, {"a": 1}, {"a": 1, "b": "x"}, {"a": 1, "b": 2}, {"a": 1, "c": 2},
    {"x1": 1, "y": "s"}, {"x1": "s"}, {"next": {"next": {}}}, {"next": {"other": {}}},
]  # fmt: skip


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda s: json.dumps(s)[:40])
def test_it_agrees_with_jsonschema(schema):
    check_schema(schema)
    theirs = jsonschema.Draft202012Validator(schema)
    for value in VALUES:
        if schema == {"multipleOf": 0.5} and value == 10**400:
            continue  # no float holds it, and jsonschema divides floats
        assert fits(value, schema) == theirs.is_valid(value), value


def test_the_json_may_be_in_a_fenced_block():
    reward = JsonReward({"type": "object", "required": ["a"]})
    texts = [
        '{"a": 1}',
        'Here:\n```json\n{"a": 1}\n```\nDone.',
        '{"a": 1} Done.',
        '{"b": 1}',
        '{"a": NaN}',
        "[" * 100_000,
    ]
    assert reward([""] * 6, texts) == [1, 1, 0, 0, 0, 0]
    assert JsonReward()([""] * 2, ["[1]", "[1"]) == [1, 0]


def test_each_row_may_have_its_schema(tmp_path):
    reward = JsonReward(column="schema")
    schemas = [{"type": "integer"}, '{"type": "string"}', None]
    assert reward([""] * 3, ["1", "1", "1"], schema=schemas) == [1, 0, None]
    bad, good = reward([""] * 2, ["1", "1"], schema=["{", {}])
    assert isinstance(bad, NoReward) and good == 1
    (tmp_path / "s.json").write_text('{"type": "string"}')
    assert JsonReward(str(tmp_path / "s.json"))([""] * 2, ["1", '"x"']) == [0, 1]


@pytest.mark.parametrize(
    ("schema", "naming"),
    [
        ({"minLenght": 3}, "Did you mean 'minLength'"),
        ({"properties": {"a": {"type": "int"}}}, "int"),
        ({"$ref": "https://example.com/x"}, "https://example.com/x"),
        ({"$ref": "#/$defs/missing"}, "#/$defs/missing"),
    ],
)
def test_an_unsupported_schema_is_refused(schema, naming):
    with refuses("schema", RecipeError, naming=naming):
        JsonReward(schema)


def test_a_file_without_a_schema_is_refused(tmp_path):
    with refuses("schema", RecipeError, naming="no.json"):
        JsonReward(str(tmp_path / "no.json"))
    (tmp_path / "bad.json").write_text("{")
    with refuses("schema", RecipeError, naming="bad.json"):
        JsonReward(str(tmp_path / "bad.json"))


def test_multiples_are_decimal():
    assert JsonReward({"multipleOf": 0.1})([""] * 4, ["0.3", "0.35", "1e400", str(10**400)]) == [1, 0, 0, 1]


def test_booleans_do_not_equal_numbers():
    assert not any(fits(a, {"const": b}) for a, b in itertools.product([True, False], [0, 1]))
