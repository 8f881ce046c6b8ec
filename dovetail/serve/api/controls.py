"""The controls, for the operator of the server: profiles, sleep, pause, the prefix cache, weights and adapters.

The arguments of the control routes: in the query, as vLLM's users send them, or in a JSON body. None is ignored."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, ClassVar, NamedTuple, TypeVar

from fastapi import APIRouter, Depends, Request, Response
from pydantic import Field, ValidationError

from dovetail.core.errors import UserError
from dovetail.engine.controls import InUse
from dovetail.serve.api.delivery import json_answer
from dovetail.serve.api.requests import Body, Flag, Int, RefusedField
from dovetail.serve.errors import RETRY_SECONDS, ApiError, bad, from_validation, refused
from dovetail.serve.talk.service import Service

T = TypeVar("T")
_WAIT = "requests under way wait, and go on afterwards"  # vLLM's mode keep


class SleepRequest(Body):
    level: Annotated[Int, Field(ge=1, le=2)] = 1
    refused: ClassVar = {"mode": RefusedField(_WAIT, ("keep",))}


class WakeRequest(Body):
    refused: ClassVar = {"tags": RefusedField("weights and pages come back together")}


class PauseRequest(Body):
    refused: ClassVar = {
        "mode": RefusedField(_WAIT, ("keep",)),
        "wait_for_inflight_requests": RefusedField(_WAIT, (False,)),
        "clear_cache": RefusedField("send /reset_prefix_cache", (False,)),
    }


class ResetRequest(Body):
    refused: ClassVar = {
        "reset_running_requests": RefusedField("running requests keep their pages", (False,)),
        "reset_external": RefusedField("there is no cache outside the engine", (False,)),
    }


class WeightsRequest(Body):
    path: Annotated[str, Field(min_length=1)]


class LoadAdapterRequest(Body):
    lora_name: Annotated[str, Field(min_length=1)]
    lora_path: Annotated[str, Field(min_length=1)]
    wait: Flag = True  # for a place, where requests under way need all of them; false: 409
    refused: ClassVar = {
        "load_inplace": RefusedField("an adapter of the same name is always replaced", (True,)),
        "is_3d_lora_weight": RefusedField("adapters of experts are not served", (False,)),
    }


class UnloadAdapterRequest(Body):
    lora_name: Annotated[str, Field(min_length=1)]
    wait: Flag = True  # for the requests under way to end; false: 409 while there are any
    refused: ClassVar = {"lora_int_id": RefusedField("an adapter is known by its name")}


class ControlRoute(NamedTuple):
    control: str  # one of engine.controls
    body: type[Body]  # its fields are the control's arguments, in their order
    status: str | None  # what the answer says; None: the control's own answer, a version of the weights
    help: str | None = None
    check: Callable[[Service, Any], None] | None = None  # of the body, before the engine is asked


CONTROL_ROUTES = {
    "/sleep": ControlRoute(
        "sleep", SleepRequest, "asleep",
        "Free the device's memory; level 2 drops the weights too. Requests get 503 until /wake_up.",
    ),
    "/wake_up": ControlRoute("wake_up", WakeRequest, "awake"),
    "/pause": ControlRoute(
        "pause", PauseRequest, "paused", "No more steps until /resume: requests under way wait, new ones get 503."
    ),
    "/resume": ControlRoute("resume", Body, "running"),
    "/reset_prefix_cache": ControlRoute("reset_prefix_cache", ResetRequest, "empty"),
    "/update_weights": ControlRoute(
        "update_weights", WeightsRequest, None,
        "Load weights from a path on the server's machine and swap them in between two steps.",
    ),
    "/v1/load_lora_adapter": ControlRoute(
        "load_adapter", LoadAdapterRequest, None,
        "Load an adapter from a folder on the server's machine, as PEFT writes it; requests name it as their model.",
        lambda service, asked: service.check_adapter(asked.lora_name),
    ),
    "/v1/unload_lora_adapter": ControlRoute(
        "unload_adapter", UnloadAdapterRequest, "unloaded",
        "Take no more requests for an adapter, wait for those under way, and drop it.",
    ),
}  # fmt: skip


PROFILE_ROUTES = ("/start_profile", "/stop_profile")


def profile(service: Service, folder: str) -> APIRouter:
    """Profiles slow all requests down and fill the server's disk: the gate checks the admin key."""
    router = APIRouter()

    @router.post("/start_profile")
    async def start_profile(_: Body = arguments(Body)) -> Response:
        """Write a trace for xprof to the server's --profile-dir, until /stop_profile."""
        await _done(service.backend.start_profile(folder))
        return json_answer({"status": "profiling"})

    @router.post("/stop_profile")
    async def stop_profile(_: Body = arguments(Body)) -> Response:
        await _done(service.backend.stop_profile())
        return json_answer({"status": "written"})

    return router


def admin(service: Service) -> APIRouter:
    """For reinforcement learning and operations. The gate checks the admin key before each of these."""
    router = APIRouter()
    for path, route in CONTROL_ROUTES.items():
        extra = described(route.body) if route.body.model_fields else None
        add = router.post(path, name=path.strip("/"), description=route.help, openapi_extra=extra)
        add(_endpoint(service, route))
    return router


def _endpoint(service: Service, route: ControlRoute) -> Callable[..., Awaitable[Response]]:
    async def control(asked: Body = arguments(route.body)) -> Response:
        if route.check is not None:
            route.check(service, asked)
        answer = await _done(service.backend.control(route.control, *asked.model_dump().values()))
        return json_answer({"weights_version": answer} if route.status is None else {"status": route.status})

    return control


async def _done(call: Awaitable[T]) -> T:
    try:
        return await call
    except InUse as error:
        raise ApiError(409, str(error), code="in_use", retry_after=RETRY_SECONDS) from None
    except UserError as error:
        raise refused(error) from None


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
