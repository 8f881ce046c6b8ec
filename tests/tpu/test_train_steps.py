"""Every recipe's train step, compiled for a TPU topology that it fits: memory beside the estimate, what crosses slices.

`make test-tpu` compiles the smaller ones, `make test-tpu-all` all (tests/cli/test_compile.py has the one case of
`make test`). Each case stands alone.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest

from dovetail.cli.compile import compiled, recipe_report
from dovetail.core import recipe
from dovetail.models.registry import read_model
from dovetail.plan.derive import derive
from dovetail.plan.topology import parse, tpu_devices
from dovetail.train.next_token import next_token
from dovetail.train.prepare import prepare
from dovetail.train.pretrain import pretrain_class
from dovetail.train.settings import Pretrain

pytestmark = pytest.mark.slow


class Case(NamedTuple):
    recipe: str
    topology: str
    slices: int = 1
    words: tuple[str, ...] = ()
    within: float = 0.15  # of the estimate


SMALL = 1.0  # of a step of some MiB: what it keeps stays in vector memory, and its program is as large as its state
SMALLEST = [
    Case("tiny", "v5e:2x2", 1, ("scan=true",), SMALL),
    Case("tiny", "v5e:2x2", 2, ("scan=true", "mesh.fsdp=4"), SMALL),
    Case("tiny", "v5p:2x2x1", 4, ("scan=true", "batch=16"), SMALL),
    Case("tiny", "v6e:2x2", 1, ("scan=true",), SMALL),
    Case("tiny", "7x:2x2x1", 1, ("scan=true",), SMALL),
]
MATRIX = [
    Case("smollm2-135m", "v5e:2x2"),
    Case("qwen3-0.6b", "v5e:4x4"),
    Case("llama3-8b", "v5p:4x4x4", 2),
]
LARGE = [
    Case("llama3-1b", "v6e:4x4"),
    Case("gemma3-4b", "v5p:2x2x4"),
    Case("mistral-7b", "v5p:4x4x4"),
    Case("llama3-8b", "v5p:4x4x4"),
    Case("llama3-8b", "v6e:16x16"),
    Case("mixtral-8x7b", "v5p:4x4x8"),
    Case("qwen3-30b-a3b", "v5p:4x4x8"),
    Case("qwen3-30b-a3b", "7x:4x4x4"),
    Case("deepseek-v3", "v5p:8x8x16"),
]
ALL = [*SMALLEST, *MATRIX, *LARGE]


def load(case: Case) -> Pretrain:
    return recipe.load(case.recipe, [*case.words, f"mesh.slices={case.slices}"], Pretrain)


def test_every_recipe_has_its_case():
    assert {case.recipe for case in ALL} == {name for name in recipe.shipped() if pretrain_class(name) is Pretrain}


@pytest.mark.parametrize("case", ALL, ids=lambda case: f"{case.recipe} {case.topology} {case.slices}")
def test_it_fits(case):
    """Without a compiler: a plan is found."""
    settings, topology = load(case), parse(case.topology)
    devices = topology.chips * topology.chip.devices * case.slices
    found = derive(read_model(settings.model), settings, topology.chip, devices, case.slices)
    assert found.limit and found.memory.total <= found.limit


@pytest.mark.tpu
@pytest.mark.parametrize(
    Case._fields, [*SMALLEST, *MATRIX, *(pytest.param(*case, marks=pytest.mark.thorough) for case in LARGE)]
)
def test_compiled(libtpu, recipe, topology, slices, words, within):
    settings = load(Case(recipe, topology, slices, words))
    devices = tpu_devices(parse(topology), slices)
    ready = prepare(settings, next_token(settings), devices, "tpu")
    found = recipe_report(recipe, ready, *compiled(lambda options: ready.compile(ready.bucket(1), options=options)))
    estimate = found.estimated["memory in all"]
    assert found.limit and found.counted.total <= found.limit
    assert found.counted.total == pytest.approx(estimate, rel=within)
    far = [one for one in found.counted.traffic if one.crosses]
    assert bool(far) == (slices > 1)
    assert all(one.axes[0] == "data" and one.kind in ("all-reduce", "reduce-scatter") for one in far)
