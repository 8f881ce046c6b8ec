"""The HTTP application: every route, behind the gate."""

from __future__ import annotations

from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware

from dovetail import __version__
from dovetail.io.tokenizer import Tokenizer
from dovetail.serve import anthropic, chat, completions, ops, responses
from dovetail.serve.backend import Backend
from dovetail.serve.config import ServerConfig
from dovetail.serve.gate import Gate, handle_errors
from dovetail.serve.service import Service


def make_app(backend: Backend, tokenizer: Tokenizer, config: ServerConfig) -> FastAPI:
    """An ASGI application. It closes the backend when the server stops. Its Service is app.state.service."""
    service = Service(backend, tokenizer, config)

    @asynccontextmanager
    async def lifespan(_: FastAPI):
        yield
        await backend.close()

    app = FastAPI(title="Dovetail", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.service = service
    for router in (
        chat.routes,
        completions.routes,
        responses.routes,
        anthropic.routes,
        ops.models,
        ops.tokens,
        ops.state,
    ):
        app.include_router(router(service))
    if config.profile_dir is not None:
        app.include_router(ops.profile(service, config.profile_dir))
    if config.admin_key is not None:
        app.include_router(ops.admin(service))
    handle_errors(app)
    app.add_middleware(Gate, config=config)
    if config.allow_origins:  # outermost: an error must carry the headers too, or a browser hides it
        app.add_middleware(
            CORSMiddleware, allow_origins=config.allow_origins, allow_methods=["GET", "POST"], allow_headers=["*"]
        )
    return app
