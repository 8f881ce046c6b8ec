"""Test predicted memory and bytes sent against the compiler's, on 8 CPU devices."""

from types import SimpleNamespace

import pytest

from dovetail.core import recipe
from dovetail.core.chips import CHIPS
from dovetail.models.registry import read_model
from dovetail.plan.compiled import count
from dovetail.plan.exchange import exchanges
from dovetail.plan.links import one_domain
from dovetail.plan.plans import MeshPlan
from dovetail.plan.train_memory import memory
from dovetail.train import prepare
from dovetail.train.image_objective import image_objective
from dovetail.train.image_settings import ImagePretrain
from dovetail.train.next_token import next_token
from dovetail.train.pretrain import pretrain_class


@pytest.fixture(scope="module")
def compiled():
    """(name, overrides) -> what was predicted and what was counted; each once."""
    made: dict[tuple, SimpleNamespace] = {}

    def of(name: str, *overrides: str) -> SimpleNamespace:
        if (name, *overrides) not in made:
            made[name, *overrides] = _compile(name, overrides)
        return made[name, *overrides]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare, "host_memory", lambda: 4 << 40)  # as much as it takes
        yield of


def _compile(name: str, overrides: tuple[str, ...]) -> SimpleNamespace:
    words = ["schedule.warmup=0", *overrides]
    settings = recipe.load(name, words, pretrain_class(name, words))
    if isinstance(settings, ImagePretrain):
        settings = settings.for_model(read_model(settings.model))
        ready = prepare.prepare(settings, image_objective(settings))
    else:
        ready = prepare.prepare(settings, next_token(settings))
    mesh, filled = ready.placement.mesh, ready.settings
    counted = count(ready.lower(None).compile(), dict(mesh.shape), list(mesh.devices.flat))
    predicted = memory(ready.cfg, filled, ready.derived.axes, filled.remat, filled.per_device, on_host=True)
    plan = MeshPlan(filled.mesh, bool(filled.scan), filled.remat, filled.per_device, filled.accumulate, predicted)
    sent = exchanges(ready.cfg, filled, plan, one_domain(CHIPS["H100"], ready.derived.axes))
    return SimpleNamespace(counted=counted, memory=predicted, sent=sent)


RUNS = [
    pytest.param("tiny", (), marks=pytest.mark.thorough),
    pytest.param("tiny", ("mesh.fsdp=8", "scan=true"), marks=pytest.mark.slow),
    pytest.param("smollm2-135m", ("batch=8", "length=256"), marks=pytest.mark.thorough),
    pytest.param("tiny-vit", ("batch=512",), marks=pytest.mark.slow),
    pytest.param("vit-s16", ("batch=128",), marks=pytest.mark.thorough),
    pytest.param("siglip-b16", ("batch=64",), marks=pytest.mark.thorough),
]


@pytest.mark.parametrize(("name", "overrides"), RUNS)
def test_memory_is_what_the_compiler_allocates(compiled, name, overrides):
    found = compiled(name, *overrides)
    assert found.memory.total == pytest.approx(found.counted.total, rel=0.15)  # 14.7% more than jax 0.12 allocates
    state = found.memory.weights + found.memory.optimizer
    if name == "tiny":  # in f32, so without a copy to compute with: the state and nothing else is handed over
        assert state == pytest.approx(found.counted.memory["arguments"], rel=0.01)


@pytest.mark.slow
def test_bytes_are_those_of_the_compiled_collectives(compiled):
    """On a CPU gradients are summed where TPUs and GPUs scatter them, which sends twice as much. (Layers that are no
    loop keep their gathered weights there for the backward pass.)"""
    ours, theirs = _sent(compiled("tiny", "mesh.fsdp=8", "scan=true"))
    assert ours["all-gather"] == pytest.approx(theirs["all-gather"], rel=0.05)
    assert 2 * ours["reduce-scatter"] == pytest.approx(theirs["all-reduce"], rel=0.05)
    ours, theirs = _sent(compiled("tiny"))
    assert ours == {"all-reduce": pytest.approx(theirs["all-reduce"], rel=0.05)}


def _sent(found: SimpleNamespace) -> tuple[dict[str, float], dict[str, float]]:
    sums: tuple[dict[str, float], dict[str, float]] = ({}, {})
    for total, listed in zip(sums, (found.sent, found.counted.traffic), strict=True):
        for one in listed:
            total[one.kind] = total.get(one.kind, 0.0) + one.bytes
    return sums
