"""The HTTP server: uvicorn, which ends the open streams of events before it stops."""

from __future__ import annotations

import socket

import uvicorn
from fastapi import FastAPI


class AssistantServer(uvicorn.Server):
    """Serve the application of app.create_app."""

    def __init__(self, app: FastAPI, host: str, port: int) -> None:
        # An answer that is being written has a second to end.
        config = uvicorn.Config(app, host=host, port=port, log_level="warning", timeout_graceful_shutdown=1, ws="none")
        super().__init__(config)
        self._listeners = app.state.listeners

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop; uvicorn would wait for pages that listen for changes."""
        self._listeners.close()
        await super().shutdown(sockets)
