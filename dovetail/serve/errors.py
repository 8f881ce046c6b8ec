"""ApiError: errors as clients read them, in OpenAI's shape (in Anthropic's on its routes). Of an internal error the
client gets only an id, under which the log has the details."""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from fastapi import Response

from dovetail.engine.controls import EngineDied
from dovetail.serve.request_context import traceback_text

log = logging.getLogger(__name__)
RETRY_SECONDS = 5  # after a 503: a restart, or waking up, takes about that time

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
    """An answer that is an error."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.retry_after = retry_after

    def body(self, path: str) -> dict[str, Any]:
        ours, anthropics = _TYPES.get(self.status, _INTERNAL)
        if is_anthropic(path):
            return {"type": "error", "error": {"type": anthropics, "message": self.message}}
        return {"error": {"message": self.message, "type": ours, "param": self.param, "code": self.code}}

    def response(self, path: str) -> Response:
        headers = {} if self.retry_after is None else {"retry-after": str(self.retry_after)}
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        if self.code == "stopping":  # the next request must go to another server
            headers["connection"] = "close"
        content = msgspec.json.encode(self.body(path))
        return Response(content, self.status, headers, media_type="application/json")


def bad(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def is_anthropic(path: str) -> bool:
    return path.startswith("/v1/messages")


# Names that the engine's messages begin with and that are parameters of a request.
_PARAMETERS = frozenset(
    "n max_tokens min_tokens temperature top_k top_p min_p presence_penalty frequency_penalty repetition_penalty seed "
    "logit_bias allowed_token_ids bad_words stop stop_token_ids logprobs prompt_logprobs priority cache_salt "
    "tool_choice tools prompt".split()
)


def refused(error: ValueError) -> ApiError:
    """400 for a ValueError about a request. Such messages begin with the name of the parameter that is wrong."""
    message = str(error)
    first = message.partition(" ")[0].partition("[")[0].partition("=")[0].rstrip(":")
    return bad(message, param=first if first in _PARAMETERS else None)


def as_api_error(error: BaseException) -> ApiError:
    """Any failure, as an error that a client may see."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EngineDied):
        log.error("the engine died during a request")  # the engine's own log has the reason
        return ApiError(
            503, "the engine has stopped; try again in a moment", code="engine_died", retry_after=RETRY_SECONDS
        )
    id = uuid.uuid4().hex[:12]
    log.error("request failed, error id %s\n%s", id, traceback_text(error))
    return ApiError(500, f"something went wrong in the server; its log has it under {id}", code="internal_error")


def from_validation(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """The most telling of pydantic's errors: a field refused by name, else the deepest, and among those one whose value
    has the right type, or the last in its list (of a union's members, the one that was meant fails furthest in)."""
    named = [each for each in errors if each["type"] in ("unknown_field", "refused_field")]
    error = named[0] if named else max(errors, key=_depth)
    where = _param(error["loc"])
    if named:
        where = f"{where}.{error['ctx']['name']}" if where else error["ctx"]["name"]
        return bad(error["msg"], where, error["type"])
    if error["type"] == "json_invalid":
        return bad("the request's body is not JSON", code="json_invalid")
    if error["type"] == "missing":
        return bad(f"{where or 'body'} is missing", where, "missing_required_parameter")
    message = str(error["msg"]).removeprefix("Value error, ") + _got(error)
    return bad(f"{where}: {message}" if where else f"the request's body: {message}", where, "invalid_value")


def _depth(error: Mapping[str, Any]) -> tuple[int, bool, int]:
    last = error["loc"][-1] if error["loc"] else None
    return len(error["loc"]), not error["type"].endswith("_type"), last if isinstance(last, int) else -1


def _got(error: Mapping[str, Any]) -> str:
    """The value that came, if it is short."""
    given = error.get("input")
    is_short = isinstance(given, bool | int | float) or (isinstance(given, str) and len(given) <= 40)
    return f"; got {json.dumps(given)}" if is_short else ""


_LABELS = {"str", "int", "float", "bool", "body", "query", "constrained-str", "constrained-int", "json", "none"}


def _param(loc: Sequence[Any]) -> str | None:
    """("body", "messages", 0, "content", "list[Part]", 1) -> messages.0.content.1: labels of unions are left out."""
    parts = [str(part) for part in loc if isinstance(part, int) or _is_field(part)]
    return ".".join(parts) or None


def _is_field(part: str) -> bool:
    return part not in _LABELS and part.isidentifier() and not part[0].isupper()
