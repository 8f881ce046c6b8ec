"""Test sampling from sharded logits: the tokens of one device, without gathering the logits."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from ops.test_sample import make_inputs, random_logits

from dovetail.core.mesh import SERVE, Placement, make_mesh
from dovetail.ops import sample as ops
from dovetail.plan.collectives import collectives
from dovetail.plan.hlo import read

pytestmark = pytest.mark.slow

S = 16
SIZES = [
    8 * 1056,  # a device's share is no whole number of blocks, as Llama's 16,032 words are not
    8003,  # V is not divided: every device has it whole
]


@pytest.fixture(scope="module")
def eight() -> Placement:
    return Placement(make_mesh({"tensor": 8}), SERVE)


@pytest.mark.parametrize("V", SIZES)
def test_tokens_are_those_of_one_device_and_no_logits_are_gathered(V, eight):
    logits = random_logits(S, V)
    inputs = make_inputs(S, temperature=np.where(np.arange(S) % 4 == 0, 0.0, 1.0), top_p=0.9, seed_lo=np.arange(S))
    expected = np.asarray(jax.jit(ops.choose)(logits, inputs))
    split = jax.device_put(logits, eight.sharding((None, "vocab"), logits.shape))
    compiled = jax.jit(lambda logits, inputs: ops.choose(logits, inputs, eight)).lower(split, inputs).compile()
    assert np.asarray(compiled(split, inputs)).tolist() == expected.tolist()
    assert len(set(expected.tolist())) > S // 2
    sent = [one.bytes for one in collectives(read(compiled.as_text() or ""), 8)]
    assert max(sent) < logits.nbytes / 8
