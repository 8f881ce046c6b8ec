"""Test @dt.remote on this machine: values, exceptions, arrays, closures, and unpicklable values."""

import os
import threading
import time
import traceback

import numpy as np
import pytest
from refusals import refuses

import dovetail as dt
from dovetail.core.errors import NotPermittedError, RecipeError, UserError
from dovetail.jobs import call
from dovetail.jobs.remote import RemoteError, attach

pytestmark = pytest.mark.usefixtures("supervised")
FACTOR = 3


def times(x):
    return x * FACTOR


@dt.remote
def outer(x, y=1):
    """What it does."""
    print("seen by the log")
    return times(x) + y, os.getpid()


@dt.remote(hosts=2)
def ranks():
    return os.environ["DOVETAIL_PROCESS_ID"], os.environ["DOVETAIL_NUM_PROCESSES"]


@dt.remote
def fails(word):
    return {}[word]


@dt.remote(hosts=2)
def waits(folder):
    """Print, then end once the test has seen that."""
    print(f"printed \x1b[31mby {os.environ['DOVETAIL_RANK']}")
    while not (folder / "seen").exists():
        time.sleep(0.02)


def test_a_value_is_returned_from_another_process(capsys):
    value, process = outer.run(4, y=2)
    assert value == 14 and process != os.getpid()
    assert capsys.readouterr().out == "seen by the log\n"
    assert outer(4, y=2) == (14, os.getpid()) and outer.__doc__ == "What it does."


def test_big_arrays_and_closures():
    scale = np.arange(3_000_000, dtype=np.float32)
    scaled = dt.remote(lambda x: x * scale)
    assert np.array_equal(scaled.run(np.float32(2)), 2 * scale)


def test_the_first_process_returns_the_value_and_all_are_logged():
    handle = ranks.submit()
    assert handle.result(60) == ("0", "2")
    assert attach(handle.id).result() == ("0", "2")


def test_run_prints_the_log_and_ctrl_c_tells_how_to_follow_the_job(tmp_path, store, monkeypatch):
    printed = []

    def show(line, **more):
        """Ctrl-C, once both ranks' lines are here: the function waits for them to be seen."""
        printed.append(line)
        if {"0 | printed by 0", "1 | printed by 1"} <= set(printed) and "goes on" not in line:
            raise KeyboardInterrupt

    monkeypatch.setattr("dovetail.jobs.remote.print", show, raising=False)
    with pytest.raises(KeyboardInterrupt):
        waits.run(tmp_path)
    (job,) = store.jobs()
    said = printed[-1]
    assert f"job {job.id} continues (running)" in said and f"dovetail job cancel {job.id}" in said
    assert f"attach('{job.id}').result()" in said
    (tmp_path / "seen").touch()
    assert attach(job.id).result(60) is None


def test_an_exception_is_raised_with_the_remote_traceback():
    with pytest.raises(KeyError, match="nothing") as caught:
        fails.run("nothing")
    shown = "".join(traceback.format_exception(caught.value))
    assert "return {}[word]" in shown and "RemoteTraceback" in shown


def test_map_creates_a_job_per_argument():
    jobs = dt.remote(lambda a, b: (a + b, os.getpid())).map([1, 2, 3], [10, 20, 30])
    assert [value for value, _ in jobs] == [11, 22, 33] and len({process for _, process in jobs}) == 3


def test_a_handle_shows_logs_and_is_found_by_id():
    handle = outer.submit(1)
    assert attach(handle.id[:5]).result(60)[0] == 4
    assert handle.logs() == "seen by the log\n"


def test_a_job_without_a_result_points_to_its_logs():
    with pytest.raises(RemoteError, match=r"exit 7.*dovetail job logs"):
        dt.remote(lambda: os._exit(7)).run()


def test_a_torn_result_is_refused(store):
    handle = outer.submit(1)
    handle.result(60)
    path = store.home(handle.id) / "call" / "1.result.pkl"
    path.write_bytes(path.read_bytes()[:-3])
    with refuses(code="wrong_mac"):
        handle.result()
    store.change(handle.id, user="somebody-else")  # whose pickle would run here
    with refuses(None, NotPermittedError, naming="somebody-else"):
        handle.result()


def test_values_that_cannot_be_pickled_are_named(store):
    with refuses(naming="argument 'y' of outer cannot be sent to another process (lock"):
        outer.run(1, y=threading.Lock())
    guard = threading.Lock()
    with refuses(naming="'guard'"):
        dt.remote(lambda: guard).run()
    with pytest.raises(TypeError, match=r"return value .*lock"):
        dt.remote(lambda: threading.Lock()).run()
    assert len(store.jobs()) == 1  # the first two were never created


@pytest.mark.parametrize(
    ("options", "kind", "param", "code"),
    [
        ({"hots": 2}, RecipeError, "hots", "unknown_key"),
        ({"command": "ls"}, RecipeError, "command", None),
        ({"backend": "gke", "accelerator": "v6e-8"}, RecipeError, "gke.bucket", None),
        ({"backend": "gcp-tpu", "accelerator": "v6e-8", "zones": ["us-east5"]}, UserError, "zones", None),
    ],
)
def test_bad_options_are_refused_by_the_decorator(options, kind, param, code):
    with refuses(param, kind, code):
        dt.remote(**options)(times)


def test_a_call_file_round_trips_with_its_private_key(tmp_path):
    key = call.make_key(tmp_path)
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600 and call.read_key(tmp_path) == key
    call.write(tmp_path / "a.pkl", b"abc", key)
    assert call.read(tmp_path / "a.pkl", key) == b"abc"
