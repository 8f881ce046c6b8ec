"""Connections: heads that are too large, or do not come; clients that hold many connections, or do not read."""

from __future__ import annotations

import contextlib
import json
import socket
import time

import httpx
import pytest
from serve.servers import Script, running

from dovetail.serve.config import ServerLimits
from dovetail.serve.http import connection
from dovetail.serve.http import server as http_server

pytestmark = pytest.mark.slow

READY = b"GET /ready HTTP/1.1\r\nhost: localhost\r\n"


@pytest.fixture(scope="module")
def server(tokenizer):
    async def engine():
        return Script(tokenizer)

    with running(engine, tokenizer) as found:
        yield found


@pytest.fixture(scope="module")
def narrow(tokenizer):
    """A server that takes three connections."""

    async def engine():
        return Script(tokenizer)

    with running(engine, tokenizer, limits=ServerLimits(max_connections=3)) as found:
        yield found


def connect(server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=30)


def read_all(sock: socket.socket) -> bytes:
    """Read until the server closes the connection."""
    parts = []
    while part := sock.recv(65536):
        parts.append(part)
    return b"".join(parts)


@pytest.mark.parametrize("head", [
    b"x: " + b"a" * 200_000 + b"\r\n",  # one header
    b"".join(b"x%d: %b\r\n" % (i, b"a" * 100) for i in range(1000)),  # many
])  # fmt: skip
@pytest.mark.parametrize("pieces", [1, 50])
def test_a_large_head_is_431(server, head, pieces):
    request = READY + head + b"\r\n"
    with connect(server) as sock:
        size = -(-len(request) // pieces)
        for start in range(0, len(request), size):
            sock.sendall(request[start : start + size])
        head, _, body = read_all(sock).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 431 ") and b"connection: close" in head
    assert json.loads(body)["error"]["code"] == "headers_too_large"
    assert httpx.get(f"{server.url}/ready").status_code == 200


def test_the_body_does_not_count_and_a_head_of_30_kb_is_taken(server):
    more = {"x-trace": "a" * 30_000}
    body = {"prompt": "Hi " * 30_000, "max_tokens": 1}  # in one piece with the head
    with httpx.Client(base_url=server.url, headers=more, timeout=60) as client:
        for _ in range(3):  # on one connection
            assert client.get("/ready").status_code == 200
            assert client.post("/v1/completions", json=body).status_code == 400, "more tokens than the context has"


def test_earlier_requests_do_not_count(server):
    """A piece of 130 KB holds many whole requests and the beginning of one more."""
    many = 3000 * (READY + b"\r\n")
    with connect(server) as sock:
        sock.sendall(many + READY[:-5])
        sock.sendall(READY[-5:] + b"connection: close\r\n\r\n")
        answers = read_all(sock)
    assert answers.count(b"HTTP/1.1 200 ") == 3001


def test_heads_that_do_not_come_close_their_connections(server, monkeypatch):
    monkeypatch.setattr(connection, "HEAD_SECONDS", 0.5)
    socks = [connect(server) for _ in range(20)]
    try:
        for i, sock in enumerate(socks):
            if i % 4 == 1:
                sock.sendall(READY)  # without the empty line
            elif i % 4 == 2:
                sock.sendall(b"G")
            elif i % 4 == 3:  # one whole request, then half of another
                sock.sendall(READY + b"\r\n")
                assert sock.recv(65536).startswith(b"HTTP/1.1 200")
                sock.sendall(READY)
        for sock in socks:
            read_all(sock)  # it ends: the server closes the connection
    finally:
        for sock in socks:
            sock.close()
    end = time.monotonic() + 30
    while server.server.server_state.connections:
        assert time.monotonic() < end, "a connection is still open"
        time.sleep(0.02)


def test_a_slow_answer_is_not_cut_off_by_the_time_for_heads(server, monkeypatch):
    monkeypatch.setattr(connection, "HEAD_SECONDS", 0.2)
    monkeypatch.setattr(server.engine, "delay", 0.1)
    server.engine.texts = ["one two three four five six"]
    answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "Hi"}, timeout=30)
    assert answer.json()["choices"][0]["text"] == "one two three four five six"


