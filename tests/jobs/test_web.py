"""Test the web page of jobs: its routes, its access control, and that a browser shows it."""

import contextlib
import http.client
import json
import shutil
import subprocess
import threading
from urllib.parse import urlsplit

import pytest
from typer.testing import CliRunner

from dovetail.cli.job import app
from dovetail.jobs import actions
from dovetail.jobs.backends import chooser
from dovetail.jobs.spec import make
from dovetail.jobs.web import Pages, curve, server

TOKEN = "a-token-of-the-test"


@pytest.fixture
def url(store):
    with server(Pages(store, chooser(store.root, store.owner)), 0, TOKEN) as made:
        thread = threading.Thread(target=made.serve_forever, args=(0.05,))
        thread.start()
        yield f"http://127.0.0.1:{made.server_port}"
        made.shutdown()
        thread.join()


@pytest.fixture
def job(store) -> str:
    id = actions.create(store, make({"name": "shown", "command": "echo '<b>'", "code": {"path": ""}, "hosts": 2})).id
    store.begin(id, "", "")
    folder = store.home(id) / "attempts" / "1"
    folder.mkdir(parents=True)
    (folder / "rank1.log").write_text("one <script>\ntwo\n")
    return id


def ask(address: str, method: str = "GET", **headers: str):
    """Return (status, headers, body) of a request with these headers, without cookies or redirects."""
    parts = urlsplit(address)
    connection = http.client.HTTPConnection(parts.netloc, timeout=10)
    connection.request(method, address.removeprefix(f"http://{parts.netloc}") or "/", headers=headers)
    with contextlib.closing(connection):
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read().decode()


def cookie(url: str, token: str = TOKEN) -> str:
    return f"dovetail-jobs-{urlsplit(url).port}={token}"


def get(address: str):
    status, headers, body = ask(address, Cookie=cookie(address))
    assert status == 200, (status, body)
    return json.loads(body) if "json" in headers["Content-Type"] else body


def test_the_page_and_what_it_asks_for(url, job, store):
    assert "<title>dovetail jobs</title>" in get(url)
    listed = get(f"{url}/api/jobs")
    assert [one["name"] for one in listed["jobs"]] == ["shown"] and listed["counts"] == {"waiting": 1}
    one = get(f"{url}/api/jobs/{job}")
    assert (one["processes"], len(one["attempts"]), one["curve"]) == (2, 1, []) and "hosts: 2" in one["spec"]
    assert len(store._free) <= 2  # a thread for each request, and no connection for each thread
    part = get(f"{url}/api/jobs/{job}/logs?attempt=1&rank=1&since=4")
    assert part == {"text": "<script>\ntwo\n", "position": 17}


@pytest.mark.parametrize("path", ["/nothing", "/api/jobs/zzz", "/api/jobs/{job}/logs?attempt=7", "/api/jobs/../x"])
def test_unknown_paths_are_404(url, job, path):
    address = url + path.replace("{job}", job)
    assert ask(address, Cookie=cookie(url))[0] == 404


ROUTES = ["/", "/api/jobs", "/api/jobs/{job}", "/api/jobs/{job}/logs?attempt=1&rank=1", "/nothing"]


@pytest.mark.parametrize("path", ROUTES)
def test_every_route_needs_the_token(url, job, path):
    address = url + path.replace("{job}", job)
    for headers in ({}, {"Cookie": cookie(url, "wrong")}, {"Cookie": f"dovetail-jobs-1={TOKEN}"}, {"Cookie": "\x00;="}):
        status, _, body = ask(address, **headers)
        assert status == 403 and "shown" not in body and "two" not in body and "dovetail job web" in body
    assert ask(f"{address}{'&' if '?' in path else '?'}token=wrong")[0] == 403
    assert ask(address, "POST")[0] == 403


def test_the_printed_url_sets_a_cookie_and_drops_the_token(url):
    status, headers, body = ask(f"{url}/?token={TOKEN}")
    assert (status, headers["Location"], body) == (303, "/", "")
    assert headers["Set-Cookie"] == f"{cookie(url)}; Path=/; HttpOnly; SameSite=Strict"
    assert (
        headers["Referrer-Policy"] == "no-referrer" and "frame-ancestors 'none'" in headers["Content-Security-Policy"]
    )
    assert "<title>dovetail jobs</title>" in get(url)


@pytest.mark.parametrize("host", ["evil.example", "evil.example:{port}", "127.0.0.1.evil.example", ""])
def test_requests_with_another_host_header_are_refused(url, host):
    name = host.replace("{port}", str(urlsplit(url).port))
    assert ask(f"{url}/?token={TOKEN}", Host=name)[0] == 403
    assert ask(f"{url}/api/jobs", Host=name, Cookie=cookie(url))[0] == 403


def test_the_page_cancels_a_job_and_no_other_page_does(url, job, store):
    address, own = f"{url}/api/jobs/{job}/cancel", {"Cookie": cookie(url), "X-Dovetail": "jobs", "Origin": url}
    elsewhere = ({"X-Dovetail": ""}, {"Origin": "http://127.0.0.1:1"}, {"Origin": "null"}, {"Cookie": ""})
    assert {ask(address, "POST", **(own | changed))[0] for changed in elsewhere} == {403}
    assert ask(address, **own)[0] == 404  # a link cannot cancel
    assert store.job(job).wanted == "run" and get(f"{url}/api/jobs/{job}")["may_cancel"]
    assert ask(address, "POST", **own)[0] == 200 and store.job(job).wanted == "stop"
    assert ask(address, "POST", **own)[0] == 200 and store.job(job).wanted == "kill"  # a second one kills
    assert not get(f"{url}/api/jobs/{job}")["may_cancel"]
    store.change(job, status="cancelled")
    status, _, body = ask(address, "POST", **own)
    assert status == 409 and "is over already" in json.loads(body)["error"]


def test_a_port_in_use_is_reported(url):
    port = str(urlsplit(url).port)
    done = CliRunner().invoke(app, ["web", "--port", port])
    assert isinstance(done.exception, ValueError)
    assert f"127.0.0.1:{port} (Address already in use); choose another --port" in str(done.exception)


def test_a_curve_is_thinned_and_a_torn_line_is_skipped(tmp_path):
    lines = [json.dumps({"step": i, "loss": 1.0 / (i + 1)}) for i in range(5000)]
    (tmp_path / "m").write_text("\n".join([*lines, '{"step": 50']))
    found = curve(tmp_path / "m")
    assert 400 <= len(found) <= 450 and found[0] == (0, 1.0)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium to look with")
def test_a_browser_shows_the_job(url, job):
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=5000", "--dump-dom"]
    shown = subprocess.run(
        [*command, f"{url}/?token={TOKEN}#{job}"], capture_output=True, text=True, timeout=120, check=True
    ).stdout
    assert f"shown ({job}): waiting" in shown and "#1 local" in shown and "echo '&lt;b&gt;'" in shown
