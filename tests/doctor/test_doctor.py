"""Test that `dovetail doctor` reports the faults of a machine, and none on a good one."""

import json

import jax
import numpy as np
import pytest
from typer.testing import CliRunner

from dovetail.cli.main import app
from dovetail.doctor import Finding, differences, exit_code, numerics, speed, usage
from dovetail.doctor.numerics import burn, chain
from dovetail.doctor.system import is_busy, load, system

pytestmark = pytest.mark.slow


def found(findings, about):
    return [one for one in findings if one.about == about]


def test_faults_of_a_machine_are_reported_with_a_remedy(tmp_path, monkeypatch):
    for name in ("dev/nvidia0", "tmp/libtpu_lockfile", "sys/kernel/mm/transparent_hugepage/enabled"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("always madvise [never]")
    holder = tmp_path / "proc/4242"
    (holder / "fd").mkdir(parents=True)
    (holder / "fd/3").symlink_to(tmp_path / "dev/nvidia0")
    (holder / "cmdline").write_bytes(b"python\0train.py\0")
    findings = system(tmp_path, coordinator="no-such-host.invalid:8476")
    (backend,) = found(findings, "backend")
    assert backend.severity == "warning" and "JAX_PLATFORMS" in backend.advice
    (held,) = found(findings, "other processes on the device")
    assert "4242: python train.py" in held.found and "kill 4242" in held.advice
    assert found(findings, "lock file")[0].advice.endswith("libtpu_lockfile")
    assert found(findings, "huge pages") and found(findings, "coordinator")[0].severity == "fault"
    assert exit_code(findings) == 2
    monkeypatch.delenv("JAX_PLATFORMS")
    assert "dovetail[cuda]" in found(system(tmp_path), "backend")[0].advice


def test_a_chip_that_flips_a_bit_is_named():
    devices, right = jax.local_devices()[:4], chain(32)

    def run(x):
        out = np.array(right(x))
        if x.devices() == {devices[2]}:
            out.view(np.uint32)[5, 7] ^= 1
        return out

    (one,) = burn(0.0, side=32, run=run, devices=devices)
    assert one.severity == "fault" and one.about == "burn-in of device 2" and "2 of 2 rounds" in one.found
    assert [x.severity for x in burn(0.0, side=32, devices=devices)] == ["good"]


def test_products_have_the_precision_of_their_dtypes(monkeypatch):
    monkeypatch.setattr(numerics, "VOCABULARY", 2048)
    by_name = {one.about: one for one in numerics.numerics(sides=(64, 128), runs=3)}
    assert by_name["top-k"].severity == by_name["repeatability"].severity == "good"
    assert by_name["product in f32"].severity == by_name["product in bf16"].severity == "good"
    assert "PyTorch" in by_name["product in f32"].found
    free, held = (by_name[f"argmax in bf16, xla_allow_excess_precision={x}"] for x in ("true", "false"))
    assert free.values["differs"] <= held.values["differs"] < 0.1


@pytest.mark.parametrize(
    "name, error, severity", [("f32", 1e-4, "fault"), ("f32 by default", 3e-4, "note"), ("bf16", 0.1, "fault")]
)
def test_a_wrong_product_is_reported(name, error, severity):
    assert numerics.judged(name, "", {64: error}).severity == severity


def test_speeds_of_several_devices():
    about = [one.about for one in speed.speed(speed.Size(32, 1 << 16, 1 << 12))]
    assert about == [
        "products (f32, 32 squared)", "memory (copy)", "links (all-gather over 8 devices)",
        "links (all-reduce over 8 devices)",
    ]  # fmt: skip


def test_a_speed_far_below_the_peak_is_a_warning():
    assert speed._beside("products", [0.3e12], 1e12, 1e12, "TFLOP/s").severity == "warning"
    assert speed._beside("products", [0.8e12], 1e12, 1e12, "TFLOP/s").severity == "good"


def machine(root, load_average, available, pressure="0.00"):
    """A /proc with one process, 4242, that has used 100 ticks so far."""
    (root / "proc/4242").mkdir(parents=True)
    (root / "proc/pressure").mkdir()
    (root / "proc/loadavg").write_text(f"{load_average} 4.00 3.00 7/321 12345\n")
    (root / "proc/meminfo").write_text(f"MemTotal: 1000000 kB\nMemAvailable: {available} kB\n")
    (root / "proc/pressure/memory").write_text(f"some avg10={pressure} avg60=0.00 avg300=0.00 total=1\n")
    (root / "proc/4242/comm").write_text("cc1plus\n")
    use(root, 100)
    return root


def use(root, ticks):
    (root / "proc/4242/stat").write_text(f"4242 (a ) name) R {'0 ' * 10}{ticks} 0 0 0\n")


def test_a_busy_machine_is_a_warning(tmp_path):
    """A load of 5 on 2 cores is a warning."""
    root = machine(tmp_path, "5.00", available=20_000, pressure="31.40")
    work, memory = load(root, cores=2, wait=lambda seconds: use(root, 1_000_000))
    assert work.severity == memory.severity == "warning" and is_busy([work])
    assert "load average 5.0 on 2 cores (2.5 per core)" in work.found and "4242 cc1plus (" in work.found
    assert "too low" in work.advice and work.values["load"] == 5.0
    assert "available" in memory.found and "31% of the last 10 s" in memory.found
    told = speed.speed(speed.Size(32, 1 << 16, 1 << 12), busy=True)
    assert all("other work ran at the same time" in one.found for one in told)


def test_an_idle_machine_is_not_a_warning(tmp_path):
    root = machine(tmp_path, "0.20", available=900_000)
    found = load(root, cores=2, wait=lambda seconds: None)
    assert [one.severity for one in found] == ["good", "good"] and not is_busy(found)
    assert load(tmp_path / "nowhere", wait=lambda seconds: None) == []


def test_a_new_process_is_seen_before_it_shows_in_the_load(tmp_path):
    root = machine(tmp_path, "0.10", available=900_000)
    assert is_busy(load(root, cores=2, wait=lambda seconds: use(root, 1_000_000)))


def test_usage_of_this_machine():
    here = usage.usages()[-1]
    assert here.chip == "CPU" and 0 < here.used < here.total and here.busy is not None and 0 <= here.busy <= 1


def test_the_output_of_nvidia_smi_is_parsed():
    one = usage._smi_usage("0, NVIDIA H200, 1024, 143771, 37, 41, 210.55")
    assert (one.chip, one.used, one.busy, one.more) == ("GPU 0", 1 << 30, 0.37, "41 °C, 210.55 W")


def test_the_command_exits_by_its_findings_and_compares_hosts(tmp_path, monkeypatch):
    told = CliRunner().invoke(app, ["doctor", "--no-speed", "--json"])
    report = json.loads(told.stdout)
    assert told.exit_code == exit_code([Finding(one["severity"], "", "") for one in report["findings"]])
    other = json.loads(told.stdout) | {"host": "other"}
    other["findings"][0]["found"] = "jax 0.1"
    assert differences([report, other]) == [("versions", [f"good: {report['findings'][0]['found']}", "good: jax 0.1"])]
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, one in zip(paths, (report, other), strict=True):
        path.write_text(json.dumps(one))
    told = CliRunner().invoke(app, ["doctor", "--compare", str(paths[0]), "--compare", str(paths[1])])
    assert told.exit_code == 1 and "other" in told.stdout and "jax 0.1" in told.stdout


@pytest.mark.parametrize(
    ("place", "code", "words"),
    [("us-central1", 0, "costs nothing"), ("europe-west4", 1, "per GB"), ("", 0, "is not known")],
)
def test_a_bucket_in_another_region_is_a_warning(monkeypatch, place, code, words):
    monkeypatch.setattr("dovetail.jobs.cost.location", lambda source: place)
    monkeypatch.setattr("dovetail.doctor.system.system", lambda **how: [])
    monkeypatch.setattr("dovetail.doctor.system.load", lambda: [])
    told = CliRunner().invoke(app, ["doctor", "--no-speed", "--bucket", "gs://b", "--zone", "us-central1-a"])
    assert told.exit_code == code and words in " ".join(told.stdout.split())
