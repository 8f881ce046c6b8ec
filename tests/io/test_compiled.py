"""Programs that are kept compiled: a second process finds them and traces nothing; damaged ones are not trusted."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import pytest

from dovetail.io import compiled

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


def test_a_damaged_file_is_as_none(folder):
    program = compiled.compile_program("one", make([]))
    assert program(jnp.zeros(2)).tolist() == [1, 1]
    again = compiled.load_program("one", jax.devices()[:1])
    assert again is not None and again(jnp.zeros(2)).tolist() == [1, 1]
    whole = (folder / "one").read_bytes()
    for damaged in (b"", whole[: len(whole) // 2], b"no pickle"):
        (folder / "one").write_bytes(damaged)
        assert compiled.load_program("one", jax.devices()[:1]) is None


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


def test_what_nobody_used_for_a_month_is_deleted(folder):
    for name, days in (("used", 40), ("unused", 40), ("recent", 10)):
        compiled.compile_program(name, make([]))
        os.utime(folder / name, times=(time.time() - days * 86400,) * 2)
    assert compiled.load_program("used", jax.devices()[:1]) is not None
    compiled._forget_unused.cache_clear()
    compiled.compile_program("new", make([]))
    assert sorted(path.name for path in folder.iterdir()) == ["new", "recent", "used"]
