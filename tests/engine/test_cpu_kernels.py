"""Test that a CPU's kernels are compiled once on a machine, in other processes."""

from __future__ import annotations

import logging
import sys

import jax
import pytest

from dovetail.engine.device import kernels
from dovetail.io import compiled
from dovetail.ops import dispatch
from dovetail.ops.capabilities import has_numba


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """The folder of kept programs, empty."""
    monkeypatch.setattr(compiled, "_folder", lambda: tmp_path / "programs")
    return tmp_path / "programs"


def test_work_is_done_once(programs):
    done = []
    for key in ("a", "b", "a"):
        compiled.once(key, lambda key=key: done.append(key))
    assert done == ["a", "b"] and {path.name for path in programs.iterdir()} == {"a", "b"}


def test_work_that_fails_is_done_again(programs):
    def fail():
        raise OSError("no memory")

    compiled.once("a", fail)
    done = []
    compiled.once("a", lambda: done.append("a"))
    assert done == ["a"]


def test_without_a_folder_nothing_is_done(monkeypatch):
    monkeypatch.setattr(compiled, "_folder", lambda: None)
    compiled.once("a", lambda: pytest.fail("compiled"))


@pytest.mark.skipif(not has_numba(), reason="numba is not installed")
def test_kernels_are_compiled_once_for_plain_and_once_for_quantised_weights(programs, monkeypatch):
    seen = []
    monkeypatch.setattr(kernels, "compile_apart", seen.append)
    monkeypatch.setattr(kernels, "import_kernels", lambda platform, quantized: None)
    for quantized in (False, True, True):
        kernels.prepare_kernels("cpu", quantized)
    kernels.prepare_kernels("tpu", True)
    assert seen == [dispatch.cpu_kernels(), dispatch.cpu_kernels(True)]
    assert "packed_rows" in str(seen[1]) and "packed_rows" not in str(seen[0])


def test_other_processes_import_the_modules(tmp_path, monkeypatch, caplog):
    for name in ("first", "second"):
        (tmp_path / f"{name}_of_kernels.py").write_text(f"open({str(tmp_path / name)!r}, 'w').close()")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    with caplog.at_level(logging.INFO):
        kernels.compile_apart((("first_of_kernels",), ("second_of_kernels",), ("none_of_kernels",)))
    assert (tmp_path / "first").exists() and (tmp_path / "second").exists()
    assert "compiled in this process" in caplog.text and "none_of_kernels" in caplog.text
    assert jax.default_backend() == "cpu", "this process is not changed"
