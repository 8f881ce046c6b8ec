"""Closed JSON schemas: they allow listed properties only."""

from __future__ import annotations

import copy

import jsonschema
import pytest
from refusals import refuses

from dovetail.core.json_schema import closed

TEXT = {"type": "string"}
A = {"type": "object", "properties": {"a": TEXT}, "required": ["a"]}
B = {"type": "object", "properties": {"b": TEXT}, "required": ["b"]}
CASES = {  # schema, what fits, what does not
    "properties": (A, {"a": "x"}, {"a": "x", "z": 1}),
    "no properties": (A | {"properties": {}, "required": []}, {}, {"z": 1}),
    "patterns": ({"patternProperties": {"^x": TEXT}}, {"x1": "y"}, {"z": "y"}),
    "within": ({"properties": {"in": A}}, {"in": {"a": "x"}}, {"in": {"a": "x", "z": 1}}),
    "items": ({"items": A}, [{"a": "x"}], [{"a": "x", "z": 1}]),
    "a property called properties": ({"properties": {"properties": TEXT}}, {"properties": "x"}, {"z": 1}),
    "definitions": ({"$defs": {"A": A}, "$ref": "#/$defs/A"}, {"a": "x"}, {"a": "x", "z": 1}),
    "anyOf": ({"anyOf": [A, B]}, {"b": "x"}, {"a": "x", "b": "x"}),
    "allOf": ({"allOf": [A, B]}, {"a": "x", "b": "x"}, {"a": "x", "b": "x", "z": 1}),
    "allOf of one": ({"$defs": {"A": A}, "allOf": [{"$ref": "#/$defs/A"}]}, {"a": "x"}, {"a": "x", "z": 1}),
    "properties and a reference": ({"$defs": {"A": A}, "$ref": "#/$defs/A"} | B, {"a": "x", "b": "x"}, {"b": "x"}),
    "one of two": (A | {"anyOf": [B, {"properties": {"c": TEXT}}]}, {"a": "x", "c": "y"}, {"a": "x", "z": 1}),
    "recursive": (
        {
            "$defs": {"T": {"allOf": [A, {"properties": {"kids": {"items": {"$ref": "#/$defs/T"}}}}]}},
            "$ref": "#/$defs/T",
        },
        {"a": "x", "kids": [{"a": "y", "kids": []}]},
        {"a": "x", "kids": [{"a": "y", "z": 1}]},
    ),
}
OPEN = {
    "any object": ({"type": "object"}, {"z": 1}),
    "allowed": (A | {"additionalProperties": True}, {"a": "x", "z": 1}),
    "allowed of a type": (A | {"additionalProperties": {"type": "integer"}}, {"a": "x", "z": 1}),
    "allowed by one part": ({"allOf": [A | {"additionalProperties": True}, B]}, {"a": "x", "b": "x", "z": 1}),
    "no object": ({"enum": [{"properties": {}}]}, {"properties": {}}),
}


@pytest.mark.parametrize("name", CASES)
def test_unlisted_properties_are_forbidden(name: str):
    schema, fits, does_not = CASES[name]
    before = copy.deepcopy(schema)
    found = closed(schema)
    jsonschema.validate(fits, found)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(does_not, found)
    assert schema == before


@pytest.mark.parametrize("name", OPEN)
def test_properties_that_the_schema_allows_stay_allowed(name: str):
    schema, fits = OPEN[name]
    jsonschema.validate(fits, closed(schema))


def test_depth_is_bounded():
    schema: dict = {}
    for _ in range(200):
        schema = {"properties": {"a": schema}}
    with refuses(naming="100 levels"):
        closed(schema)
