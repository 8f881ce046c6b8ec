"""Compiled shapes of steps: every plan has one, and a start compiles it."""

from __future__ import annotations

import random

import numpy as np
import pytest

from dovetail.core.errors import UserError
from dovetail.engine.build import page_size_for
from dovetail.engine.device.batch import Buckets, steps_in_time
from dovetail.engine.options import EngineOptions
from dovetail.engine.request.params import SamplingParams
from dovetail.engine.request.sequence import Request, Sequence
from dovetail.engine.schedule.plan import PlanRow, StepPlan
from dovetail.ops.kernels.tpu.needs import TABLE_BYTES, table_bytes

pytestmark = pytest.mark.slow

SIZES = {
    "a GPU": Buckets(512, 16384, 512),
    "an 8B model on an H200": Buckets(512, 16384, 512, step_seconds=(3.3e-3, 16e-6)),
    "few": Buckets(3, 64, 8),
    "one": Buckets(1, 2048, 128),
    "more rows than tokens": Buckets(256, 64, 32),
    "a CPU": Buckets(
        256, 8192, 512, few_rows=(1, 2), least_rows=8, least_tokens=32, tokens_a_row=1024, halves=False,
        few_hidden=False,
    ),
    "a GPU with images": Buckets(512, 16384, 512, images=True, mrope=True),
    "a CPU with images": Buckets(
        64, 2048, 128, few_rows=(1, 2), least_rows=8, least_tokens=32, tokens_a_row=1024, halves=False,
        few_hidden=False, images=True,
    ),
    "one step": Buckets(64, 2048, 128, max_decode_steps=1),
}  # fmt: skip


def plan(counts: list[int], samples: bool, steps: int = 1) -> StepPlan:
    request = Request("r", (1,), SamplingParams())
    return StepPlan([PlanRow(Sequence(request, pages=[1]), 0, count, samples) for count in counts], steps)


@pytest.mark.parametrize("name", SIZES)
def test_every_plan_has_a_shape_that_was_compiled(name):
    buckets, dice = SIZES[name], random.Random(name)
    compiled = set(buckets.usual())
    for _ in range(300):
        rows = dice.randint(1, buckets.max_rows)
        if dice.random() < 0.3:
            given = plan([1] * rows, True, dice.choice(buckets.steps_for(rows)))
        else:
            rows = min(rows, buckets.max_tokens)
            most = dice.choice((8, 64, buckets.max_tokens)) // rows
            given = plan([dice.randint(1, max(1, most)) for _ in range(rows)], False)
        shape = buckets.shape_for(given)
        assert shape in compiled and shape.tokens >= given.num_tokens and shape.rows >= rows
        assert shape.is_decode == given.is_decode and (shape.is_decode or shape.sampler in compiled)
        scored = buckets.shape_for(given, keeps_hidden=True)
        assert scored in compiled and scored.tokens >= given.num_tokens and scored.rows >= rows
        if buckets.images:
            given.images = {b"key": np.zeros(1, np.int32)}
            seeing = buckets.shape_for(given)
            assert seeing in compiled and seeing.images and seeing.sampler in compiled
            assert seeing.tokens >= given.num_tokens and seeing.rows >= rows
            assert buckets.shape_for(given, keeps_hidden=True) == scored and scored.images


def test_a_start_compiles_few_programs():
    """Each takes seconds to compile, and the first start waits for all of them."""
    assert len(SIZES["an 8B model on an H200"].usual()) == 31
    assert len(SIZES["a GPU"].usual()) == 40
    assert len(SIZES["a GPU with images"].usual()) == 55


def test_a_dispatch_is_no_longer_than_a_new_request_may_wait():
    assert steps_in_time(1e-3) == (1, 4, 16) and steps_in_time(5e-3) == (1, 4) and steps_in_time(1.0) == (1,)
    buckets = SIZES["an 8B model on an H200"]
    assert buckets.steps_for(1) == (1, 4) and buckets.steps_for(512) == (1,)
    assert SIZES["one step"].steps_for(1) == (1,)


@pytest.mark.parametrize(
    "rows, length, size", [(256, 8192, 128), (256, 131_072, 256), (512, 131_072, 512), (8, 128, 128)]
)
def test_pages_of_a_tpu_are_long_enough_for_its_kernels_table(rows, length, size):
    assert page_size_for(EngineOptions(max_num_seqs=rows), length, "tpu") == size
    assert table_bytes(rows, -(-length // size)) <= TABLE_BYTES
    assert page_size_for(EngineOptions(max_num_seqs=rows), length, "cuda") == 16


def test_pages_that_are_too_short_for_a_tpu_are_refused_with_what_to_do():
    with pytest.raises(UserError, match=r"256 sequences of 131072 tokens.* 8\.0 MiB.* Leave it out"):
        page_size_for(EngineOptions(block_size=16), 131_072, "tpu")
