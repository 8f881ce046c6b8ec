"""The HTTP application: every route, behind the gate."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from starlette.types import Lifespan

from dovetail import __version__
from dovetail.io.tokenizer import Tokenizer
from dovetail.serve.api import anthropic, chat, completions, controls, pooling, responses, status
from dovetail.serve.config import ServerConfig
from dovetail.serve.http.gate import Gate, handle_errors
from dovetail.serve.http.long_bodies import LongBodies
from dovetail.serve.media.loader import LoadsImages, MediaLoader
from dovetail.serve.remote.client import EngineClient
from dovetail.serve.talk.service import Service

if TYPE_CHECKING:
    from dovetail.io.images.processor import ImageProcessor


def make_app(
    engine: EngineClient, tokenizer: Tokenizer, config: ServerConfig, processor: ImageProcessor | None = None
) -> FastAPI:
    """Return the ASGI application, with its Service as app.state.service. It closes the engine when it stops.

    Args:
        engine: The engine.
        tokenizer: The model's.
        config: The server's options.
        processor: Processes images for the model; None for a model that reads text only.
    """
    images = None if processor is None else MediaLoader(processor, config)
    long = LongBodies(engine, tokenizer, config, None if images is None else images.placeholder)

    @asynccontextmanager
    async def lifespan(_: FastAPI):
        starting = asyncio.create_task(long.start()) if images else None  # nearly every body with an image is long
        yield
        if starting is not None:
            starting.cancel()
        long.close()
        app.state.service.close()
        await engine.close()

    app = routed(engine, tokenizer, config, images, lifespan)
    max_body = config.limits.body_bytes(takes_images=images is not None)
    app.add_middleware(Gate, config=config, long=long, max_body=max_body)
    if config.allowed_origins:  # outermost: errors need the headers too, or a browser hides them
        app.add_middleware(
            CORSMiddleware, allow_origins=config.allowed_origins, allow_methods=["GET", "POST"], allow_headers=["*"]
        )
    return app


def routed(
    engine: EngineClient,
    tokenizer: Tokenizer,
    config: ServerConfig,
    images: LoadsImages | None,
    lifespan: Lifespan[FastAPI] | None = None,
) -> FastAPI:
    """Return the application with its routes, without the gate."""
    service = Service(engine, tokenizer, config, images)
    app = FastAPI(title="Dovetail", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.service = service
    for module in (chat, completions, responses, anthropic, pooling, status):
        app.include_router(module.routes(service))
    if config.admin_key is not None:
        app.include_router(controls.admin(service))
        if config.profile_dir is not None:
            app.include_router(controls.profile(service, config.profile_dir))
    handle_errors(app)
    return app
