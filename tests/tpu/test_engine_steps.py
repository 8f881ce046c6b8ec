"""The engine's decode and prompt steps with default options, compiled for TPUs: no copy of the pool, and the kernel
that the table of `dovetail info --kernels tpu` names.

`make test-tpu` compiles one family per kind of attention and of MLP, alone and over eight devices; `make test-tpu-all`
every family on every chip, which takes hours.
"""

from __future__ import annotations

import json

import pytest
from tpu.families import FAMILIES

from dovetail.engine.build import AbstractEngine, abstract_engine
from dovetail.engine.options import EngineOptions
from dovetail.models.registry import FAMILIES as REGISTERED
from dovetail.models.registry import parse_config
from dovetail.plan.compiled import count
from dovetail.plan.topology import parse, tpu_devices
from dovetail.tune.draft.new import draft_config
from dovetail.tune.draft_sections import DrafterSettings

EIGHT = {"v5e": "v5e:2x4", "v6e": "v6e:2x4", "v5p": "v5p:2x2x2", "7x": "7x:2x2x1"}
LARGE = ("deepseek-v3",)  # four of its layers are 36 GiB, and a v5e has 16
# Heads of 128 and of 64 dims, windows with soft caps, two sizes of heads, latents, experts, experts with sinks.
KINDS = ("llama3.1-8b", "smollm2-135m", "gemma2-9b", "gemma4-e4b", "deepseek-v2-lite", "qwen3-30b-a3b", "gpt-oss-20b")
MATRIX = [(name, "v5p" if name in LARGE else "v5e", 1) for name in FAMILIES]
MATRIX += [(name, chip, 8) for name in FAMILIES for chip in ("v6e", "v5p", "7x")]


def marks(name: str, chip: str) -> list[pytest.MarkDecorator]:
    return [] if name in KINDS and chip in ("v5e", "v6e") else [pytest.mark.thorough]


def made(name: str, chip: str, tensor: int) -> AbstractEngine:
    return abstract_engine(
        parse_config(dict(FAMILIES[name])), EngineOptions(tensor_parallel_size=tensor), tpu_devices(parse(EIGHT[chip]))
    )


def test_every_family_is_there():
    families = {REGISTERED[parse_config(dict(hf)).family].architecture for hf in FAMILIES.values()}
    served = {family.architecture for kind, family in REGISTERED.items() if kind != "siglip"}  # a model of images alone
    assert families == served


@pytest.mark.tpu
@pytest.mark.parametrize(("name", "chip", "tensor"), [pytest.param(*case, marks=marks(*case[:2])) for case in MATRIX])
def test_compiled(libtpu, name, chip, tensor):
    engine = made(name, chip, tensor)
    for shape in engine.corners():
        counted = count(engine.compile(shape), {"tensor": tensor}, engine.programs.devices, engine.layer_shapes)
        assert not counted.pool_copies, shape
        assert counted.memory["arguments"] == pytest.approx(engine.argument_bytes(shape), rel=0.02), shape
        assert not any(kernel.startswith("reference") for kernel in engine.kernels(shape)), shape
        assert counted.kernels, shape
        assert {one.axes for one in counted.traffic} <= {("tensor",)}


@pytest.mark.tpu
def test_compiled_with_a_draft_model(libtpu, tmp_path):
    """A verify step of DSpark, and the proposal alone that comes before one with a grammar."""
    cfg = parse_config(dict(FAMILIES["qwen3-0.6b"]))
    config = draft_config(DrafterSettings(kind="dspark"), cfg, "qwen3-0.6b")
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = EngineOptions(speculative_config={"model": str(tmp_path)}, kv_cache_memory_bytes=2**30)
    engine = abstract_engine(cfg, options, tpu_devices(parse(EIGHT["v5e"])))
    buckets = engine.programs.buckets
    for shape in (buckets.verify(1, 5), buckets.proposal(1, 5)):
        counted = count(engine.compile(shape), {"tensor": 1}, engine.programs.devices, engine.layer_shapes)
        assert not counted.pool_copies and counted.kernels, shape