def test_idle_connections_make_room_for_new_ones(narrow):
    silent = [connect(narrow) for _ in range(8)]  # no key, no request
    try:
        assert httpx.get(f"{narrow.url}/ready", timeout=30).status_code == 200
        assert len(narrow.server.server_state.connections) <= 3
        assert read_all(silent[0]) == b"", "the one that was idle for longest is closed"
    finally:
        for sock in silent:
            sock.close()


def test_requests_under_way_keep_their_connections_and_others_get_503(narrow, monkeypatch):
    monkeypatch.setattr(narrow.engine, "delay", 0.5)
    narrow.engine.texts = ["word " * 200 + "end"] * 3
    body = json.dumps({"prompt": "Hi", "stream": True, "max_tokens": 300}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json"
    head += f"\r\ncontent-length: {len(body)}"
    busy = [connect(narrow) for _ in range(3)]
    try:
        for sock in busy:
            sock.sendall(f"{head}\r\nconnection: close\r\n\r\n".encode() + body)
        for sock in busy:
            assert sock.recv(15).startswith(b"HTTP/1.1 200")  # its answer has begun
        refused = httpx.get(f"{narrow.url}/ready", timeout=30)
        assert refused.status_code == 503 and refused.headers["retry-after"] == "5"
        assert refused.json()["error"]["code"] == "too_many_connections"
        narrow.engine.delay = 0.0
        assert all(b"end" in read_all(sock) for sock in busy)
    finally:
        for sock in busy:
            sock.close()


def test_the_limit_on_open_files_is_raised_or_bounds_the_connections(monkeypatch):
    files, most = [256], http_server.OTHER_FILES
    monkeypatch.setattr(http_server.resource, "setrlimit", lambda _, given: files.append(given[0]))
    monkeypatch.setattr(http_server.resource, "getrlimit", lambda _: (files[-1], 100_000))
    assert http_server.connection_limit(4096) == 4096 and files[-1] == 4096 + most
    assert http_server.connection_limit(2000) == 2000 and files[-1] == 4096 + most, "it is not lowered"
    monkeypatch.setattr(http_server.resource, "getrlimit", lambda _: (256, 512))
    assert http_server.connection_limit(4096) == 512 - most


@pytest.fixture
def lost(monkeypatch):
    """Return the addresses of clients whose connections ended."""
    found, end = set(), connection.HttpConnection.connection_lost

    def connection_lost(one, error):
        end(one, error)
        found.add(one.client)

    monkeypatch.setattr(connection.HttpConnection, "connection_lost", connection_lost)
    return found


def test_a_client_that_does_not_read_loses_its_connection(server, lost, monkeypatch):
    monkeypatch.setattr(connection, "STALL_SECONDS", 0.2)
    with connect(server) as sock:
        own = sock.getsockname()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        # A client that cannot send sees the end when it next asks whether the server has room, after up to two minutes
        sock.settimeout(0.5)
        asked = b"GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n"
        deadline = time.monotonic() + 120  # a busy machine answers the pipelined requests slowly
        while own not in lost and time.monotonic() < deadline:  # answers fill the buffers, then the server closes
            with contextlib.suppress(OSError):
                sock.sendall(asked * 100)
    assert own in lost
    assert httpx.get(f"{server.url}/ready", timeout=120).status_code == 200


def test_a_connection_that_closes_does_not_wait_for_a_client_that_does_not_read(server, lost, monkeypatch):
    """The rest of the answers is less than what asyncio buffers, so it does not say that writing is paused."""
    monkeypatch.setattr(connection, "STALL_SECONDS", 0.2)
    begin, made = connection.HttpConnection.connection_made, []

    def connection_made(one, transport):
        transport.set_write_buffer_limits(high=1 << 30)
        made.append(transport)
        begin(one, transport)

    monkeypatch.setattr(connection.HttpConnection, "connection_made", connection_made)
    with connect(server) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deadline = time.monotonic() + 120
        while not (made and made[0].get_write_buffer_size()) and time.monotonic() < deadline:
            sock.sendall(b"GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n" * 10)
            time.sleep(0.02)  # what is sent faster than it is answered would fill the client's own buffer
        sock.sendall(b"no request\r\n\r\n")
        while sock.getsockname() not in lost and time.monotonic() < deadline:
            time.sleep(0.1)
        assert sock.getsockname() in lost
