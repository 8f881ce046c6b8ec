"""ApiError: an error as clients receive it, in OpenAI's format, or in Anthropic's on its routes.

Routes raise RequestError (status 400) for anything wrong with a request, and ApiError for every other status. Any
exception that is not a UserError is answered with status 500 and the request's id; the log has the traceback.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from fastapi import Response

from dovetail.core.errors import RequestError, UserError
from dovetail.engine.interface import EngineDied
from dovetail.serve.request_context import request_id, traceback_text

log = logging.getLogger(__name__)
RETRY_SECONDS = 5  # retry-after of a 503: a restart of the engine or waking up takes about this long
IN_USE = "in_use"  # code of a control that was asked not to wait for running requests

# status -> (OpenAI's type, Anthropic's type)
_TYPES = {
    400: ("invalid_request_error", "invalid_request_error"),
    401: ("authentication_error", "authentication_error"),
    403: ("permission_error", "permission_error"),
    404: ("not_found_error", "not_found_error"),
    405: ("invalid_request_error", "invalid_request_error"),
    408: ("timeout_error", "timeout_error"),
    409: ("conflict_error", "invalid_request_error"),
    413: ("invalid_request_error", "request_too_large"),
    415: ("invalid_request_error", "invalid_request_error"),
    431: ("invalid_request_error", "invalid_request_error"),
    429: ("rate_limit_error", "rate_limit_error"),
    503: ("service_unavailable_error", "overloaded_error"),
    504: ("timeout_error", "timeout_error"),
}
_INTERNAL = ("internal_server_error", "api_error")


class ApiError(Exception):
    """Answer a request with an error status."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
        request_id: str | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.retry_after, self.request_id = retry_after, request_id

    def body(self, path: str) -> dict[str, Any]:
        """Return the JSON body in the format of the route's API."""
        openai, anthropic = _TYPES.get(self.status, _INTERNAL)
        more = {} if self.request_id is None else {"request_id": self.request_id}
        if path.startswith("/v1/messages"):
            return {"type": "error", "error": {"type": anthropic, "message": self.message}, **more}
        return {"error": {"message": self.message, "type": openai, "param": self.param, "code": self.code, **more}}

    def response(self, path: str) -> Response:
        """Return the HTTP response for a request to `path`."""
        headers = {} if self.retry_after is None else {"retry-after": str(self.retry_after)}
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        if self.code == "stopping":  # the client's next request must go to another server
            headers["connection"] = "close"
        content = msgspec.json.encode(self.body(path))
        return Response(content, self.status, headers, media_type="application/json")


def as_api_error(error: BaseException) -> ApiError:
    """Return any failure as an error that a client may see; log it if it is not the client's."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, UserError):
        in_use = error.code == IN_USE
        retry_after = RETRY_SECONDS if in_use else None
        return ApiError(409 if in_use else 400, str(error), param=error.param, code=error.code, retry_after=retry_after)
    if isinstance(error, EngineDied):
        log.error("request %s: the engine died", request_id())  # the engine process has logged the reason
        message = "the engine has stopped and is being restarted: try again in a moment"
        return ApiError(503, message, code="engine_died", retry_after=RETRY_SECONDS)
    id = request_id()
    log.error("request %s failed\n%s", id, traceback_text(error))
    return ApiError(500, f"internal server error (request id {id})", code="internal_error", request_id=id)


def from_validation(errors: Sequence[Mapping[str, Any]]) -> RequestError:
    """Return the most helpful of pydantic's errors.

    A field that is refused by name comes first. Otherwise the deepest error is chosen, because in a union the member
    that was meant fails furthest in; among equals, one whose value has the right type, or the last in a list.
    """
    named = [each for each in errors if each["type"] in ("unknown_field", "refused_field")]
    error = named[0] if named else max(errors, key=_depth)
    where = _param(error["loc"])
    if named:
        where = f"{where}.{error['ctx']['name']}" if where else error["ctx"]["name"]
        return RequestError(error["msg"], param=where, code=error["type"])
    if error["type"] == "json_invalid":
        return RequestError("the request body is not valid JSON", code="json_invalid")
    if error["type"] == "missing":
        return RequestError(f"{where or 'body'} is missing", param=where, code="missing_required_parameter")
    message = str(error["msg"]).removeprefix("Value error, ") + _got(error)
    return RequestError(f"{where or 'the request body'}: {message}", param=where, code="invalid_value")


def _depth(error: Mapping[str, Any]) -> tuple[int, bool, int]:
    last = error["loc"][-1] if error["loc"] else None
    return len(error["loc"]), not error["type"].endswith("_type"), last if isinstance(last, int) else -1


def _got(error: Mapping[str, Any]) -> str:
    """Return the rejected value as text if it is short."""
    given = error.get("input")
    is_short = isinstance(given, bool | int | float) or (isinstance(given, str) and len(given) <= 40)
    return f"; got {json.dumps(given)}" if is_short else ""


_LABELS = {"str", "int", "float", "bool", "body", "query", "constrained-str", "constrained-int", "json", "none"}


def _param(loc: Sequence[Any]) -> str | None:
    """Return the path of a field without pydantic's labels of unions.

    ("body", "messages", 0, "content", "list[Part]", 1) becomes `messages.0.content.1`.
    """
    parts = [str(part) for part in loc if isinstance(part, int) or _is_field(part)]
    return ".".join(parts) or None


def _is_field(part: str) -> bool:
    return part not in _LABELS and part.isidentifier() and not part[0].isupper()
