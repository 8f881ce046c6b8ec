"""Test that derived plans divide, fit and keep given values, and that refusals propose what fits."""

import math
import re
from dataclasses import replace

import jax
import pytest
from refusals import refuses

from dovetail.core import recipe
from dovetail.core.chips import CHIPS, GIB
from dovetail.core.errors import OutOfMemoryError, RecipeError
from dovetail.core.mesh import TRAIN, Placement, make_mesh
from dovetail.core.spec import abstract
from dovetail.core.training import REMATS, Mesh
from dovetail.models.registry import parse_config, read_model
from dovetail.models.spec import spec
from dovetail.plan.derive import derive
from dovetail.plan.plans import layers_folded
from dovetail.plan.refusal import smallest
from dovetail.plan.train_memory import memory
from dovetail.train import prepare
from dovetail.train.next_token import next_token
from dovetail.train.optim import make_optimizer
from dovetail.train.prepare import least_share
from dovetail.train.settings import Pretrain

PLAIN = ("mesh.tensor=1", "mesh.context=1")


def load(name: str, *overrides: str):
    settings = recipe.load(name, ["schedule.warmup=0", *overrides], Pretrain)
    return read_model(settings.model), settings


def sound(derived):
    """Everything is filled in, multiplies out and fits."""
    s = derived.settings
    assert math.prod(derived.axes.values()) == derived.devices
    assert s.per_device * s.accumulate * s.mesh.data * s.mesh.fsdp * s.mesh.expert == s.batch
    assert s.remat in REMATS and s.scan is not None
    assert derived.limit is None or derived.memory.total <= derived.limit
    return s


def test_a_cpu_splits_rows_and_recomputes_nothing():
    s = sound(derive(*load("tiny"), devices=8))
    assert (s.mesh.data, s.mesh.fsdp, s.remat, s.per_device, s.accumulate) == (8, 1, "none", 1, 1)
    assert s.scan is False


