"""The page of jobs: what it answers, to whom, and that a browser shows it."""

import json
import shutil
import subprocess
import threading
import urllib.error
import urllib.request

import pytest

from dovetail.jobs import actions
from dovetail.jobs.backends.choose import chooser
from dovetail.jobs.spec import make
from dovetail.jobs.web import Pages, curve, server


@pytest.fixture
def url(store):
    with server(Pages(store, chooser(store.root, store.owner)), 0) as made:
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


def get(address: str, **headers: str):
    with urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=10) as answer:
        body = answer.read()
        return json.loads(body) if "json" in answer.headers["Content-Type"] else body.decode()


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
def test_what_is_not_there_is_not_found(url, job, path):
    with pytest.raises(urllib.error.HTTPError) as caught:
        get(url + path.replace("{job}", job))
    assert caught.value.code == 404
    caught.value.close()


def test_a_page_elsewhere_cannot_ask_by_another_name(url):
    with pytest.raises(urllib.error.HTTPError) as caught:
        get(f"{url}/api/jobs", Host="evil.example")
    assert caught.value.code == 403
    caught.value.close()


def test_a_curve_is_thinned_and_a_torn_line_passed_over(tmp_path):
    lines = [json.dumps({"step": i, "loss": 1.0 / (i + 1)}) for i in range(5000)]
    (tmp_path / "m").write_text("\n".join([*lines, '{"step": 50']))
    found = curve(tmp_path / "m")
    assert 400 <= len(found) <= 450 and found[0] == (0, 1.0)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium to look with")
def test_a_browser_shows_the_job(url, job):
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=5000", "--dump-dom"]
    shown = subprocess.run([*command, f"{url}/#{job}"], capture_output=True, text=True, timeout=120, check=True).stdout
    assert f"shown ({job}): waiting" in shown and "#1 here" in shown and "echo '&lt;b&gt;'" in shown
