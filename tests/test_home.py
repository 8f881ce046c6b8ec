"""The tests have a DOVETAIL_HOME of their own and do not write the user's reports and caches."""

import os
import subprocess
import sys
from pathlib import Path

import private_home

from dovetail.io.hub import home


def test_home_is_the_tests_own_and_its_models_are_shared():
    assert home() != private_home.REAL and home() != Path("~/.cache/dovetail").expanduser()
    assert (home() / "models").samefile(private_home.REAL / "models")


def test_processes_of_a_test_are_at_home_there():
    code = "from dovetail.io.hub import home; print(home())"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert said == os.environ["DOVETAIL_HOME"] == str(home())


def test_a_write_into_the_real_home_is_seen(tmp_path, monkeypatch):
    monkeypatch.setattr(private_home, "REAL", tmp_path)
    for name in ("models/a/weights", "data/x", "tour/report.html"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("before")
    monkeypatch.setattr(private_home, "_before", private_home._listing())
    (tmp_path / "models/a/more").write_text("pulled")
    assert private_home.written() == []
    (tmp_path / "tour/report.html").write_text("a test's")
    os.utime(tmp_path / "tour/report.html", ns=(1, 1))
    (tmp_path / "new").write_text("")
    assert private_home.written() == ["new", "tour/report.html"]
