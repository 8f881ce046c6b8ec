"""The steps of an abstract engine: the programs of a real one, compiled from shapes, and the copies of its pools."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from engine.engines import OPTIONS, make_llm
from jax.errors import JaxRuntimeError
from reference_models import FAMILIES, reference
from refusals import refuses
from vision_models import vision_reference

from dovetail.core.compute import compute_of
from dovetail.core.spec import held_bytes
from dovetail.engine import build, pages
from dovetail.engine.build import abstract_engine
from dovetail.engine.device.encoder import EncoderShape
from dovetail.engine.device.programs import Programs
from dovetail.engine.llm import LLM
from dovetail.engine.options import EngineOptions
from dovetail.plan.compiled import count
from dovetail.plan.hlo import copies_of, read
from dovetail.plan.serve_memory import bytes_beside, sampler_bytes, step_estimate

pytestmark = pytest.mark.slow

EVERY_PROGRAM = True

GIB = 2**30


@pytest.mark.parametrize(
    ("name", "tensor", "room"),
    [("llama3.1", 1, {}), ("llama3.1", 2, {}), ("llama3.1", 2, dict(max_loras=2)), ("smolvlm", 2, {})],
)
def test_the_programs_are_those_that_an_engine_runs(name, tensor, room):
    options = OPTIONS | room | dict(tensor_parallel_size=tensor, kv_cache_memory_bytes=2**20, dtype="f32")
    folder = reference(name)[1] if name in FAMILIES else vision_reference(name)[1]
    llm = LLM(folder, load_format="dummy", **options)
    made = abstract_engine(llm.config, EngineOptions.of(options), jax.devices())
    assert made.pages == llm.runner.num_pages
    assert (made.weight_bytes, made.pool_bytes) == (_local(llm.runner.params), _local(llm.runner.cache))
    for shape in made.corners():
        if isinstance(shape, EncoderShape):
            continue
        assert shape in llm.runner.buckets.usual() and shape.images == (name == "smolvlm" and shape.is_prompts)
        ours, theirs = made.programs.of(shape, made.params, made.programs.pages(made.pages)), llm.runner._program(shape)
        assert jax.tree.map(_form, ours.abstract) == jax.tree.map(_form, theirs.abstract)
        assert ours.static["cfg"] == theirs.static["cfg"] and ours.function is theirs.function
    for encode in made.programs.encoder.usual() if made.programs.encoder else ():
        ours, theirs = made.programs.of(encode, made.params, None), llm.runner._program(encode)
        assert jax.tree.map(_form, ours.abstract) == jax.tree.map(_form, theirs.abstract)


def config(**options):
    return make_llm("llama3.1", load_format="dummy", **options).config


def test_a_step_for_devices_that_are_not_here_is_counted():
    options = EngineOptions.of(OPTIONS | dict(tensor_parallel_size=2, kv_cache_memory_bytes=2**20, dtype="f32"))
    made = abstract_engine(
        make_llm("llama3.1", load_format="dummy", kv_cache_memory_bytes=2**20).config, options, jax.devices()
    )
    least, most, prompts = made.corners()
    assert (least.rows, most.rows, prompts.tokens) == (1, OPTIONS["max_num_seqs"], OPTIONS["max_num_batched_tokens"])
    counted = count(made.compile(prompts), {"tensor": 2}, made.programs.devices, made.layer_shapes)
    assert counted.memory["arguments"] == pytest.approx(made.argument_bytes(prompts), rel=0.01)
    assert made.weight_bytes + made.pool_bytes < made.argument_bytes(prompts) < made.argument_bytes(most)
    assert {one.axes for one in counted.traffic} == {("tensor",)}
    assert made.flops(least) * most.rows == pytest.approx(made.flops(most))


def test_over_devices_prompts_gather_logits_and_no_weights():
    options = EngineOptions.of(OPTIONS | dict(tensor_parallel_size=2, kv_cache_memory_bytes=2**20, dtype="bf16"))
    made = abstract_engine(
        make_llm("llama3.1", load_format="dummy", kv_cache_memory_bytes=2**20).config, options, jax.devices()
    )
    prompts = made.corners()[-1]
    counted = count(made.compile(prompts), {"tensor": 2}, made.programs.devices)
    sent = sum(one.bytes for one in counted.traffic if one.kind == "all-gather")
    assert 0 < sent <= prompts.rows * made.cfg.vocab * 4 / 2, "half of the logits"


def test_more_devices_than_there_are():
    with refuses("tensor_parallel_size", naming="8 devices"):
        abstract_engine(
            make_llm("llama3.1", load_format="dummy").config, EngineOptions(tensor_parallel_size=16), jax.devices()
        )


def _local(tree) -> int:
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))


def _form(x) -> tuple:
    return x.shape, x.dtype


class Step:
    """Stand in for the compiler's memory analysis of a step: a fixed size, and more with each page that it copies."""

    def __init__(self, fixed: int, copied: int):
        self.fixed, self.copied, self.asked, self.read = fixed, copied, [], []

    def __call__(self, pages: int) -> int:
        self.asked.append(pages)
        return self.fixed + self.copied * pages

    def copies(self, pages: int) -> bool:
        self.read.append(pages)
        return bool(self.copied)


