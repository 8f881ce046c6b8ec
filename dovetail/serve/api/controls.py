"""The operator's controls: profiles, sleep, pause, the prefix cache, weights and adapters.

Their arguments come in the query, as vLLM's users send them, or in a JSON body.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, ClassVar, NamedTuple, TypeVar

from fastapi import APIRouter, Depends, Request, Response
from pydantic import Field, ValidationError

from dovetail.core.errors import RequestError
from dovetail.serve.api.delivery import json_answer
from dovetail.serve.api.requests import Body, Flag, Int, RefusedField
from dovetail.serve.errors import from_validation
from dovetail.serve.talk.service import Service

B = TypeVar("B", bound=Body)
_KEEP = "running requests wait and continue afterwards"  # vLLM's mode keep


class SleepRequest(Body):
    """The arguments of /sleep."""

    level: Annotated[Int, Field(ge=1, le=2)] = 1
    refused: ClassVar = {"mode": RefusedField(_KEEP, ("keep",))}


class WakeRequest(Body):
    """The arguments of /wake_up: none."""

    refused: ClassVar = {"tags": RefusedField("weights and pages come back together")}


class PauseRequest(Body):
    """The arguments of /pause: none."""

    refused: ClassVar = {
        "mode": RefusedField(_KEEP, ("keep",)),
        "wait_for_inflight_requests": RefusedField(_KEEP, (False,)),
        "clear_cache": RefusedField("send /reset_prefix_cache", (False,)),
    }


class ResetRequest(Body):
    """The arguments of /reset_prefix_cache: none."""

    refused: ClassVar = {
        "reset_running_requests": RefusedField("running requests keep their pages", (False,)),
        "reset_external": RefusedField("there is no cache outside the engine", (False,)),
    }


class WeightsRequest(Body):
    """The arguments of /update_weights."""

    path: Annotated[str, Field(min_length=1)]
    refused: ClassVar = {"reset_prefix_cache": RefusedField("new weights always reset the prefix cache", (True,))}


class LoadAdapterRequest(Body):
    """The arguments of /v1/load_lora_adapter."""

    lora_name: Annotated[str, Field(min_length=1)]
    lora_path: Annotated[str, Field(min_length=1)]
    wait: Flag = True  # for a slot, if running requests use all of them; false: 409
    refused: ClassVar = {
        "load_inplace": RefusedField("an adapter of the same name is always replaced", (True,)),
        "is_3d_lora_weight": RefusedField("adapters of experts are not served", (False,)),
    }


class UnloadAdapterRequest(Body):
    """The arguments of /v1/unload_lora_adapter."""

    lora_name: Annotated[str, Field(min_length=1)]
    wait: Flag = True  # for running requests to end; false: 409 while there are any
    refused: ClassVar = {"lora_int_id": RefusedField("an adapter is known by its name")}


class ControlRoute(NamedTuple):
    """A route that runs one of the engine's controls."""

    control: str  # one of engine.interface.CONTROLS
    body: type[Body]  # its fields are the control's arguments, by name (see _ARGUMENTS)
    status: str | None  # in the answer; None: the answer is the control's result, a version of the weights
    help: str | None = None
    check: Callable[[Service, Any], None] | None = None  # of the body, before the engine is called


_ARGUMENTS = {"lora_name": "name", "lora_path": "path"}  # vLLM's names of fields -> the controls' argument names
CONTROL_ROUTES = {
    "/sleep": ControlRoute(
        "sleep", SleepRequest, "asleep",
        "Free the device's memory; level 2 drops the weights too. Requests get 503 until /wake_up.",
    ),
    "/wake_up": ControlRoute("wake_up", WakeRequest, "awake", "Take the device's memory again."),
    "/pause": ControlRoute(
        "pause", PauseRequest, "paused", "Take no more steps until /resume: running requests wait, new ones get 503."
    ),
    "/resume": ControlRoute("resume", Body, "running", "Continue after /pause."),
    "/reset_prefix_cache": ControlRoute("reset_prefix_cache", ResetRequest, "empty", "Empty the prefix cache."),
    "/update_weights": ControlRoute(
        "update_weights", WeightsRequest, None,
        "Load weights from a path on the server's machine and swap them in between two steps.",
    ),
    "/v1/load_lora_adapter": ControlRoute(
        "load_adapter", LoadAdapterRequest, None,
        "Load an adapter in PEFT's format from a folder on the server's machine; requests name it as their model.",
        lambda service, asked: service.check_adapter(asked.lora_name),
    ),
    "/v1/unload_lora_adapter": ControlRoute(
        "unload_adapter", UnloadAdapterRequest, "unloaded",
        "Refuse new requests for an adapter, wait for running ones, and drop it.",
    ),
}  # fmt: skip
PROFILE_ROUTES = ("/start_profile", "/stop_profile")


def profile(service: Service, folder: str) -> APIRouter:
    """Return the routes of the profiler, for which the gate requires the admin key: they slow all requests down."""
    router = APIRouter()

    @router.post("/start_profile")
    async def start_profile(_: Body = Depends(_arguments(Body))) -> Response:
        """Write a trace for xprof to the server's --profile-dir, until /stop_profile."""
        await service.engine.start_profile(folder)
        return json_answer({"status": "profiling"})

    @router.post("/stop_profile")
    async def stop_profile(_: Body = Depends(_arguments(Body))) -> Response:
        """Stop the trace."""
        await service.engine.stop_profile()
        return json_answer({"status": "written"})

    return router


def admin(service: Service) -> APIRouter:
    """Return the control routes, for which the gate requires the admin key."""
    router = APIRouter()
    for path, route in CONTROL_ROUTES.items():
        extra = _described(route.body) if route.body.model_fields else None
        add = router.post(path, name=path.strip("/"), description=route.help, openapi_extra=extra)
        add(_endpoint(service, route))
    return router


def _endpoint(service: Service, route: ControlRoute) -> Callable[..., Awaitable[Response]]:
    async def control(asked: Body = Depends(_arguments(route.body))) -> Response:
        if route.check is not None:
            route.check(service, asked)
        args = {_ARGUMENTS.get(name, name): value for name, value in asked.model_dump().items()}
        result = await service.engine.control(route.control, **args)
        return json_answer({"weights_version": result} if route.status is None else {"status": route.status})

    return control


def _arguments(kind: type[B]) -> Callable[[Request], Awaitable[B]]:
    """Return a dependency that reads a `kind` from the request's query and body."""

    async def read(request: Request) -> B:
        given = _object(await request.body())
        for name, text in request.query_params.multi_items():
            if name in given:
                raise RequestError(f"`{name}` is given twice: send it once, in the query or in the body", param=name)
            given[name] = _value(kind, name, text)
        try:
            return kind.model_validate(given)
        except ValidationError as error:
            raise from_validation(error.errors()) from None

    return read


def _described(kind: type[Body]) -> dict[str, Any]:
    """Return the arguments for the OpenAPI description, which FastAPI cannot derive from the dependency."""
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
        raise RequestError("the request body is not valid JSON", code="json_invalid") from None
    if not isinstance(found, dict):
        raise RequestError("the request body must be a JSON object", code="invalid_value")
    return found


def _value(kind: type[Body], name: str, text: str) -> Any:
    """Return a query's text as a number or a flag if it is one, unless the field is a string."""
    field = kind.model_fields.get(name)
    if field is not None and field.annotation is str:
        return text
    try:
        found = json.loads(text.lower())
    except (ValueError, RecursionError):
        return text
    return found if isinstance(found, bool | int | float) else text
