"""Serve JSON over HTTP on loopback and answer requests with faults, for the fakes of the clouds."""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

FAULTS = ("slow", "429", "500", "503", "garbage", "reset", "lost")  # reset: before it acts; lost: after

Act = Callable[[str, str, dict], tuple[int, dict | bytes]]  # (method, path with its query, body) -> (status, answer)


@dataclass
class Troubles:
    """What a request meets is the next word of `faults`; without one it is answered."""

    faults: deque[str] = field(default_factory=deque)
    requests: list[tuple[str, str]] = field(default_factory=list)
    down_until: float = -1.0  # until then every question fails
    now: float = 0.0  # a test moves it on


class Loopback(ThreadingHTTPServer):
    """`act` is called by one request at a time."""

    daemon_threads = True

    def __init__(
        self, act: Act, troubles: Callable[[], Troubles], error: Callable[[int, str], dict], slow: float
    ) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.act, self.troubles, self.error, self.slow, self.lock = act, troubles, error, slow, threading.Lock()
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join()

    def handle_error(self, request, client_address) -> None:
        """A client that gave up is part of the play."""


class _Handler(BaseHTTPRequestHandler):
    server: Loopback
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # headers and body in one packet: the second would wait 40 ms for the first one's acknowledgement

    def log_message(self, *_) -> None:
        pass

    def do_GET(self) -> None:
        server = self.server
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length)) if length else {}
        with server.lock:
            troubles = server.troubles()
            troubles.requests.append((self.command, self.path))
            fault = troubles.faults.popleft() if troubles.faults else "ok"
            if self.command == "GET" and troubles.now < troubles.down_until:
                fault = "503"
            refused = fault in ("429", "500", "503", "reset")
            status, answer = (503, {}) if refused else server.act(self.command, self.path, body)
        if fault == "slow":
            time.sleep(server.slow)
        if fault in ("reset", "lost"):
            self.close_connection = True
            return
        if fault.isdecimal():
            status, answer = int(fault), server.error(int(fault), "the server has no time for you")
        if fault == "garbage":
            answer = b"<html>"
        self._send(status, answer if isinstance(answer, bytes) else json.dumps(answer).encode())

    do_POST = do_DELETE = do_GET

    def _send(self, status: int, data: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
