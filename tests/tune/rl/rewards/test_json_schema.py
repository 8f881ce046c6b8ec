"""A completion's JSON against a schema: as the jsonschema package has it."""

import itertools
import json

import jsonschema
import pytest

from dovetail.tune.rl.rewards.json_schema import Json, check_schema, fits
from dovetail.tune.rl.rewards.scored import NoReward

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


def test_a_completion_may_hold_its_json_in_a_block():
    reward = Json({"type": "object", "required": ["a"]})
    texts = [
        '{"a": 1}',
        'Here:\n```json\n{"a": 1}\n```\nDone.',
        '{"a": 1} Done.',
        '{"b": 1}',
        '{"a": NaN}',
        "[" * 100_000,
    ]
    assert reward([""] * 6, texts) == [1, 1, 0, 0, 0, 0]
    assert Json()([""] * 2, ["[1]", "[1"]) == [1, 0]


def test_each_row_may_have_its_schema(tmp_path):
    reward = Json(column="schema")
    schemas = [{"type": "integer"}, '{"type": "string"}', None]
    assert reward([""] * 3, ["1", "1", "1"], schema=schemas) == [1, 0, None]
    bad, good = reward([""] * 2, ["1", "1"], schema=["{", {}])
    assert isinstance(bad, NoReward) and good == 1
    (tmp_path / "s.json").write_text('{"type": "string"}')
    assert Json(str(tmp_path / "s.json"))([""] * 2, ["1", '"x"']) == [0, 1]


@pytest.mark.parametrize(
    ("schema", "sentence"),
    [
        ({"minLenght": 3}, "Did you mean 'minLength'"),
        ({"properties": {"a": {"type": "int"}}}, "types must be of object"),
        ({"$ref": "https://example.com/x"}, "must be a place in it"),
        ({"$ref": "#/$defs/missing"}, "must be a place in it"),
        ("[1]", "No such file"),
    ],
)
def test_a_schema_that_is_not_understood_is_refused(schema, sentence):
    with pytest.raises((ValueError, OSError), match=sentence.replace("$", r"\$")):
        Json(schema)


def test_numbers_are_read_as_written():
    assert Json({"multipleOf": 0.1})([""] * 4, ["0.3", "0.35", "1e400", str(10**400)]) == [1, 0, 0, 1]


def test_values_do_not_share_truth():
    assert not any(fits(a, {"const": b}) for a, b in itertools.product([True, False], [0, 1]))
