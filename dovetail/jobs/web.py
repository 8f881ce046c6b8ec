"""`dovetail job web`: one small page over the store, on loopback, for those who have its token (web_access.py).

GET /?token=TOKEN                           sets a cookie, and leads to the page
GET /                                       the page (page.html)
GET /api/jobs                               the newest jobs, and how many there are of each status
GET /api/jobs/ID                            one job: attempts, events, the loss curve of its run
GET /api/jobs/ID/logs?attempt=1&rank=0&since=0    a part of a log, and where to go on
POST /api/jobs/ID/cancel                    tell it to stop
"""

from __future__ import annotations

import dataclasses
import json
import re
import time
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, parse_qs, urlsplit

from dovetail.core.errors import UserError
from dovetail.core.printable import printable
from dovetail.jobs import actions, presence
from dovetail.jobs.backends.backend import Backend
from dovetail.jobs.job import where
from dovetail.jobs.sensitive import shown
from dovetail.jobs.store import Store
from dovetail.jobs.web_access import Access

PAGE = Path(__file__).parent / "page.html"
SHOWN = 200  # jobs
POINTS = 400  # of a curve
# The page is ours alone: nothing is loaded from elsewhere, and no other page may frame it.
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
    "frame-ancestors 'none'; form-action 'self'; base-uri 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY, "Cache-Control": "no-store", "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff", "Cross-Origin-Resource-Policy": "same-origin",
}  # fmt: skip
NO_TOKEN = """<!doctype html><html lang="en"><meta charset="utf-8"><title>dovetail jobs</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark">
<body style="font: 15px/1.5 system-ui, sans-serif; margin: 20px; max-width: 40em">
<p>This page needs a token. Open the whole address that <code>dovetail job web</code> printed, with
<code>?token=</code>, or paste the token here.</p>
<form action="/"><input name="token" type="password" aria-label="token" required autofocus> <button>Open</button></form>
"""


class Pages:
    """What each address answers."""

    def __init__(self, store: Store, backends: Callable[[str], Backend]) -> None:
        self.store, self.backend = store, backends

    def jobs(self) -> dict[str, Any]:
        handles = self.store.handles("slurm")
        jobs = [
            job._asdict() | {"where": where(job.backend, job.zone, handles.get(job.id, ""))}
            for job in self.store.jobs(limit=SHOWN)
        ]
        return {"now": time.time(), "jobs": jobs, "counts": self.store.counts()}

    def job(self, id: str) -> dict[str, Any]:
        job, spec = self.store.job(id), self.store.spec(id)
        return {
            "now": time.time(),
            "job": job._asdict(),
            "spec": shown(spec),
            "processes": spec.processes,
            "grace": spec.ceiling.grace,
            "may_cancel": not job.is_over and job.wanted != "kill",
            "attempts": [
                dataclasses.asdict(row) | {"where": where(job.backend, row.zone, row.handle)}
                for row in self.store.attempts(id)
            ],
            "events": [dataclasses.asdict(event) for event in self.store.events(id)],
            "curve": curve(self.store.home(id) / "run" / "metrics.jsonl"),
        }

    def cancel(self, id: str) -> dict[str, Any]:
        """Tell it to stop, as `dovetail job cancel` does."""
        job = actions.cancel(self.store, self.store.job(id))
        presence.ensure(self.store.root)
        return {"job": job._asdict()}

    def logs(self, id: str, query: dict[str, list[str]]) -> dict[str, Any]:
        number, rank, since = (int(query.get(name, ["0"])[0]) for name in ("attempt", "rank", "since"))
        job, spec = self.store.job(id), self.store.spec(id)
        row = next((row for row in self.store.attempts(id) if row.number == number), None)
        if row is None or not 0 <= rank < spec.processes or since < 0:
            raise UserError(f"job {id} has no attempt {number} with a rank {rank}")
        self.store.refuse_elsewhere(job, "look at its logs")
        attempt = self.store.attempt(job, row, spec)
        part = self.backend(job.backend).logs(attempt, rank, since)
        return {"text": part.text, "position": part.position}


