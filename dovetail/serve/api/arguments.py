"""The arguments of the control routes: in the query, as vLLM's users send them, or in a JSON body. None is ignored."""

from __future__ import annotations

import json
from typing import Any, TypeVar

from fastapi import Depends, Request
from pydantic import ValidationError

from dovetail.serve.api.fields import Body
from dovetail.serve.errors import bad, from_validation

B = TypeVar("B", bound=Body)


def arguments(kind: type[B]) -> Any:
    """The default of a route's parameter: a `kind`, read from the request's query and body."""

    async def read(request: Request) -> B:
        given = _object(await request.body())
        for name, text in request.query_params.multi_items():
            if name in given:
                raise bad(f"{name} is given twice: send it once, in the query or in the body", name)
            given[name] = _value(kind, name, text)
        try:
            return kind.model_validate(given)
        except ValidationError as error:
            raise from_validation(error.errors()) from None

    return Depends(read)


def described(kind: type[Body]) -> dict[str, Any]:
    """The same arguments for the OpenAPI description, which FastAPI cannot derive from `arguments`."""
    schema = kind.model_json_schema()
    fields = schema.get("properties", {}).items()
    return {
        "parameters": [{"name": name, "in": "query", "required": False, "schema": each} for name, each in fields],
        "requestBody": {"required": False, "content": {"application/json": {"schema": schema}}},
    }


def _object(body: bytes) -> dict[str, Any]:
    try:
        found = json.loads(body) if body else {}
    except (ValueError, RecursionError):
        raise bad("the request's body is not JSON", code="json_invalid") from None
    if not isinstance(found, dict):
        raise bad("the request's body: expected a JSON object", code="invalid_value")
    return found


def _value(kind: type[Body], name: str, text: str) -> Any:
    """A query holds text only: a number or a flag is read as one, unless the field is a string."""
    field = kind.model_fields.get(name)
    if field is not None and field.annotation is str:
        return text
    try:
        found = json.loads(text.lower())
    except (ValueError, RecursionError):
        return text
    return found if isinstance(found, bool | int | float) else text
