"""The HTTP application: the page, the conversation and the diary.

GET /, /app.js, /style.css, /icon.svg    the page (page/)
GET /api/state                           the conversation, the models and today
GET /api/day?day=2026-11-18              the meals of a day and their totals
GET /api/events                          server-sent events: the diary has changed
GET /api/pictures/ID                     a picture of the conversation
GET /api/plate                           a drawn plate, to try a model without a photo
POST /api/messages                       a message; server-sent events of the answer (turn.py)
POST /api/conversations                  begin a new conversation
DELETE /api/meals/ID                     delete a meal
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, StreamingResponse
from pydantic import BaseModel, Field
from starlette.types import Receive, Scope, Send

from examples.assistant.database import connect
from examples.assistant.diary import Diary
from examples.assistant.foods import BUNDLED, FoodTable
from examples.assistant.guard import Guard
from examples.assistant.history import History
from examples.assistant.live import Listeners
from examples.assistant.model import Model, ModelChoice
from examples.assistant.picture import PictureError, clean, from_base64
from examples.assistant.plates import photo, random_meal
from examples.assistant.tools import FoodTools
from examples.assistant.turn import Turn

PAGE = Path(__file__).parent / "page"
FILES = {"app.js": "text/javascript", "style.css": "text/css", "icon.svg": "image/svg+xml"}
EVENTS = "text/event-stream"
WAIT_SECONDS = 1.0
PLATE_SIDE = 512  # pixels of a drawn plate


class Ask(BaseModel):
    """The body of a message: text, a picture in base64, or both, and the label of the model that answers."""

    text: str = Field("", max_length=4000)
    picture: str = ""
    model: str


@dataclass
class Assistant:
    """Hold what the routes share."""

    diary: Diary
    history: History
    tools: FoodTools
    models: dict[str, Model]
    listeners: Listeners
    answering: Ask | None = None

    async def wait_for_turn(self) -> None:
        """Wait until no answer is being written: turns of one conversation must not interleave.

        Raises:
            HTTPException: It is still written after WAIT_SECONDS, in which one that was stopped has ended.
        """
        end = time.monotonic() + WAIT_SECONDS
        while self.answering is not None:
            if time.monotonic() > end:
                raise HTTPException(409, "Another answer is being written. Wait for it, or stop it.")
            await asyncio.sleep(0.05)

    async def receive(self, ask: Ask) -> Turn:
        """Add a user's message to the history, and return the turn that answers it."""
        if not ask.text.strip() and not ask.picture:
            raise HTTPException(400, "Write something, or add a photo.")
        if ask.model not in self.models:
            raise HTTPException(400, f"There is no model {ask.model!r}; there are {', '.join(self.models)}.")
        model = self.models[ask.model]
        described = await model.describe()
        if described["error"]:
            raise HTTPException(503, described["error"])
        if ask.picture and described["no_images"]:
            raise HTTPException(400, described["no_images"])
        jpeg = await asyncio.to_thread(clean, from_base64(ask.picture)) if ask.picture else None
        self.history.add([{"role": "user", "content": ask.text.strip()}], jpeg)
        return Turn(model, self.history, self.tools.tools, not described["no_images"], self.diary.today)

    def release(self, ask: Ask) -> None:
        """Allow the next message, unless it was allowed before."""
        if self.answering is ask:
            self.answering = None

    async def answer(self, ask: Ask, turn: Turn) -> AsyncGenerator[str]:
        """Yield a turn as server-sent events."""
        async with aclosing(turn.run()) as events:
            async for event in events:
                if event["type"] == "done":  # the client may send its next message as soon as it reads this
                    self.release(ask)
                yield f"data: {json.dumps(event)}\n\n"


class AnswerResponse(StreamingResponse):
    """Stream an answer, and allow the next at its end, also if the client left before it began."""

    def __init__(self, assistant: Assistant, ask: Ask, turn: Turn) -> None:
        self._answer = assistant.answer(ask, turn)
        super().__init__(self._answer, media_type=EVENTS)
        self._release = lambda: assistant.release(ask)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        try:
            async with aclosing(self._answer):
                await super().__call__(scope, receive, send)
        finally:
            self._release()


