"""Test shapes, shardings and lowering of every shipped recipe for as many chips as it needs, without chips.

The state is laid out at full depth. The step is lowered at full width and on the whole recipe's mesh, with the same
remat and rows, but with a few layers of each kind: the others are equal to them and would be lowered once more each in
the optimizer's part alone. One recipe is lowered whole.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import pytest
from corners import corners
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from dovetail.core import recipe
from dovetail.core.chips import CHIPS
from dovetail.core.mesh import MESH_AXES, TRAIN, Placement
from dovetail.core.spec import num_params
from dovetail.models.config import ModelConfig
from dovetail.models.registry import parse_config, read_model
from dovetail.models.repeats import repeats
from dovetail.plan.derive import Derived, derive
from dovetail.plan.refusal import smallest
from dovetail.train.image_objective import image_objective
from dovetail.train.next_token import next_token
from dovetail.train.prepare import Ready, make_ready
from dovetail.train.pretrain import pretrain_class

pytestmark = pytest.mark.slow
HARDWARE = {"tpu": "v5p", "cuda": "H200"}
LAYERS = {"deepseek-v3": 5, "gemma3-4b": 12}  # three dense ones come first; five local ones to a global one


@functools.cache
def derived(name: str, platform: str) -> tuple[ModelConfig, Derived]:
    """The recipe on the fewest chips that hold it."""
    settings, chip = recipe.load(name, (), pretrain_class(name)), CHIPS[HARDWARE[platform]]
    cfg = read_model(settings.model)
    settings = settings.for_model(cfg).for_images(1437) if cfg.images else settings  # of the digits
    count = smallest(cfg, settings, chip)
    assert count is not None
    return cfg, derive(cfg, settings, chip, count * chip.devices)


def nowhere(name: str, platform: str, layers: int | None = None) -> Ready:
    """That, on devices that exist only as a description."""
    cfg, plan = derived(name, platform)
    device = AbstractDevice(CHIPS[HARDWARE[platform]].kinds[0], num_cores=1, platform=platform)
    sizes = tuple(plan.axes.get(axis, 1) for axis in MESH_AXES)
    kinds = (AxisType.Auto,) * len(MESH_AXES)
    mesh = AbstractMesh(sizes, MESH_AXES, axis_types=kinds, abstract_device=device)
    placement = Placement(mesh, TRAIN)  # type: ignore[arg-type]
    objective = (image_objective if cfg.images else next_token)(plan.settings)
    return make_ready(shallow(cfg, layers) if layers else cfg, plan, objective, placement, platform)


def shallow(cfg: ModelConfig, layers: int) -> ModelConfig:
    hf: dict[str, Any] = cfg.to_hf()
    if cfg.images:
        towers = [name for name in ("vision_config", "text_config") if name in hf]
        return parse_config(hf | {name: hf[name] | {"num_hidden_layers": layers} for name in towers})
    hf |= dict(num_hidden_layers=layers)
    if "layer_types" in hf:
        hf["layer_types"] = hf["layer_types"][:layers]
    return parse_config(hf)


SHAPES = [(name, platform) for name in recipe.shipped() for platform in HARDWARE]
SHAPED = [one for i, one in enumerate(SHAPES) if i % 4 in (0, 3)]  # each recipe on one of the two


@pytest.mark.parametrize(("name", "platform"), corners(SHAPES, SHAPED))
def test_shapes_and_shardings(name, platform):
    """A device's part of the state is what the plan counted for it."""
    ready = nowhere(name, platform)
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(ready.abstract_state.params)) == num_params(
        ready.specs
    )

    def local(tree) -> int:
        leaves = jax.tree.leaves(tree)
        return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)

    counted = ready.derived.memory
    assert local(ready.abstract_state.opt) == pytest.approx(counted.optimizer, rel=0.02)
    masters = 4 if ready.settings.precision.params == "f32" else 2
    copies = masters + (2 if ready.settings.precision.compute == "bf16" and masters == 4 else 0)
    assert local(ready.abstract_state.params) / masters * copies == pytest.approx(counted.weights, rel=0.02)
    assert local((ready.carried_state.params, ready.carried_state.copy)) <= counted.weights


LOWERED = {("qwen3-30b-a3b", "cuda")}
STEPS = [
    pytest.param(name, platform, marks=() if (name, platform) in LOWERED else pytest.mark.thorough)
    for name in recipe.shipped()
    for platform in HARDWARE
]


@pytest.mark.parametrize(("name", "platform"), STEPS)
def test_the_step_lowers(name, platform):
    ready = nowhere(name, platform, LAYERS.get(name, 2))
    if ready.settings.scan:
        assert any(repeat.times > 1 for repeat in repeats(ready.cfg)), "a test of no scan"
    text = ready.lower(ready.bucket(1)).as_text()
    assert f"mhlo.num_partitions = {ready.derived.devices} " in text


def test_one_whole_step_lowers():
    ready = nowhere("llama3-1b", "tpu")
    assert len(ready.cfg.layers) == 16
    assert "tpu_custom_call" in ready.lower().as_text()


def test_the_step_for_one_document_keeps_fewer_sums_of_softmax():
    on_gpu, on_tpu = nowhere("llama3-1b", "cuda"), nowhere("llama3-1b", "tpu")
    one, few, many = (on_gpu.memory(documents).total for documents in (1, 15, 16))
    assert one < few < many and few == on_gpu.derived.memory.total
    assert on_tpu.memory(1) == on_tpu.derived.memory
