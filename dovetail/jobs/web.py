"""`dovetail job web`: one small page over the store, on loopback. It shows, and changes nothing.

GET /                                       the page (page.html)
GET /api/jobs                               the newest jobs, and how many there are of each status
GET /api/jobs/ID                            one job: attempts, events, the loss curve of its run
GET /api/jobs/ID/logs?attempt=1&rank=0&since=0    a part of a log, and where to go on
"""

from __future__ import annotations

import dataclasses
import json
import re
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from dovetail.jobs.backends.backend import Backend
from dovetail.jobs.sensitive import shown
from dovetail.jobs.store import Store

PAGE = Path(__file__).parent / "page.html"
SHOWN = 200  # jobs
POINTS = 400  # of a curve
# The page is ours alone: nothing is loaded from elsewhere, and no other page may frame it.
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
    "frame-ancestors 'none'"
)


class Pages:
    """What each address answers."""

    def __init__(self, store: Store, backends: Callable[[str], Backend]) -> None:
        self.store, self.backend = store, backends

    def jobs(self) -> dict[str, Any]:
        jobs = [job._asdict() for job in self.store.jobs(limit=SHOWN)]
        return {"now": time.time(), "jobs": jobs, "counts": self.store.counts()}

    def job(self, id: str) -> dict[str, Any]:
        job = self.store.job(id)
        return {
            "now": time.time(),
            "job": job._asdict(),
            "spec": shown(self.store.spec(id)),
            "processes": self.store.spec(id).processes,
            "attempts": [dataclasses.asdict(row) for row in self.store.attempts(id)],
            "events": [dataclasses.asdict(event) for event in self.store.events(id)],
            "curve": curve(self.store.home(id) / "run" / "metrics.jsonl"),
        }

    def logs(self, id: str, query: dict[str, list[str]]) -> dict[str, Any]:
        number, rank, since = (int(query.get(name, ["0"])[0]) for name in ("attempt", "rank", "since"))
        job, spec = self.store.job(id), self.store.spec(id)
        row = next((row for row in self.store.attempts(id) if row.number == number), None)
        if row is None or not 0 <= rank < spec.processes or since < 0:
            raise ValueError(f"job {id} has no attempt {number} with a rank {rank}")
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


def server(pages: Pages, port: int) -> ThreadingHTTPServer:
    """On loopback; port 0 is any that is free."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            own = made.server_port
            if self.headers.get("Host") not in (f"127.0.0.1:{own}", f"localhost:{own}"):
                self._answer(403, "text/plain", b"only as 127.0.0.1 or localhost")  # a page elsewhere that points here
                return
            try:
                self._answer(200, *_answer(pages, self.path))
            except ValueError as error:
                self._answer(404, "application/json", json.dumps({"error": str(error)}).encode())

        def _answer(self, code: int, kind: str, body: bytes) -> None:
            self.send_response(code)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Content-Security-Policy", POLICY)
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    made = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    return made


def _answer(pages: Pages, address: str) -> tuple[str, bytes]:
    parts = urlsplit(address)
    if parts.path == "/":
        return "text/html; charset=utf-8", PAGE.read_bytes()
    if parts.path == "/api/jobs":
        return "application/json", json.dumps(pages.jobs()).encode()
    if match := re.fullmatch(r"/api/jobs/([a-z0-9]+)(/logs)?", parts.path):
        found = pages.logs(match[1], parse_qs(parts.query)) if match[2] else pages.job(match[1])
        return "application/json", json.dumps(found).encode()
    raise ValueError(f"no page {parts.path}")
