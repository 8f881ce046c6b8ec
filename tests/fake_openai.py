"""A server of OpenAI's API with scripted answers, on a free port."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Reply:
    """What one request gets: a status with an error, or pieces of text with a wait in seconds before each. A piece that
    is callable is called; one that is bytes is sent as it is."""

    pieces: list[tuple[float, Any]] = field(default_factory=list)
    status: int = 200
    message: str = ""
    body: bytes | None = None  # of an error, in place of OpenAI's shape
    finish_reason: str = "stop"
    ends: bool = True  # False: the connection closes before [DONE]
    usage: int | None = None  # completion_tokens; None: as many as there are pieces


def says(*pieces: str, **more: Any) -> Reply:
    return Reply([(0.0, piece) for piece in pieces], **more)


class FakeOpenAI:
    """`reply` is asked, with the number of the request, what it gets. GETs are counted apart."""

    def __init__(self, reply: Callable[[int], Reply], models: Reply | list[dict] | None = None):
        self.reply = reply
        self.models = models if models is not None else [{"id": "fake", "max_model_len": 512, "vocab_size": 300}]
        self.metrics: Callable[[], str] | None = None  # what /metrics says
        self.bodies: list[dict] = []
        self.headers: list[Any] = []
        self.times: list[float] = []  # when each request came
        self.left = threading.Event()  # a client went away amid an answer
        self.lock = threading.Lock()
        self.url = ""


@contextmanager
def serving(reply: Callable[[int], Reply], models: Any = None) -> Iterator[FakeOpenAI]:
    fake = FakeOpenAI(reply, models)
    handler = type("Handler", (_Handler,), {"fake": fake})
    server = _Server(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    fake.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield fake
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Server(ThreadingHTTPServer):
    request_queue_size = 128


class _Handler(BaseHTTPRequestHandler):
    fake: FakeOpenAI

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        models = self.fake.models
        if self.path == "/metrics" and self.fake.metrics is not None:
            self._send(200, "text/plain", self.fake.metrics().encode())
        elif isinstance(models, Reply):
            self._error(models)
        else:
            self._send(200, "application/json", json.dumps({"object": "list", "data": models}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with self.fake.lock:
            number = len(self.fake.bodies)
            self.fake.bodies.append(body)
            self.fake.headers.append(self.headers)
            self.fake.times.append(time.perf_counter())
        reply = self.fake.reply(number)
        if reply.status != 200:
            self._error(reply)
            return
        try:
            self._stream(reply, "chat" in self.path)
        except (BrokenPipeError, ConnectionResetError):
            self.fake.left.set()

    def _stream(self, reply: Reply, chat: bool) -> None:
        self._head(200, "text/event-stream")
        count = 0
        for wait, piece in reply.pieces:
            time.sleep(wait)
            if callable(piece):
                piece()
            elif isinstance(piece, bytes):
                self._put(piece)
            else:
                count += 1
                self._event(chat, piece, None)
        if reply.ends:
            self._event(chat, "", reply.finish_reason)
            tokens = count if reply.usage is None else reply.usage
            self._put(_data({"choices": [], "usage": {"completion_tokens": tokens}}) + b"data: [DONE]\n\n")

    def _event(self, chat: bool, piece: Any, finish: str | None) -> None:
        delta = piece if isinstance(piece, dict) else {"content": piece}
        choice = {"index": 0, **({"delta": delta} if chat else {"text": piece}), "finish_reason": finish}
        self._put(_data({"choices": [choice]}))

    def _put(self, data: bytes) -> None:
        self.wfile.write(data)
        self.wfile.flush()

    def _error(self, reply: Reply) -> None:
        shaped = json.dumps({"error": {"message": reply.message, "type": "x", "param": None, "code": None}}).encode()
        self._send(reply.status, "application/json", shaped if reply.body is None else reply.body)

    def _send(self, status: int, kind: str, body: bytes) -> None:
        self._head(status, kind)
        self._put(body)

    def _head(self, status: int, kind: str) -> None:
        """HTTP/1.0: the connection's end is the answer's."""
        self.send_response(status)
        self.send_header("content-type", kind)
        self.end_headers()


def _data(event: dict) -> bytes:
    return b"data: " + json.dumps(event).encode() + b"\n\n"
