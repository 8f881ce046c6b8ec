"""Test the program on all VMs of a slice with real shells and processes, in folders that stand for VMs."""

import io
import pickle
import tarfile
import time
from pathlib import Path

import pytest
from jobs.cloud.slices import attempt, vms
from refusals import refuses

from dovetail.jobs import call, secrets
from dovetail.jobs.backends import tpu_program, tpu_ssh
from dovetail.jobs.backends.backend import UnavailableError, append_log
from dovetail.jobs.backends.tpu_program import TpuProgram
from dovetail.jobs.backends.tpu_ssh import SshResult, TpuHost

pytestmark = pytest.mark.slow

NODE = "projects/p/locations/z/nodes/n0"


def program(tmp_path, command, ranks=2, run=tpu_ssh.run, **given):
    one = attempt(tmp_path / "home", command=command, **given)
    workers = [TpuHost(rank, NODE, rank, f"10.0.0.{rank}") for rank in range(ranks)]
    return TpuProgram(one, workers, vms(tmp_path), run), one


def until_over(held, seconds=30.0):
    end = time.monotonic() + seconds
    while (seen := held.observe()).state not in ("succeeded", "failed"):
        assert seen.state == "running" and time.monotonic() < end, seen
        time.sleep(0.05)
    return seen


def test_it_runs_on_every_host_and_its_logs_are_fetched(tmp_path):
    held, one = program(tmp_path, 'echo "rank $DOVETAIL_RANK of $DOVETAIL_JOB, $COLOUR"', env=["COLOUR=deep blue"])
    first = held.observe()
    assert (first.state, first.hosts) == ("running", ("10.0.0.0", "10.0.0.1"))
    assert until_over(held).exit_code == 0
    for rank in range(2):
        assert one.log(rank).read_text() == f"rank {rank} of a1b2, deep blue\n"
    assert held.logs(1, since=7).text == "of a1b2, deep blue\n"
    assert until_over(held).state == "succeeded"  # asked again, the same, and the log is not brought twice
    assert one.log(0).read_text().count("rank 0") == 1


def test_a_repeated_start_starts_it_once(tmp_path):
    held, _ = program(tmp_path, 'echo once >> "$HOME/count"; sleep 0.3')
    for _ in range(3):
        assert held.observe().state == "running"
    until_over(held)
    assert (tmp_path / "vm0" / "count").read_text() == (tmp_path / "vm1" / "count").read_text() == "once\n"


def test_the_first_rank_that_failed_is_named(tmp_path):
    # rank 0 merely follows: it ends first, with the code of a process that lost another one
    held, _ = program(tmp_path, "[ $DOVETAIL_RANK = 0 ] && exit 89; sleep 0.3; exit 3")
    seen = until_over(held)
    assert (seen.state, seen.exit_code, seen.failed_rank) == ("failed", 3, 1)


def test_one_failure_ends_it_while_other_ranks_run(tmp_path, monkeypatch):
    monkeypatch.setattr("dovetail.jobs.backends.tpu_program.SETTLE_S", 0.0)
    held, _ = program(tmp_path, "[ $DOVETAIL_RANK = 1 ] && exit 7; sleep 30")
    try:
        seen = until_over(held)
        assert (seen.exit_code, seen.failed_rank) == (7, 1)
    finally:
        held.stop(0)


def test_a_stop_gives_time_to_save_and_kills_after_the_grace_period(tmp_path):
    saves = "trap 'echo saved; exit 85' TERM; echo up; while :; do sleep 0.05; done"
    held, one = program(tmp_path, f'[ $DOVETAIL_RANK = 0 ] && {{ {saves}; }}; trap "" TERM; echo up; sleep 60')
    held.observe()
    for rank in range(2):
        while "up" not in held.logs(rank, 0).text:
            time.sleep(0.02)
    held.stop(0.5)
    seen = until_over(held)
    assert "saved" in one.log(0).read_text()
    assert (seen.state, seen.exit_code, seen.failed_rank) == ("failed", 137, 1)
    held.stop(0.5)  # of what has ended: nothing


def test_a_stop_before_the_start_prevents_it(tmp_path):
    held, _ = program(tmp_path, 'touch "$HOME/ran"')
    held.stop(1)
    seen = until_over(held)
    assert (seen.state, seen.exit_code) == ("failed", 143) and not (tmp_path / "vm0" / "ran").exists()


def test_a_stop_during_setup_ends_it(tmp_path):
    held, _ = program(tmp_path, "true", 1, environment={"setup": ["sleep 60"]})
    held.observe()
    held.stop(30)
    assert until_over(held).exit_code == 143