PAGE, LAYER, MOST = 2**20, 2**15, 10**6  # 32 layers


def test_a_step_that_copies_nothing_is_compiled_once():
    step = Step(GIB // 4, 0)
    assert bytes_beside(50_000, 100 * GIB, PAGE, LAYER, MOST, step, step.copies) == (GIB // 4, 0)
    assert step.asked == [50_000]


def test_a_step_that_copies_a_layers_pages_twice_is_seen():
    step = Step(GIB // 4, 2 * LAYER)
    assert bytes_beside(50_000, 100 * GIB, PAGE, LAYER, MOST, step, step.copies) == (GIB // 4, 2 * LAYER)
    assert len(step.asked) == 2


def test_a_step_as_large_as_a_layers_pages_may_still_copy_nothing():
    step = Step(GIB, 0)
    assert bytes_beside(2000, 4 * GIB, PAGE, LAYER, MOST, step, step.copies) == (GIB, 0)
    assert step.asked == step.read and len(step.asked) == 1, "its program is read, and not compiled again"


def test_a_program_that_cannot_be_read_is_measured_twice():
    step = Step(GIB, 0)
    assert bytes_beside(2000, 4 * GIB, PAGE, LAYER, MOST, step, lambda _: True) == (GIB, 0) and len(step.asked) == 2


def test_memory_is_not_measured_again_if_all_pages_fit():
    step = Step(GIB, LAYER)
    fixed, copied = bytes_beside(100, 100 * GIB, PAGE, LAYER, 100, step, step.copies)
    assert len(step.asked) == 1 and copied == 0 and fixed + 100 * PAGE < 100 * GIB


class Measured:
    """Let an engine with `room` times the estimate of its largest step, which is `step_bytes`, choose its pages."""

    def __init__(self, monkeypatch, room: int, step_bytes):
        programs = build.programs_for(config(), EngineOptions.of(OPTIONS | dict(dtype="bf16")), compute_of("bf16"))
        sizes = programs.buckets.largest().tokens, programs.buckets.max_rows
        self.estimate, self.asked = step_estimate(programs.cfg, 1, *sizes, 2), []
        self.page_bytes = held_bytes(programs.pages(2)) - held_bytes(programs.pages(1))
        self.room = room * self.estimate

        def measure(_programs, _compile, pages):
            self.asked.append(pages)
            return step_bytes(self) - sampler_bytes(programs.buckets.max_rows, programs.cfg.vocab)

        monkeypatch.setattr(Programs, "step_memory", measure)
        monkeypatch.setattr(Programs, "copies_pages", lambda *_: False)
        self.pages = pages._measured_pages(programs, lambda *_: None, self.room, self.page_bytes, most=10**9)

    def fills(self, room: int) -> bool:
        return 0.98 * room < self.pages * self.page_bytes <= room


def test_the_largest_step_is_compiled_for_the_pages_that_the_engine_gets(monkeypatch):
    found = Measured(monkeypatch, 64, lambda self: self.estimate)
    assert found.asked == [found.pages] and 0.95 * found.room < found.pages * found.page_bytes <= 63 * found.estimate


def test_a_step_of_another_size_than_expected_changes_the_pages(monkeypatch):
    found = Measured(monkeypatch, 8, lambda self: 0)
    assert len(found.asked) == 1 and found.fills(found.room)
    found = Measured(monkeypatch, 8, lambda self: 4 * self.estimate)
    assert len(found.asked) == 1 and found.fills(4 * found.estimate)


def test_a_step_that_the_compiler_refuses_is_measured_with_fewer_pages(monkeypatch):
    def step_bytes(self):
        if len(self.asked) == 1:
            raise JaxRuntimeError("RESOURCE_EXHAUSTED: XLA:TPU compile permanent error")
        return 2 * self.estimate

    found = Measured(monkeypatch, 8, step_bytes)
    assert found.asked == [found.asked[0], found.asked[0] // 2] and found.fills(6 * found.estimate)


def test_a_copied_pool_is_read_from_the_program():
    """XLA copies an array that is used after its update, and updates a donated one in place."""
    pool, rows = jax.ShapeDtypeStruct((64, 16, 4, 32), jnp.float32), jax.ShapeDtypeStruct((16, 4, 32), jnp.float32)

    def keeps(pool, rows):
        return pool.at[3].set(rows), pool[::-1]

    def text(function, **donated) -> str:
        return jax.jit(function, **donated).lower(pool, rows).compile().as_text() or ""

    assert copies_of(read(text(keeps)), pool.shape)
    assert not copies_of(read(text(lambda pool, rows: pool.at[3].set(rows), donate_argnums=0)), pool.shape)


def test_the_largest_step_copies_no_pages():
    options = EngineOptions.of(OPTIONS | dict(kv_cache_memory_bytes=2**20, dtype="f32"))
    made = abstract_engine(config(kv_cache_memory_bytes=2**20), options, jax.devices())
    compile = lambda shape, pages: made.programs.compile(shape, made.params, pages)  # noqa: E731
    assert made.programs.copies_pages(compile, made.pages) is False
