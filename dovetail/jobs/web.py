"""`dovetail job web`: a page that shows the jobs of a store, served on loopback to browsers that have its token.

GET /?token=TOKEN                           set a cookie and redirect to the page
GET /                                       the page (page/)
GET /api/jobs                               the newest jobs, and the number of jobs per status
GET /api/jobs/ID                            one job: attempts, events, the loss curve of its run
GET /api/jobs/ID/logs?attempt=1&rank=0&since=0    a part of a log, and the position of the next part
POST /api/jobs/ID/cancel                    cancel the job

On a shared login node every user can connect to 127.0.0.1, so each request needs the token of the printed address. The
first response moves it into a cookie, so that it does not stay in the address bar.
"""

from __future__ import annotations

import dataclasses
import json
import re
import secrets
import time
from collections.abc import Callable, Mapping
from email.message import Message
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, parse_qs, urlsplit

from dovetail.core.errors import FileError, UserError
from dovetail.core.page import html
from dovetail.core.reporter import printable
from dovetail.jobs import actions, presence
from dovetail.jobs.backends.backend import JobBackend
from dovetail.jobs.job import where
from dovetail.jobs.secrets import shown
from dovetail.jobs.store import JobStore

FOLDER = Path(__file__).parent / "page"
TITLE = "dovetail jobs"
MAX_JOBS = 200  # in the list
MAX_POINTS = 400  # of a curve
HTML, JSON, TEXT = "text/html; charset=utf-8", "application/json", "text/plain"
# The page loads nothing from other origins, and no other page may frame it.
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
    "frame-ancestors 'none'; form-action 'self'; base-uri 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY, "Cache-Control": "no-store", "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff", "Cross-Origin-Resource-Policy": "same-origin",
}  # fmt: skip
OWN_HOST = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:\d+)?")
# Pages of other origins cannot send a custom header without a preflight request, which is never granted here.
MARK, MARKED = "X-Dovetail", "jobs"
ASK_TOKEN = """<p>This page needs a token. Open the whole address that <code>dovetail job web</code> printed, with
<code>?token=</code>, or paste the token here.</p>
<form action="/"><input name="token" type="password" aria-label="token" required autofocus> <button>Open</button></form>
"""


class Pages:
    """Answer the routes from a store."""

    def __init__(self, store: JobStore, backends: Callable[[str], JobBackend]) -> None:
        self.store, self.backend = store, backends

    def jobs(self) -> dict[str, Any]:
        """Return the newest jobs and the number of jobs per status."""
        handles = self.store.handles("slurm")
        jobs = [
            job._asdict() | {"where": where(job.backend, job.zone, handles.get(job.id, ""))}
            for job in self.store.jobs(limit=MAX_JOBS)
        ]
        return {"now": time.time(), "jobs": jobs, "counts": self.store.counts()}

    def job(self, id: str) -> dict[str, Any]:
        """Return everything that the page shows of one job, except its logs."""
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
        """Cancel a job, as `dovetail job cancel` does."""
        job = actions.cancel(self.store, self.store.job(id))
        presence.ensure(self.store.root)
        return {"job": job._asdict()}

    def logs(self, id: str, query: Mapping[str, list[str]]) -> dict[str, Any]:
        """Return the part of a log that begins at byte `since`."""
        number, rank, since = (_number(query, name) for name in ("attempt", "rank", "since"))
        job, spec = self.store.job(id), self.store.spec(id)
        row = next((row for row in self.store.attempts(id) if row.number == number), None)
        if row is None or not 0 <= rank < spec.processes or since < 0:
            raise UserError(f"job {id} has no attempt {number} with a rank {rank}", param="attempt")
        self.store.refuse_elsewhere(job, "look at its logs")
        part = self.backend(job.backend).logs(self.store.attempt(job, row, spec), rank, since)
        return {"text": part.text, "position": part.position}


def _number(query: Mapping[str, list[str]], name: str) -> int:
    text = query.get(name, ["0"])[0]
    if not text.isdecimal():
        raise UserError(f"`{name}` must be a number, got {text!r}", param=name)
    return int(text)


