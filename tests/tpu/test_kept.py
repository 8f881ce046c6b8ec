"""What a loop over layers keeps for the backward pass, traced as for a TPU, beside the estimate: no compiler is needed.

Of `tiny` and of SmolLM2 libtpu made exactly the stacked buffers that the trace has."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import jax
import pytest

from dovetail.core import recipe
from dovetail.core.chips import CHIPS
from dovetail.core.mesh import TRAIN, Placement, make_mesh
from dovetail.models.registry import read_model
from dovetail.models.repeats import repeats
from dovetail.plan.derive import derive
from dovetail.plan.train_memory import LOOPED, activations_of
from dovetail.train.abstract_batch import abstract_batch
from dovetail.train.next_token import next_token
from dovetail.train.prepare import make_ready, make_step, step_context
from dovetail.train.settings import Pretrain

CASES = [
    pytest.param("smollm2-135m", "none", 4, 1, marks=pytest.mark.slow),  # heads of 64, which a TPU pads to 128
    pytest.param("qwen3-0.6b", "none", 1, 1, marks=pytest.mark.thorough),
    pytest.param("llama3-8b", "none", 1, 1, marks=pytest.mark.thorough),
    pytest.param("mixtral-8x7b", "none", 1, 1, marks=pytest.mark.thorough),
    pytest.param("llama3-8b", "attention", 1, 1, marks=pytest.mark.thorough),
    pytest.param("qwen3-30b-a3b", "dots", 1, 1, marks=pytest.mark.thorough),
    pytest.param("llama3-8b", "dots", 1, 1, marks=pytest.mark.thorough),
    pytest.param("mixtral-8x7b", "dots", 1, 1, marks=pytest.mark.slow),
    pytest.param("deepseek-v3", "dots", 1, 1, marks=pytest.mark.thorough),
    pytest.param("llama3-8b", "attention", 2, 2, marks=pytest.mark.slow),  # rows in two slices
    pytest.param("qwen3-30b-a3b", "dots", 2, 2, marks=pytest.mark.thorough),
]


@pytest.mark.parametrize(("name", "remat", "rows", "context"), CASES)
def test_kept_is_what_was_estimated(name, remat, rows, context):
    words = ["scan=true", f"remat={remat}", "accumulate=1", f"batch={4 // context * rows}", "mesh.data=1"]
    words += [f"mesh.fsdp={4 // context}", f"mesh.context={context}"]
    settings = recipe.load(name, words, Pretrain)
    cfg, objective = read_model(settings.model), next_token(settings)
    derived = derive(cfg, settings, CHIPS["v5p"], 4, hbm=2**44)
    ready = make_ready(cfg, derived, objective, Placement(make_mesh(derived.axes, jax.devices()[:4]), TRAIN), "tpu")
    ctx = step_context(ready.settings, ready.placement, "tpu", None)
    step = make_step(cfg, ready.settings, objective, ready.optimizer, ready.rate, ctx)
    traced = jax.jit(step).trace(
        ready.abstract_state, abstract_batch(ready.settings, objective.columns, ready.placement)
    )
    kept = max(_stacked(traced.jaxpr.jaxpr, repeats(cfg)[-1].times))
    tokens = rows * settings.length // context
    saved = activations_of(cfg, 0, 1, 1, remat, on_tpu=True)[0] * tokens * 2 * (LOOPED if remat == "none" else 1)
    assert kept / 4 == pytest.approx(saved, rel=0.07)


def _stacked(jaxpr: Any, layers: int) -> Iterator[int]:
    """Bytes that each loop forwards over so many layers stacks, on all devices."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan" and eqn.params["length"] == layers and not eqn.params["reverse"]:
            forms = [one.aval for one in eqn.outvars if one.aval.shape[:1] == (layers,)]
            yield sum(math.prod(x.shape) * x.dtype.itemsize for x in forms)
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "jaxpr")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from _stacked(inner, layers)
