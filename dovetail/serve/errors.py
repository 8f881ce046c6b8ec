"""What a client is told when something is wrong: OpenAI's error shape (Anthropic's on its routes), and no more than it
needs to know. What went wrong inside is logged under an id, and the id is all that goes out."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from fastapi import Response

from dovetail.engine.died import EngineDied

log = logging.getLogger(__name__)

# status -> (OpenAI's type, Anthropic's type)
_TYPES = {
    400: ("invalid_request_error", "invalid_request_error"),
    401: ("authentication_error", "authentication_error"),
    403: ("permission_error", "permission_error"),
    404: ("not_found_error", "not_found_error"),
    405: ("invalid_request_error", "invalid_request_error"),
    408: ("timeout_error", "timeout_error"),
    413: ("invalid_request_error", "request_too_large"),
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
    "tool_choice tools".split()
)


def refused(error: ValueError) -> ApiError:
    """A ValueError that says what is wrong with a request. Such messages begin with the name of what they are about."""
    message = str(error)
    first = message.partition(" ")[0].partition("[")[0].partition("=")[0].rstrip(":")
    return bad(message, param=first if first in _PARAMETERS else None)


def as_api_error(error: BaseException) -> ApiError:
    """Any failure, as what may be told of it."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EngineDied):
        log.error("the engine died under a request")  # what of is in the engine's own log
        return ApiError(503, "the engine has stopped; try again in a moment", code="engine_died", retry_after=5)
    id = uuid.uuid4().hex[:12]
    log.error("request failed, error id %s", id, exc_info=error)
    return ApiError(500, f"something went wrong in the server; its log has it under {id}", code="internal_error")


def from_validation(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """pydantic's list of errors as the one that says most: what we refuse by name, else what lies deepest (of a union's
    members, the one that was meant fails furthest in)."""
    named = [each for each in errors if each["type"] in ("unknown_field", "refused_field")]
    error = named[0] if named else max(errors, key=lambda each: len(each["loc"]))
    where = _param(error["loc"])
    if named:
        where = f"{where}.{error['ctx']['name']}" if where else error["ctx"]["name"]
        return bad(error["msg"], where, error["type"])
    if error["type"] == "json_invalid":
        return bad("the request's body is not JSON", code="json_invalid")
    if error["type"] == "missing":
        return bad(f"{where or 'body'} is missing", where, "missing_required_parameter")
    message = str(error["msg"]).removeprefix("Value error, ")
    return bad(f"{where}: {message}" if where else f"the request's body: {message}", where, "invalid_value")


_LABELS = {"str", "int", "float", "bool", "body", "query", "constrained-str", "constrained-int", "json", "none"}


def _param(loc: Sequence[Any]) -> str | None:
    """("body", "messages", 0, "content", "list[Part]", 1) -> messages.0.content.1: labels of unions are left out."""
    parts = [str(part) for part in loc if isinstance(part, int) or _is_field(part)]
    return ".".join(parts) or None


def _is_field(part: str) -> bool:
    return part not in _LABELS and part.isidentifier() and not part[0].isupper()