def curve(path: Path) -> list[tuple[int, float]]:
    """Return (step, loss) of a run's metrics, at most about MAX_POINTS of them; [] where the file does not exist."""
    found = []
    for line in path.read_text().splitlines() if path.is_file() else []:
        try:
            one = json.loads(line)
        except ValueError:  # the last line may be incomplete
            continue
        if isinstance(one.get("loss"), int | float) and "step" in one:
            found.append((one["step"], one["loss"]))
    return found[:: max(1, len(found) // MAX_POINTS)]


class Access:
    """Decide which requests may use the page of one server."""

    def __init__(self, port: int, token: str = "") -> None:
        self.token = token or secrets.token_urlsafe(24)
        # Browsers send a cookie to all ports of a host, so its name contains the port.
        self._cookie = f"dovetail-jobs-{port}"

    def is_own_name(self, headers: Message) -> bool:
        """Return whether the Host header names this machine: another name means DNS rebinding."""
        return OWN_HOST.fullmatch(headers.get("Host") or "") is not None

    def is_token(self, given: str) -> bool:
        """Compare with the token in constant time."""
        return secrets.compare_digest(given.encode(), self.token.encode())

    def has_cookie(self, headers: Message) -> bool:
        """Return whether the request has the cookie with the token."""
        try:
            found = SimpleCookie(headers.get("Cookie") or "").get(self._cookie)
        except CookieError:
            return False
        return found is not None and self.is_token(found.value)

    def may_change(self, headers: Message) -> bool:
        """Return whether our own page sent the request, not another page with this browser's cookie."""
        origin = headers.get("Origin")
        return headers.get(MARK) == MARKED and origin in (None, f"http://{headers.get('Host')}")

    @property
    def set_cookie(self) -> str:
        """Return the Set-Cookie header's value."""
        return f"{self._cookie}={self.token}; Path=/; HttpOnly; SameSite=Strict"


def server(pages: Pages, port: int, token: str = "") -> PageServer:
    """Listen on loopback; port 0 chooses a free one, and an empty `token` a new one."""
    try:
        return PageServer(pages, port, token)
    except OSError as error:
        raise FileError(
            f"cannot listen on 127.0.0.1:{port} ({error.strerror}); choose another --port, or --port 0 for a free one",
            param="--port",
        ) from None


class PageServer(ThreadingHTTPServer):
    """Serve the page with one thread per request."""

    def __init__(self, pages: Pages, port: int, token: str) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.pages, self.access = pages, Access(self.server_port, token)

    @property
    def url(self) -> str:
        """Return the address to open, with the token."""
        return f"http://127.0.0.1:{self.server_port}/?token={self.access.token}"


class Handler(BaseHTTPRequestHandler):
    """Answer one request; every route needs the token."""

    server: PageServer  # pyright: ignore[reportIncompatibleVariableOverride]
    timeout = 30.0  # seconds without data within a request

    def do_GET(self) -> None:
        """Answer a GET request."""
        self._guarded(self._get)

    def do_POST(self) -> None:
        """Answer a POST request."""
        self._guarded(self._post)

    def _guarded(self, answer: Callable[[SplitResult], None]) -> None:
        access, parts = self.server.access, urlsplit(self.path)
        if not access.is_own_name(self.headers):
            self._answer(403, TEXT, b"only as 127.0.0.1 or localhost")
            return
        given = parse_qs(parts.query).get("token", [""])[0]
        if not access.is_token(given) and not access.has_cookie(self.headers):
            self._answer(403, HTML, html(TITLE, ASK_TOKEN).encode())
            return
        try:
            answer(parts)
        except UserError as error:
            self._json(404 if self.command == "GET" else 409, {"error": printable(str(error))})

    def _get(self, parts: SplitResult) -> None:
        pages, query = self.server.pages, parse_qs(parts.query)
        if parts.path == "/" and "token" in query:
            self._answer(303, TEXT, b"", {"Location": "/", "Set-Cookie": self.server.access.set_cookie})
        elif parts.path == "/":
            body, style, script = ((FOLDER / f"page.{end}").read_text() for end in ("html", "css", "js"))
            self._answer(200, HTML, html(TITLE, body, style=style, script=script).encode())
        elif parts.path == "/api/jobs":
            self._json(200, pages.jobs())
        elif match := re.fullmatch(r"/api/jobs/([a-z0-9]+)(/logs)?", parts.path):
            self._json(200, pages.logs(match[1], query) if match[2] else pages.job(match[1]))
        else:
            raise UserError(f"there is no page {parts.path}")

    def _post(self, parts: SplitResult) -> None:
        match = re.fullmatch(r"/api/jobs/([a-z0-9]+)/cancel", parts.path)
        if match is None:
            raise UserError(f"there is no page {parts.path}")
        if self.server.access.may_change(self.headers):
            self._json(200, self.server.pages.cancel(match[1]))
        else:
            self._json(403, {"error": "only the page itself may cancel"})

    def _json(self, code: int, value: Any) -> None:
        self._answer(code, JSON, json.dumps(value).encode())

    def _answer(self, code: int, kind: str, body: bytes, more: Mapping[str, str] | None = None) -> None:
        self.send_response(code)
        headers = {"Content-Type": kind, "Content-Length": str(len(body)), **HEADERS, **(more or {})}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Write no access log."""