def curve(path: Path) -> list[tuple[int, float]]:
    """(step, loss) of a run, thinned to what a picture can show; [] where there is none."""
    found = []
    for line in path.read_text().splitlines() if path.is_file() else []:
        try:
            one = json.loads(line)
        except ValueError:  # being written
            continue
        if isinstance(one.get("loss"), int | float) and "step" in one:
            found.append((one["step"], one["loss"]))
    return found[:: max(1, len(found) // POINTS)]


def server(pages: Pages, port: int, token: str = "") -> PageServer:
    """Listen on loopback; port 0 is any that is free. `token` is a new one if not given."""
    try:
        return PageServer(pages, port, token)
    except OSError as error:
        raise UserError(
            f"cannot listen on 127.0.0.1:{port} ({error.strerror}); choose another --port, or --port 0 for a free one"
        ) from None


class PageServer(ThreadingHTTPServer):
    """A thread for each request."""

    def __init__(self, pages: Pages, port: int, token: str) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.pages, self.access = pages, Access(self.server_port, token)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/?token={self.access.token}"


class Handler(BaseHTTPRequestHandler):
    server: PageServer  # pyright: ignore[reportIncompatibleVariableOverride]
    timeout = 30.0  # of silence within a request

    def do_GET(self) -> None:
        self._guarded(self._get)

    def do_POST(self) -> None:
        self._guarded(self._post)

    def _guarded(self, answer: Callable[[SplitResult], None]) -> None:
        """Call `answer` for those who may ask; every route needs the token."""
        access, parts = self.server.access, urlsplit(self.path)
        if not access.is_own_name(self.headers):
            self._answer(403, "text/plain", b"only as 127.0.0.1 or localhost")
            return
        given = parse_qs(parts.query).get("token", [""])[0]
        if not access.is_token(given) and not access.has_cookie(self.headers):
            self._answer(403, "text/html; charset=utf-8", NO_TOKEN.encode())
            return
        try:
            answer(parts)
        except ValueError as error:
            code = 404 if self.command == "GET" else 409
            self._answer(code, "application/json", json.dumps({"error": printable(str(error))}).encode())

    def _get(self, parts: SplitResult) -> None:
        if parts.path == "/" and "token" in parse_qs(parts.query):
            self._answer(303, "text/plain", b"", {"Location": "/", "Set-Cookie": self.server.access.set_cookie})
        else:
            self._answer(200, *_answer(self.server.pages, parts))

    def _post(self, parts: SplitResult) -> None:
        match = re.fullmatch(r"/api/jobs/([a-z0-9]+)/cancel", parts.path)
        if match is None:
            raise UserError(f"no page {parts.path}")
        if not self.server.access.may_change(self.headers):
            self._answer(403, "application/json", b'{"error": "only the page itself may cancel"}')
            return
        self._answer(200, "application/json", json.dumps(self.server.pages.cancel(match[1])).encode())

    def _answer(self, code: int, kind: str, body: bytes, more: Mapping[str, str] | None = None) -> None:
        self.send_response(code)
        held = {"Content-Type": kind, "Content-Length": str(len(body)), **HEADERS, **(more or {})}
        for name, value in held.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def _answer(pages: Pages, parts: SplitResult) -> tuple[str, bytes]:
    if parts.path == "/":
        return "text/html; charset=utf-8", PAGE.read_bytes()
    if parts.path == "/api/jobs":
        return "application/json", json.dumps(pages.jobs()).encode()
    if match := re.fullmatch(r"/api/jobs/([a-z0-9]+)(/logs)?", parts.path):
        found = pages.logs(match[1], parse_qs(parts.query)) if match[2] else pages.job(match[1])
        return "application/json", json.dumps(found).encode()
    raise UserError(f"no page {parts.path}")
