"""Statistics of the scheduler under traffic (little wasted memory) and counts of compilations."""

import random
import re

import jax
import jax.numpy as jnp
import pytest
from fake_device import Driver, add, make

from dovetail.engine.device.batch import Shape
from dovetail.engine.device.programs import Compilations, StepProgram
from dovetail.io import compiled

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("max_decode_steps", [1, 16])
def test_less_than_4_percent_of_the_memory_is_wasted_on_mixed_lengths(max_decode_steps):
    """Prompts of 50 to 1,000 tokens and answers of 20 to 400, coming and going, in pages of 16."""
    rng = random.Random(0)
    scheduler = make(64, 2048, pages=8192, size=16, max_model_len=2048, max_decode_steps=max_decode_steps)
    driver, samples = Driver(scheduler), []
    for i in range(200):
        if i < 64 or i % 3 == 0:
            prompt = [rng.randrange(30) for _ in range(rng.randint(50, 1000))]
            add(scheduler, str(i), prompt, max_tokens=rng.randint(20, 400))
        driver.step()
        stats = scheduler.stats()
        running = scheduler.running
        held = sum(len(seq.pages) for seq in running) * 16
        # prompts are random, so no page is shared and the definition can be written down as it is
        assert stats.waste == pytest.approx(1 - sum(seq.computed for seq in running) / held if held else 0.0)
        samples.append((stats.waste, stats.running))
    busy = [waste for waste, running in samples if running > 32]
    assert len(busy) > 40 and 0 < max(busy) < 0.04
    assert max(plan.steps for plan in driver.plans) == max_decode_steps


def test_preempt_all_and_what_it_counts():
    scheduler = make()
    seqs = [add(scheduler, str(i), range(i, i + 9), max_tokens=12)[0] for i in range(3)]
    driver = Driver(scheduler, 0)
    for _ in range(3):
        driver.step()
    scheduler.preempt_all()
    stats = scheduler.stats()
    assert (stats.running, stats.waiting, stats.pages_used, stats.preemptions) == (0, 3, 0, 3)
    assert scheduler.waiting == seqs, "in their old order"
    driver.drain()
    stats = scheduler.stats()
    assert (stats.prompt_tokens, stats.prefix_query_tokens) == (27, 27), "a prompt computed again counts once"
    assert all(seq.times.scheduled is not None for seq in seqs)


def test_compilations_are_counted_and_their_seconds_are_in_the_log(tmp_path, monkeypatch, caplog):
    """A step that is read from disk is not counted."""
    monkeypatch.setattr(compiled, "_folder", lambda: tmp_path)
    form, counts = jax.ShapeDtypeStruct((2,), jnp.float32), Compilations()
    program = StepProgram(Shape(8, 4, 2), jax.jit(lambda x: x + 1), (form,), {}, None)
    with caplog.at_level("INFO", "dovetail.engine"):
        for _ in range(2):
            assert program.load_or_compile(jax.devices()[:1], True, counts)(jnp.zeros(2)).tolist() == [1, 1]
    assert counts.begun == 1 and counts.seconds > 0
    assert len(re.findall(r"compiled a step of 8 tokens in 4 rows in \d+\.\d s", caplog.text)) == 1
