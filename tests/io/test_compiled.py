"""Cached programs: a second process loads them without tracing; damaged ones are not used."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import pytest

from dovetail.io import compiled

pytestmark = pytest.mark.slow

PROGRAM = """
import sys, jax, jax.numpy as jnp
from dovetail.io.compiled import compile_program, load_program, program_key

traced = []
def double(x):
    traced.append(x)
    return {"twice": 2 * x}

form = jax.ShapeDtypeStruct((3,), jnp.float32)
key = program_key("double", form)
program = load_program(key, jax.devices())
if program is None:
    program = compile_program(key, lambda: jax.jit(double).lower(form).compile())
print(len(traced), program(jnp.arange(3.0))["twice"].tolist())
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(compiled, "_folder", lambda: tmp_path)
    return tmp_path


def make(calls: list):
    def program(x):
        calls.append(x)
        return x + 1

    return lambda: jax.jit(program).lower(jax.ShapeDtypeStruct((2,), jnp.float32)).compile()


def test_a_second_process_traces_nothing(tmp_path):
    def run() -> str:
        environment = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path), "JAX_PLATFORMS": "cpu", "PATH": ""}
        return subprocess.check_output([sys.executable, "-c", PROGRAM], env=environment, text=True).strip()

    assert run() == "1 [0.0, 2.0, 4.0]"
    assert run() == "0 [0.0, 2.0, 4.0]"
    (own,) = tmp_path.glob("programs-*")
    assert own.name == f"programs-{os.getuid()}" and own.stat().st_mode & 0o777 == 0o700
    assert [path.stat().st_mode & 0o777 for path in own.iterdir()] == [0o600]


def test_a_damaged_program_is_compiled_again(folder):
    program = compiled.compile_program("one", make([]))
    assert program(jnp.zeros(2)).tolist() == [1, 1]
    again = compiled.load_program("one", jax.devices()[:1])
    assert again is not None and again(jnp.zeros(2)).tolist() == [1, 1]
    whole = (folder / "one").read_bytes()
    for damaged in (b"", whole[: len(whole) // 2], b"no pickle"):
        (folder / "one").write_bytes(damaged)
        assert compiled.load_program("one", jax.devices()[:1]) is None


class Touch:
    """A pickle that makes a folder when it is loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_program_that_another_user_may_have_written_is_not_loaded(folder, tmp_path_factory):
    mark = tmp_path_factory.mktemp("other") / "mark"
    program = folder / "one"
    program.write_bytes(pickle.dumps(Touch(mark)))
    for mode in (0o660, 0o602):
        program.chmod(mode)
        assert compiled.load_program("one", jax.devices()) is None and not mark.exists()
    program.chmod(0o600)
    program.rename(folder / "two")
    program.symlink_to(folder / "two")
    assert compiled.load_program("one", jax.devices()) is None and not mark.exists()
    if os.getuid() == 0:  # the last two need another user
        os.chown(folder / "two", 12345, -1)
        assert compiled.load_program("two", jax.devices()) is None and not mark.exists()
        os.chown(folder / "two", 0, -1)
        os.chown(folder, 12345, -1)
        assert compiled.load_program("two", jax.devices()) is None and not mark.exists()
        os.chown(folder, 0, -1)
    compiled.load_program("two", jax.devices())
    assert mark.exists(), "the user's own is loaded: else this test shows nothing"


def test_the_cache_of_a_shared_home_is_each_users_own(tmp_path, monkeypatch):
    monkeypatch.setenv("DOVETAIL_HOME", str(tmp_path))
    (tmp_path / "xla").mkdir(0o777)
    assert compiled._own_cache() == tmp_path / "xla" and (tmp_path / "xla").stat().st_mode & 0o777 == 0o700
    (tmp_path / "xla").rename(tmp_path / "theirs")
    (tmp_path / "xla").mkdir()
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    (tmp_path / "xla-12345").mkdir()
    assert compiled._own_cache() is None, "another user has made it"
    (tmp_path / "xla-12345").rmdir()
    assert compiled._own_cache() == tmp_path / "xla-12345"


def test_a_folder_that_cannot_be_written_costs_no_more_than_the_next_compilation(folder, monkeypatch):
    monkeypatch.setattr(compiled, "_folder", lambda: folder / "file" / "below")
    (folder / "file").write_text("")
    assert compiled.compile_program("one", make([]))(jnp.zeros(2)).tolist() == [1, 1]


def test_the_key_is_of_all_that_a_program_depends_on(monkeypatch):
    keys = {compiled.program_key("step", shape) for shape in (1, 2)}
    monkeypatch.setattr(compiled, "_code", lambda: "another version of this package")
    keys.add(compiled.program_key("step", 1))
    monkeypatch.setenv("XLA_FLAGS", "--another")
    keys.add(compiled.program_key("step", 1))
    assert len(keys) == 4


def test_programs_unused_for_a_month_are_deleted(folder):
    for name, days in (("used", 40), ("unused", 40), ("recent", 10)):
        compiled.compile_program(name, make([]))
        os.utime(folder / name, times=(time.time() - days * 86400,) * 2)
    assert compiled.load_program("used", jax.devices()[:1]) is not None
    compiled._forget_unused.cache_clear()
    compiled.compile_program("new", make([]))
    assert sorted(path.name for path in folder.iterdir()) == ["new", "recent", "used"]