def test_a_cpu_with_less_memory_recomputes_or_splits_more():
    cfg, settings = load("smollm2-135m", "batch=8")
    plans = [derive(cfg, settings, None, 4, hbm=size * GIB, on_host=True) for size in (400, 10)]
    assert (sound(plans[0]).remat, plans[0].settings.per_device) == ("none", 2)
    assert (sound(plans[1]).remat, plans[1].settings.per_device) != ("none", 2)
    assert plans[0].settings == derive(cfg, settings, None, 4).settings  # nothing else changes for one that fits


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 8])
def test_a_model_larger_than_the_hosts_memory_is_refused(devices):
    """Its devices share it: more of them would not help."""
    with refuses(None, OutOfMemoryError, naming="What would do: more memory"):
        derive(*load("deepseek-v3"), devices=devices, hbm=64 * GIB // devices, on_host=True)


def test_the_devices_of_a_hosts_processes_share_its_memory():
    assert least_share([(7, 1024, 1)]) == GIB
    assert least_share([(7, 1024, 8)]) == GIB // 8
    assert least_share([(7, 1024, 2), (7, 1024, 2), (9, 4096, 2)]) == GIB // 4  # the fullest host counts for all
    assert least_share([(7, 1024, 1), (9, 0, 1)]) is None  # one does not say


def test_a_run_on_a_cpu_is_planned_with_its_hosts_memory(monkeypatch):
    _, settings = load("tiny")
    monkeypatch.setattr(prepare, "host_memory", lambda: 64 * GIB)
    derived = prepare.prepare(settings, next_token(settings)).derived
    assert derived.hardware == "8 x CPU device, 8.0 GiB each" and derived.limit == 4 * GIB
    monkeypatch.setattr(prepare, "host_memory", lambda: GIB // 8)
    with refuses(None, OutOfMemoryError, naming="each of 8 x CPU device"):
        prepare.prepare(settings, next_token(settings))


@pytest.mark.parametrize(
    ("name", "mesh", "said"),
    [
        ("tiny", [], r"rows are split over the devices; weights are whole on each"),
        ("tiny", ["mesh.data=8", "mesh.fsdp=1"], r"given; rows are split over the devices; weights are whole on each"),
        ("tiny", ["mesh.fsdp=8"], r"fsdp given; the state \([\d.]+ MiB\) is split: each device holds [\d.]+ MiB of it"),
        ("tiny", ["mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2"], r"given; the state .* is split"),
        ("tiny", ["mesh.tensor=2"], r"tensor given; the state .* is split"),
        ("mixtral-8x7b", ["mesh.expert=4"], r"expert given; the state .* is split"),
        ("tiny", ["mesh.context=2", "mesh.fsdp=1"], r"fsdp, context given; the state .* is split"),
    ],
)
@pytest.mark.parametrize("limit", [None, 100_000 * GIB])
def test_the_mesh_is_explained(name, mesh, said, limit):
    line = derive(*load(name, *mesh), devices=8, hbm=limit, on_host=True).explain()[1]
    said = said if limit is None else said.replace("weights are whole on each", "the state .* fits on each, so no .*")
    assert re.search(said, line), line


def test_a_small_model_on_one_device_needs_nothing():
    s = sound(derive(*load("llama3-1b", "batch=8"), CHIPS["H200"], 1))
    assert (s.remat, s.per_device, s.accumulate) == ("none", 8, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "chip", "devices", "slices"),
    [
        ("llama3-8b", "H200", 8, 1), ("llama3-8b", "v5p", 256, 1), ("llama3-8b", "v5e", 256, 2),
        ("gemma3-4b", "v5e", 64, 1), ("qwen3-30b-a3b", "H200", 64, 1), ("mixtral-8x7b", "H100", 64, 1),
        ("smollm2-135m", "v5e", 16, 1), ("mistral-7b", "H100", 8, 1), ("qwen3-0.6b", "TPU7x", 8, 1),
    ],
)  # fmt: skip
def test_plans_divide_and_fit(name, chip, devices, slices):
    derived = derive(*load(name), CHIPS[chip], devices, slices)
    s = sound(derived)
    assert s.mesh.data % slices == 0
    assert any("total" in line for line in derived.explain())


def test_less_memory_means_more_recomputation_or_fewer_rows():
    cfg, settings = load("llama3-8b", "batch=64", "mesh.data=1", "mesh.fsdp=8", "scan=false")
    plans = [sound(derive(cfg, settings, None, 8, hbm=size * GIB)) for size in (140, 60, 45)]
    assert plans[0].remat == "none"
    assert [REMATS.index(p.remat) for p in plans] == sorted(REMATS.index(p.remat) for p in plans)
    assert plans[-1].remat != "none" or plans[-1].per_device < plans[0].per_device


@pytest.mark.slow
def test_a_state_that_does_not_fit_one_device_is_split():
    assert sound(derive(*load("llama3-8b"), CHIPS["H100"], 8)).mesh.fsdp > 1
    assert sound(derive(*load("smollm2-135m"), CHIPS["H100"], 8)).mesh.fsdp == 1


def test_given_values_are_kept():
    given = ("mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2", "remat=full", "per_device=4", "scan=false")
    derived = derive(*load("llama3-8b", *given), CHIPS["H200"], 8)
    s = sound(derived)
    assert (s.mesh.data, s.mesh.fsdp, s.mesh.tensor, s.remat, s.per_device, s.scan) == (2, 2, 2, "full", 4, False)
    assert s.accumulate == 512 // (4 * 4)
    assert sum("given" in line for line in derived.explain()) == 4
    assert sound(derive(*load("llama3-8b", "accumulate=64"), CHIPS["H200"], 8)).accumulate == 64


def test_long_rows_are_shared_over_context():
    s = sound(derive(*load("llama3-1b", "length=131072", "batch=2", "mesh.context=4"), CHIPS["H200"], 8))
    assert s.mesh.context == 4 and s.mesh.data * s.mesh.fsdp == 2


def test_an_unknown_device_is_planned_by_its_drivers_memory():
    derived = derive(*load("llama3-1b", "batch=8"), None, 1, hbm=40 * GIB)
    assert sound(derived).accumulate > 1  # all 8 rows at once would need more than it has
    assert "not in the table" in derived.explain()[0]


@pytest.mark.parametrize(
    ("overrides", "devices", "naming"),
    [
        (["remat=none", "per_device=64"], 8, "remat left open or per_device and accumulate left open"),
        (["mesh.data=8", "mesh.fsdp=1"], 8, "mesh.data and mesh.fsdp left open"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused_with_what_would(overrides, devices, naming):
    with refuses(None, OutOfMemoryError, naming=naming):
        derive(*load("llama3-8b", *overrides), CHIPS["H200"], devices)


@pytest.mark.parametrize(
    ("name", "overrides", "devices", "param", "naming"),
    [
        ("llama3-8b", ["batch=6", *PLAIN], 4, None, "batch=8 can"),
        ("llama3-8b", ["batch=2", *PLAIN], 8, None, "mesh.context=4"),
        ("llama3-8b", ["per_device=3"], 8, None, "per_device=3"),
        ("llama3-8b", ["mesh.tensor=3"], 8, "mesh.tensor", "32 attention heads"),
        ("llama3-8b", ["mesh.tensor=16"], 8, None, "tensor 16"),
        ("llama3-8b", ["mesh.data=3", "mesh.fsdp=2"], 8, None, "data 3 x fsdp 2"),
        ("llama3-8b", ["mesh.expert=2"], 8, "mesh.expert", "no experts"),
        ("llama3-8b", ["mesh.fsdp=3"], 3, "mesh.fsdp", "4096"),
        ("llama3-8b", ["mesh.context=3"], 3, "mesh.context", "8192"),
        ("llama3-8b", ["length=16384"], 8, "length", "8192 positions, got 16384"),
        ("mixtral-8x7b", ["mesh.expert=3"], 9, "mesh.expert", "8 experts"),
        ("tiny", ["mesh.slices=3"], 8, None, "in 3 slices"),
    ],
)
def test_recipes_that_do_not_match_model_or_devices_are_refused(name, overrides, devices, param, naming):
    with refuses(param, RecipeError, naming=naming):
        derive(*load(name, *overrides), None if name == "tiny" else CHIPS["H200"], devices)


def test_a_router_loss_is_refused_for_a_model_without_experts():
    cfg, settings = load("llama3-8b", "loss.router_aux=0.1")
    with refuses("loss.router_aux", RecipeError):
        next_token(settings).check(cfg)


def test_the_proposal_of_a_refusal_fits():
    with refuses(None, OutOfMemoryError, naming="What would do: 4 devices"):
        derive(*load("llama3-8b"), CHIPS["H100"], 1)
    sound(derive(*load("llama3-8b"), CHIPS["H100"], 4))
    assert smallest(*load("llama3-8b"), CHIPS["H100"]) == 4


def test_slices_of_the_machine_and_of_the_recipe():
    assert derive(*load("tiny"), devices=8, slices=2).settings.mesh.slices == 2
    assert derive(*load("tiny", "mesh.slices=2"), devices=8).settings.mesh.slices == 2
    with refuses("mesh.slices", RecipeError):
        derive(*load("tiny", "mesh.slices=2"), devices=8, slices=4)


def test_multi_token_prediction_is_counted():
    cfg, settings = load("deepseek-v3")
    axes = {"fsdp": 128, "expert": 8}
    without = replace(settings, loss=replace(settings.loss, mtp=0.0))
    more, less = (memory(cfg, s, axes, "full", 1) for s in (settings, without))
    assert 1.01 < more.weights / less.weights < 1.05


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "adafactor"])
def test_the_optimizers_bytes_are_what_it_allocates(optimizer):
    cfg, settings = load("tiny", f"optimizer.name={optimizer}")
    specs = spec(cfg)
    state = jax.eval_shape(make_optimizer(settings.optimizer, lambda _: 1.0, specs).init, abstract(specs, "float32"))
    allocated = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    assert memory(cfg, settings, {}, "none", 16).optimizer == pytest.approx(allocated, rel=0.01)


@pytest.mark.parametrize("axes", [{"fsdp": 8}, {"data": 2, "fsdp": 2, "tensor": 2}, {"context": 2, "fsdp": 4}])
def test_a_devices_weights_are_what_the_rules_give_it(axes):
    cfg, settings = load("tiny")
    placement = Placement(make_mesh(axes), TRAIN)
    shapes, shardings = abstract(spec(cfg), "float32"), placement.shardings(spec(cfg))
    local = jax.tree.map(lambda x, s: math.prod(s.shard_shape(x.shape)) * 4, shapes, shardings)
    assert memory(cfg, settings, axes, "none", 1).weights == sum(jax.tree.leaves(local))


def test_activations_are_near_the_rule_of_thumb():
    """Of a model with F = 4 D and plain heads: about 20 D, 14 D and D numbers a layer and token (saved alone)."""
    dense = dict(
        model_type="llama", hidden_size=1024, intermediate_size=4096, num_hidden_layers=100, num_attention_heads=16,
        vocab_size=256, max_position_embeddings=8192,
    )  # fmt: skip
    cfg, settings = parse_config(dense), replace(load("llama3-8b")[1], batch=64)
    for remat, expected in (("none", 20), ("dots", 14), ("full", 1)):
        numbers = memory(cfg, settings, {}, remat, 64).activations / (2 * 64 * settings.length * 1024 * 100)
        assert expected * 0.9 < numbers < expected * 1.4, (remat, numbers)


def test_remat_policies_are_in_order():
    cfg, settings = load("llama3-8b")
    sizes = [memory(cfg, settings, {"fsdp": 8}, remat, 2).total for remat in REMATS]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > 1.5 * sizes[-1]


@pytest.mark.slow
def test_scan_folds_deep_runs_of_layers_and_of_groups():
    assert layers_folded(read_model("llama3-8b")) == 32
    assert layers_folded(read_model("gemma3-4b")) == 30, "five times five local layers and a global one"
    assert layers_folded(read_model("deepseek-v3")) == 58
    assert derive(*load("llama3-8b"), CHIPS["H200"], 8).settings.scan is True, "its weights are split"
    found = derive(*load("gemma3-4b"), CHIPS["v5p"], 16)
    assert found.settings.scan is True
    assert ("scan", "true", "30 layers in a row compile as a group of 6") in found.why


@pytest.mark.slow
@pytest.mark.parametrize(("chip", "devices", "looped"), [("H200", 1, False), ("H200", 8, False), ("v5e", 16, True)])
def test_layers_are_scanned_where_it_costs_nothing(chip, devices, looped):
    """28 of them: on GPUs with whole weights a loop would cost a quarter of the speed."""
    derived = derive(*load("qwen3-0.6b", "batch=16", "mesh.fsdp=1"), CHIPS[chip], devices)
    assert sound(derived).scan is looped
    assert derived.explain()[5].split()[:2] == ["scan", str(looped).lower()]


def test_an_unknown_gpu_is_planned_as_a_gpu_and_a_host_is_not():
    cfg, settings = load("qwen3-0.6b", "batch=8")
    assert derive(cfg, settings, None, 1, hbm=128 * GIB).settings.scan is False
    assert derive(cfg, settings, None, 1, hbm=512 * GIB, on_host=True).settings.scan is True


def test_very_deep_models_are_scanned_and_save_less():
    cfg, settings = load("qwen3-0.6b", "batch=2")
    deep = replace(cfg, layers=cfg.layers * 2, source="deep")
    derived = derive(deep, settings, CHIPS["H200"], 1)
    assert sound(derived).scan is True
    assert derived.settings.remat == "dots", "what a loop keeps it copies twice"
    assert "the loop over layers would copy all that none saves" in derived.explain()[2]
    assert derive(deep, replace(settings, scan=False), CHIPS["H200"], 1).settings.remat == "none"


@pytest.mark.parametrize("limit", [105 * GIB, 128 * GIB])
@pytest.mark.parametrize(
    ("name", "batch", "length"),
    [
        ("qwen3-0.6b", 16, 4096), ("qwen3-0.6b", 8, 2048), ("llama3-1b", 8, 4096), ("llama3-1b", 1, 8192),
        ("smollm2-135m", 144, 1024),
    ],
)  # fmt: skip
def test_batches_that_fit_an_h200_are_not_split(name, batch, length, limit):
    """As its allocator says what there is, not as the table does."""
    derived = derive(*load(name, f"batch={batch}", f"length={length}"), CHIPS["H200"], 1, hbm=limit)
    s = sound(derived)
    assert (s.scan, s.remat, s.per_device, s.accumulate) == (False, "none", batch, 1)
    assert derived.limit == int(0.92 * limit)


def test_rows_are_accumulated_before_anything_is_recomputed():
    s = sound(derive(*load("qwen3-0.6b", "batch=64", "length=4096"), CHIPS["H200"], 1, hbm=128 * GIB))
    assert (s.scan, s.remat, s.per_device, s.accumulate) == (False, "none", 16, 4)
    s = sound(derive(*load("qwen3-0.6b", "batch=1", "length=32768"), CHIPS["H200"], 1, hbm=48 * GIB))
    assert (s.scan, s.remat, s.accumulate) == (False, "dots", 1), "one row cannot be parted"


def test_the_derived_mesh_can_be_created():
    derived = derive(*load("tiny", "mesh.fsdp=2", "mesh.tensor=2"), devices=8)
    assert make_mesh(derived.axes).size == 8
    assert derived.settings.mesh == Mesh(data=2, fsdp=2, expert=1, tensor=2, context=1, slices=1)