def test_code_and_secrets_arrive_and_no_file_holds_the_secrets(tmp_path, monkeypatch):
    monkeypatch.setenv("TOKEN_HERE", "s3cret 'quoted'")
    home = tmp_path / "home"
    home.mkdir()
    with tarfile.open(home / "code.tar.gz", "w:gz") as tar:
        entry = tarfile.TarInfo("hello.txt")
        entry.size = 5
        tar.addfile(entry, io.BytesIO(b"hello"))
    held, one = program(tmp_path, 'cat hello.txt; printf "%s" "$TOKEN" | wc -c', 1, secrets=["TOKEN=env:TOKEN_HERE"])
    secrets.keep(home, secrets.take(one.spec))
    held._attempt = type(one)(**{**vars(one), "snapshot": "digest"})
    assert until_over(held).state == "succeeded"
    assert one.log(0).read_text().split() == ["hello15"]
    assert not [path for path in (tmp_path / "vm0").rglob("*") if path.is_file() and b"s3cret" in path.read_bytes()]


def test_a_host_that_does_not_answer_is_unknown_and_nothing_is_started(tmp_path):
    def half(words, given, timeout):
        return SshResult(255, b"", "Connection refused") if "vm1" in words[2] else tpu_ssh.run(words, given, timeout)

    held, _ = program(tmp_path, 'touch "$HOME/ran"', run=half)
    seen = held.observe()
    assert seen.state == "unknown" and "rank 1" in seen.detail and "Connection refused" in seen.detail
    assert not (tmp_path / "vm0" / "ran").exists()
    with refuses(None, UnavailableError, code="backend_unavailable", naming="1 of 2 hosts"):
        held.stop(1)


def test_a_restarted_machine_is_a_fault(tmp_path):
    held, one = program(tmp_path, "sleep 0.2", 1)
    held.observe()
    folder = tmp_path / "vm0" / ".dovetail" / "attempts" / one.name
    (folder / "boot").write_text("another boot")
    seen = held.observe()
    assert (seen.state, seen.exit_code) == ("failed", None) and "restarted" in seen.detail


def test_a_long_log_is_fetched_completely(tmp_path):
    held, one = program(tmp_path, "seq 1 100000", 1)
    until_over(held)
    lines = one.log(0).read_text().splitlines()
    assert (len(lines), lines[-1]) == (100_000, "100000")


def test_a_part_fetched_twice_is_kept_once(tmp_path):
    append_log(tmp_path / "log", 0, b"one two ")
    append_log(tmp_path / "log", 4, b"two three")  # by one who began to look before
    append_log(tmp_path / "log", 90, b"a gap")
    assert (tmp_path / "log").read_bytes() == b"one two three"


def test_hosts_at_fault_and_curves_are_fetched_at_the_end(tmp_path):
    command = """run="$DOVETAIL_JOB_DIR/run"; mkdir -p "$run"; echo all > "$run/health.jsonl"
        echo "host $DOVETAIL_RANK" >> "$run/health.jsonl"; echo "by $DOVETAIL_RANK" > "$run/metrics.jsonl"
        [ $DOVETAIL_RANK = 0 ] || exit 86; exit 85"""
    held, one = program(tmp_path, command)
    for _ in range(2):
        assert until_over(held).exit_code == 86
    assert (one.home / "run" / "health.jsonl").read_text() == "all\nhost 0\nhost 1\n"
    assert (one.home / "run" / "metrics.jsonl").read_text() == "by 0\n"


def remote_function(tmp_path, function, *args):
    """A program that calls it, as `@dt.remote` packs it."""
    home = tmp_path / "home"
    call.write(home / "call" / "call.pkl", call.packed(function, args, {}), call.make_key(home / "call"))
    return program(tmp_path, 'exec python -m dovetail.jobs.call "$DOVETAIL_JOB_DIR"/call')


def result(one):
    return call.read(one.home / "call" / "1.result.pkl", call.read_key(one.home / "call"))


def test_the_value_of_a_remote_function_is_fetched(tmp_path):
    held, one = remote_function(tmp_path, lambda a, b: a + b, 20, 22)
    assert until_over(held).state == "succeeded"
    assert pickle.loads(result(one)) == {"value": 42}


def test_the_exception_of_a_remote_function_is_fetched(tmp_path):
    held, one = remote_function(tmp_path, lambda: 1 / 0)
    seen = until_over(held)
    assert seen.state == "failed"
    answer = pickle.loads(result(one))
    assert isinstance(answer["error"], ZeroDivisionError)


