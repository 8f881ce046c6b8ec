"""`dovetail compile`: topologies, refusals, and a real compile for TPUs with libtpu."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from refusals import refuses
from typer.testing import CliRunner
from vision_models import vision_reference

from dovetail.cli.compile import app, compiled, plain, recipe_report, serve_report, show
from dovetail.core import chips
from dovetail.core.errors import MissingPackageError, UnsupportedError
from dovetail.core.recipe import load
from dovetail.core.spec import init
from dovetail.engine import build
from dovetail.engine.options import EngineOptions
from dovetail.io.draft_folder import save_draft
from dovetail.io.load import outline
from dovetail.models.draft.registry import parse_draft
from dovetail.models.registry import read_model
from dovetail.plan import topology
from dovetail.plan.topology import gpu_devices, parse, tpu_devices
from dovetail.train.next_token import next_token
from dovetail.train.prepare import prepare
from dovetail.train.settings import Pretrain

pytestmark = pytest.mark.slow

HAS_LIBTPU = importlib.util.find_spec("libtpu") is not None


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
    ("text", "naming"),
    [
        ("v5e", "such as v5e:16x16"),
        ("v5e:4by4", "such as v5e:16x16"),
        ("", "such as v5e:16x16"),
        ("v5e:4", "must have 2 sides, such as v5e:4x4, got 'v5e:4'"),
        ("v5p:4x4", "3 sides, such as v5p:4x4x4"),
        ("v5e:4x4x2", "2 sides"),
        ("v5e:0x4", "2 sides"),
        ("v5f:4x4", "no TPU 'v5f' to compile for. Did you mean"),
        ("H200:8x1", "Known: v2"),
        ("v5e:32x32", "at most 256 chips, got 1,024"),
    ],
)
def test_what_is_no_topology(text, naming):
    with refuses("--topology", naming=naming):
        parse(text)


def test_without_libtpu_it_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(topology.importlib.util, "find_spec", lambda name: None)
    with refuses(None, MissingPackageError, naming="pip install 'dovetail[tpu]'"):
        tpu_devices(parse("v5e:4x4"))


def test_gpu_needs_one():
    with refuses("--topology", UnsupportedError, naming="jax sees 8 x cpu"):
        gpu_devices()
    assert isinstance(run("tiny", "--topology", "gpu").exception, ValueError)


def test_a_recipe_that_is_not_there():
    assert "tiny" in str(run("tinny", "--topology", "v5e:2x2").exception)
    assert "optimizer.lr" in str(run("tiny", "optimizer.lrr=1", "--topology", "v5e:2x2").exception)


def test_slices_are_given_by_the_flag_or_the_recipe(monkeypatch):
    asked = []
    monkeypatch.setattr(topology, "tpu_devices", lambda *args: asked.append(args))
    for words in (["--slices", "2"], ["mesh.slices=2"]):
        run("tiny", "--topology", "v5e:2x2", *words)
    assert asked == [(parse("v5e:2x2"), 2)] * 2


def test_a_recipes_step_is_shown(capsys):
    """On the CPU's devices, in place of a TPU's."""
    settings = load("tiny", ["batch=8", "length=128", "mesh.fsdp=4"], Pretrain)
    ready = prepare(settings, next_token(settings))
    program, assigned, _ = compiled(lambda options: ready.compile(options=options))
    found = recipe_report("tiny on eight", ready, program, assigned, 1.5)
    assert found.counted.total - found.counted.memory["generated code"] == assigned
    show({}, [found], as_json=False)
    shown = capsys.readouterr().out
    for words in (
        "tiny on eight",
        "temporary",
        "memory in all",
        "all-reduce over data",
        "all-gather over fsdp",
        "1.5 s",
    ):
        assert words in shown
    show({"recipe": "tiny"}, [found], as_json=True)
    told = json.loads(capsys.readouterr().out)
    assert told["recipe"] == "tiny" and told["programs"] == [json.loads(json.dumps(plain(found)))]
    sent = told["programs"][0]["compiled"]["traffic"]
    assert {"kind", "axes", "crosses", "count", "bytes"} == set(sent[0])


@pytest.mark.parametrize("flags", [(), pytest.param(("--json", "--max-loras", "2"), marks=pytest.mark.thorough)])
def test_an_engines_steps_are_shown(monkeypatch, tmp_path, flags):
    v5e = chips.CHIPS["v5e"]
    monkeypatch.setattr(topology, "tpu_devices", lambda topology: jax.devices()[:2])
    monkeypatch.setattr(chips, "chip_of", lambda device: v5e)
    monkeypatch.setattr(build, "chip_of", lambda device: v5e)
    options = ["--max-num-seqs", "4", "--max-num-batched-tokens", "64", "--dtype", "f32"]
    result = run("serve", "tiny", "--topology", "v5e:2x2", *options, *flags)
    assert result.exit_code == 0, result.output
    if flags:
        told = json.loads(result.stdout)
        assert told["tensor_parallel_size"] == 2 and len(told["programs"]) == 3
        assert all(one["predicted_seconds"]["least"] > 0 for one in told["programs"])
    else:
        for words in ("decode: 1 tokens in 1 rows", "prompts: 64 tokens in 4 rows", "KV pages", "over tensor", "pool"):
            assert words in result.output


def test_the_encoder_of_images_is_compiled(capsys):
    cfg, _ = outline(vision_reference("smolvlm")[1])
    options = EngineOptions.of(dict(max_num_seqs=1, max_num_batched_tokens=64, dtype="f32", tensor_parallel_size=2))
    made = build.abstract_engine(cfg, replace(options, kv_cache_memory_bytes=2**20), jax.devices())
    *_, prompts, encoder = made.corners()
    assert prompts.images and encoder == made.programs.encoder.largest()
    found = serve_report("smolvlm", made, encoder, *compiled(lambda more: made.compile(encoder, more)))
    assert found.counted.memory["arguments"] == pytest.approx(made.argument_bytes(encoder), rel=0.01)
    assert found.counted.flops == pytest.approx(made.flops(encoder), rel=0.3)
    show({}, [found], as_json=False)
    shown = capsys.readouterr().out
    for words in ("smolvlm, encoder: 1 x 64 patches", "weights of the tower", "features of images", "held beside it"):
        assert words in shown


@pytest.mark.parametrize("weights", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_steps_with_a_draft_model_are_compiled(monkeypatch, tmp_path, weights):
    monkeypatch.setattr(topology, "tpu_devices", lambda topology: jax.devices()[:1])
    config = dict(speculators_model_type="eagle3", draft_vocab_size=64)
    config |= dict(transformer_layer_config=read_model("tiny").to_hf() | dict(num_hidden_layers=1))
    draft = parse_draft(config, read_model("tiny"), "here")
    if weights:
        save_draft(tmp_path / "draft", draft, init(draft.spec(), jax.random.key(0), jnp.float32), config)
    else:
        (tmp_path / "draft").mkdir()
        (tmp_path / "draft" / "config.json").write_text(json.dumps(config))
    options = ["--max-num-seqs", "1", "--max-num-batched-tokens", "64", "--dtype", "f32", "--json"]
    options += ["--kv-cache-memory-bytes", str(2**22), "--max-model-len", "256"]
    speculation = json.dumps(dict(model=str(tmp_path / "draft"), num_speculative_tokens=2))
    result = run("serve", "tiny", "--topology", "v5e:2x2", *options, "--speculative-config", speculation)
    assert result.exit_code == 0, result.output
    titles = [one["title"].removeprefix("tiny, ") for one in json.loads(result.stdout)["programs"]]
    steps = ["decode: 1 tokens in 1 rows", "verify: 3 tokens in 1 rows", "prompts: 64 tokens in 1 rows"]
    assert titles == steps


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

    def test_a_topology_that_libtpu_does_not_know_is_refused(self):
        with refuses("--topology", naming="v5e:3x3"):
            tpu_devices(parse("v5e:3x3"))

    def test_tiny(self):
        """In a process of its own, as a user would: the environment is set before jax is there."""
        program = "from dovetail.cli.compile import app; app()"
        words = ["tiny", "--topology", "v5e:2x2", "batch=4"]
        done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        for word in ("tiny on v5e:2x2", "4 x v5e", "temporary", "memory in all", "FLOPs", "and compile"):
            assert word in done.stdout