def create_app(models: Sequence[ModelChoice], database: Path | str, foods: Path = BUNDLED) -> FastAPI:
    """Return the ASGI application.

    Args:
        models: The models of the page's switch; the first is chosen at the start.
        database: The SQLite file; created where it is missing.
        foods: The food table.
    """
    connection, listeners, client = connect(database), Listeners(), httpx.AsyncClient()

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with client:
            yield
        connection.close()

    diary = Diary(connection, changed=listeners.notify)
    assistant = Assistant(
        diary, History(connection), FoodTools(diary, FoodTable.read(foods)),
        {choice.label: Model(choice, client) for choice in models}, listeners,
    )  # fmt: skip
    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.listeners = listeners
    _page_routes(app)
    _conversation_routes(app, assistant)
    _diary_routes(app, assistant)
    _handle_errors(app)
    app.add_middleware(Guard)
    return app


def _page_routes(app: FastAPI) -> None:
    @app.get("/{name}")
    async def file(name: str) -> Response:
        if name not in FILES:
            raise HTTPException(404, f"There is no page /{name}.")
        return FileResponse(PAGE / name, media_type=FILES[name])

    @app.get("/")
    async def index() -> Response:
        return FileResponse(PAGE / "index.html")


def _conversation_routes(app: FastAPI, assistant: Assistant) -> None:
    @app.get("/api/state")
    async def state() -> dict[str, Any]:
        models = await asyncio.gather(*(model.describe() for model in assistant.models.values()))
        return {"messages": assistant.history.shown(), "models": models, "day": assistant.diary.day()}

    @app.post("/api/messages")
    async def send_message(ask: Ask) -> Response:
        await assistant.wait_for_turn()
        assistant.answering = ask
        try:
            return AnswerResponse(assistant, ask, await assistant.receive(ask))
        except BaseException:
            assistant.release(ask)
            raise

    @app.post("/api/conversations")
    async def new_conversation() -> dict[str, Any]:
        await assistant.wait_for_turn()
        assistant.history.clear()
        return {"messages": assistant.history.shown()}

    @app.get("/api/pictures/{id}")
    async def picture(id: int) -> Response:
        jpeg = assistant.history.picture(id)
        if jpeg is None:
            raise HTTPException(404, f"There is no picture {id}.")
        return Response(jpeg, media_type="image/jpeg")

    @app.get("/api/plate")
    async def plate() -> Response:
        seed = random.randrange(10**6, 10**9)  # not of a picture that train.py draws
        jpeg = await asyncio.to_thread(photo, random_meal(seed), seed, PLATE_SIDE)
        return Response(jpeg, media_type="image/jpeg", headers={"cache-control": "no-store"})


def _diary_routes(app: FastAPI, assistant: Assistant) -> None:
    @app.get("/api/day")
    async def day(day: date | None = None) -> dict[str, Any]:
        return assistant.diary.day(day.isoformat() if day else "")

    @app.get("/api/events")
    async def events() -> Response:
        return StreamingResponse(assistant.listeners.listen(), media_type=EVENTS)

    @app.delete("/api/meals/{id}")
    async def delete_meal(id: int) -> dict[str, Any]:
        entry = assistant.diary.delete(id)
        if entry is None:
            raise HTTPException(404, f"There is no entry {id}.")
        return entry


def _handle_errors(app: FastAPI) -> None:
    """Answer every error with a sentence, as {"error": ...}."""

    @app.exception_handler(HTTPException)
    async def http_error(_: Request, error: HTTPException) -> Response:
        return JSONResponse({"error": error.detail}, error.status_code)

    @app.exception_handler(PictureError)
    async def picture_error(_: Request, error: PictureError) -> Response:
        return JSONResponse({"error": str(error)}, 400)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        return JSONResponse({"error": f"{'.'.join(map(str, first['loc']))}: {first['msg']}."}, 422)