def test_a_function_that_was_not_called_has_no_result(tmp_path):
    call.make_key(tmp_path / "home" / "call")
    held, _ = program(tmp_path, "true", 1, environment={"setup": ["false"]})
    assert until_over(held).exit_code == 91


def test_a_failed_fetch_of_a_result_is_repeated(tmp_path):
    held, one = remote_function(tmp_path, lambda: "x" * 100_000)
    cuts = [lambda out: out[: len(out) // 2], lambda out: b"", lambda out: out]

    def run(words, given, timeout):
        done = tpu_ssh.run(words, given, timeout)
        return (
            SshResult(done.code, cuts.pop(0)(done.out), done.err)
            if "tar cf" in words[-1] and "vm0" in words[2]
            else done
        )

    held._run = run
    end = time.monotonic() + 30
    while (seen := held.observe()).state in ("running", "unknown") and time.monotonic() < end:
        time.sleep(0.05)
    assert seen.state == "succeeded" and not cuts
    assert len(pickle.loads(result(one))["value"]) == 100_000


def test_a_result_with_a_wrong_mac_is_not_loaded(tmp_path):
    held, one = remote_function(tmp_path, lambda: 1)
    assert until_over(held).state == "succeeded"
    path = one.home / "call" / "1.result.pkl"
    path.with_suffix(".pkl.mac").rename(path.with_name("2.result.pkl.mac"))
    path.rename(path.with_name("2.result.pkl"))
    for name in ("2.result.pkl", "call.pkl"):  # one of another attempt; the call with a digest in place of a MAC
        with refuses(code="wrong_mac"):
            call.read(path.with_name(name), "another key" if name == "call.pkl" else call.read_key(path.parent))


def test_only_requested_files_are_unpacked(tmp_path):
    _, one = program(tmp_path, "true")
    wanted = [
        "call/1.result.pkl",
        "call/1.result.pkl.mac",
        "call/1.3.result.pkl",
        "run/health.jsonl",
        "run/metrics.jsonl",
    ]
    hostile = [
        "call/call.pkl",
        "call/key",
        "call/2.result.pkl",
        "asked.yaml",
        "attempts/2/script.sh",
        "code/x.py",
        "../x",
    ]
    assert tpu_program.take_results(one, tpu_program._tar(dict.fromkeys([*hostile, *wanted], b"{}\n"), "w"), 0)
    found = sorted(str(path.relative_to(one.home)) for path in one.home.rglob("*") if path.is_file())
    assert found == sorted(wanted) and not (one.home.parent / "x").exists()


def test_a_setup_that_fails_ends_it(tmp_path):
    held, one = program(tmp_path, "true", 1, environment={"setup": ["echo no such thing >&2; false"]})
    seen = until_over(held)
    assert seen.exit_code == 91 and "no such thing" in one.log(0).read_text()


def test_output_before_the_answer_is_skipped_and_a_partial_answer_is_unknown():
    mark = tpu_program.MARK
    assert tpu_program.parse_status(b"Welcome!\n" + mark + b"running\nlog").log == b"log"
    assert tpu_program.parse_status(mark + b"exited 3 1700000000\n").code == 3
    for cut in (b"", b"Welcome!\n", mark + b"run", mark + b"exited 3", mark + b"exi\n"):
        assert tpu_program.parse_status(cut) is None


def test_ssh_commands():
    worker = TpuHost(5, "projects/p/locations/us-east5-b/nodes/n1", 1, "34.1.2.3")
    words = tpu_ssh.gcloud()(worker, "echo hi")
    assert words[:6] == ["gcloud", "compute", "tpus", "tpu-vm", "ssh", "n1"]
    assert {"--zone=us-east5-b", "--project=p", "--worker=1", "--command=echo hi"} <= set(words)
    assert "--internal-ip" in tpu_ssh.gcloud(internal=True)(worker, None)
    assert not any("strict-host-key-checking" in word for word in words)
    known = Path("/a b/100%/known_hosts")
    words = tpu_ssh.plain(known, "ada")(worker, "echo hi")
    assert words[0] == "ssh" and words[-3:] == ["--", "ada@34.1.2.3", "echo hi"]
    assert {"StrictHostKeyChecking=accept-new", 'UserKnownHostsFile="/a b/100%%/known_hosts"'} <= set(words)
    assert tpu_ssh.plain(known)(worker, None)[-1] == "34.1.2.3"
    with refuses("gcp.network", naming="rank 0"):
        tpu_ssh.plain(known)(TpuHost(0, worker.node, 0), "true")
    assert tpu_ssh.run(["no-such-program-at-all"], b"", 1.0).code == 255
    assert "no answer within" in tpu_ssh.run(["sleep", "5"], b"", 0.05).err
