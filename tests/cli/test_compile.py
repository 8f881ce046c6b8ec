"""`dovetail compile`: which topologies there are, what is refused and how; with libtpu, a real compile for TPUs."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from dovetail.cli import compile as command
from dovetail.plan import topology
from dovetail.plan.topology import gpu_devices, parse, tpu_devices

HAS_LIBTPU = importlib.util.find_spec("libtpu") is not None
app = typer.Typer()
app.command("compile")(command.compile_)


def run(*args: str):
    return CliRunner().invoke(app, list(args))


@pytest.mark.parametrize(
    ("text", "chip", "sides"),
    [
        ("v5e:16x16", "v5e", (16, 16)),
        ("v5e:4x4x1", "v5e", (4, 4)),
        ("v4:2x2x1", "v4", (2, 2, 1)),
        (" V5P:2x2x2 ", "v5p", (2, 2, 2)),
        ("v6e:8x8", "v6e", (8, 8)),
        ("7x:2x2x1", "TPU7x", (2, 2, 1)),
        ("tpu7x:4x4x4", "TPU7x", (4, 4, 4)),
    ],
)
def test_a_topology_is_a_chip_and_its_grid(text, chip, sides):
    found = parse(text)
    assert (found.chip.name, found.sides) == (chip, sides)
    assert parse(str(found)) == found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("v5e", "such as v5e:16x16"),
        ("v5e:4by4", "such as v5e:16x16"),
        ("", "such as v5e:16x16"),
        ("v5e:4", r"has 2 sides, such as v5e:4x4; got 'v5e:4'"),
        ("v5p:4x4", "has 3 sides, such as v5p:4x4x4"),
        ("v5e:4x4x2", "has 2 sides"),
        ("v5e:0x4", "has 2 sides"),
        ("v5f:4x4", r"no TPU 'v5f' to compile for\. Did you mean"),
        ("H200:8x1", r"Known: v2.*TPU7x"),
        ("v5e:32x32", r"has 1,024 chips and a slice of v5e at most 256.*mesh\.slices=2"),
    ],
)
def test_what_is_no_topology(text, message):
    with pytest.raises(ValueError, match=message):
        parse(text)


def test_without_libtpu_it_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(topology.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'dovetail\[tpu\]'"):
        tpu_devices(parse("v5e:4x4"))


def test_gpu_needs_one():
    with pytest.raises(ValueError, match=r"needs a GPU on this machine, and jax sees 8 x cpu"):
        gpu_devices()
    assert isinstance(run("tiny", "--topology", "gpu").exception, ValueError)


def test_a_recipe_that_is_not_there():
    assert "tiny" in str(run("tinny", "--topology", "v5e:2x2").exception)
    assert "optimizer.lr" in str(run("tiny", "optimizer.lrr=1", "--topology", "v5e:2x2").exception)


@pytest.mark.skipif(not HAS_LIBTPU, reason="libtpu is not installed")
class TestWithLibtpu:
    @pytest.mark.parametrize(("text", "devices"), [("v5e:4x4", 16), ("v4:2x2x1", 4), ("v5p:2x2x2", 8), ("7x:2x2x1", 8)])
    def test_devices(self, text, devices):
        found = tpu_devices(parse(text))
        assert len(found) == devices == parse(text).chips * parse(text).chip.devices
        assert found[0].device_kind in parse(text).chip.kinds

    def test_slices(self):
        found = tpu_devices(parse("v5e:2x2"), slices=2)
        assert sorted({device.slice_index for device in found}) == [0, 1]

    def test_a_grid_that_no_host_has(self):
        with pytest.raises(ValueError, match="libtpu does not know a slice v5e:3x3"):
            tpu_devices(parse("v5e:3x3"))

    @pytest.mark.slow
    def test_tiny(self):
        """In a process of its own, as a user would: the environment is set before jax is there."""
        program = "import typer; from dovetail.cli.compile import compile_; typer.run(compile_)"
        words = ["tiny", "--topology", "v5e:2x2", "batch=4"]
        done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        for word in ("tiny on v5e:2x2", "4 x v5e", "temporary", "memory in all", "FLOPs", "to compile"):
            assert word in done.stdout
