"""Test training plans against "How to Scale Your Model", MaxText's published runs, and an H200's measurements."""

import math
import re
import time
from dataclasses import replace

import pytest
from refusals import refuses

from dovetail.core.accelerator import parse
from dovetail.core.chips import CHIPS
from dovetail.core.cloud import rate
from dovetail.core.errors import OutOfMemoryError
from dovetail.core.recipe import read
from dovetail.core.spec import num_params
from dovetail.core.training import DERIVED, Mesh, Optimizer, Precision, Training
from dovetail.models.registry import parse_config, read_model
from dovetail.models.spec import spec
from dovetail.plan.calibration import Fractions
from dovetail.plan.derive import derive
from dovetail.plan.exchange import collective
from dovetail.plan.flops import forward_flops
from dovetail.plan.links import layout
from dovetail.plan.plans import MeshPlan
from dovetail.plan.train_memory import memory
from dovetail.plan.train_plan import Prices, losers, misfits, plan_training, rows_of, staged
from dovetail.plan.train_time import step_time
from dovetail.tune.settings import Sft

pytestmark = pytest.mark.slow

DAY = 86_400


def training(model: str, batch: int, length: int, **more) -> Training:
    more = {"steps": 100, "mesh": DERIVED} | more
    return Training(model=model, batch=batch, length=length, **more)


# --- the book's worked examples, within 2% ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chip", "tokens"), [("v5e", 240), ("H100", 295), ("H200", 206), ("B200", 281), ("v5p", 166), ("v6e", 560)]
)
def test_critical_batch(chip, tokens):
    """FLOP/s over bytes/s: a bf16 weight has two bytes and takes two FLOPs per token."""
    assert CHIPS[chip].bf16 / CHIPS[chip].bandwidth == pytest.approx(tokens, rel=0.02)


def test_llama_3_70b_on_a_v5p_pod():
    """15T tokens at 40% MFU on 8,960 chips: 44 days; 6.3e24 FLOPs; 700 GB of bf16 weights and f32 moments."""
    cfg, v5p = read_model("llama3-70b"), CHIPS["v5p"]
    assert num_params(spec(cfg)) == pytest.approx(70.6e9, rel=0.01)
    flops = 3 * forward_flops(cfg) * 15e12
    assert flops == pytest.approx(6.3e24, rel=0.02)
    assert flops / (8960 * v5p.bf16 * 0.4) / DAY == pytest.approx(44, rel=0.02)
    lean = training("llama3-70b", 8960, 4096, precision=Precision(params="bf16"))
    held = memory(cfg, lean, {}, "full", 1)
    assert held.weights + held.optimizer == pytest.approx(10 * 70.6e9, rel=0.02)


def test_gathers_hide_behind_products_from_2550_tokens_per_axis():
    """v5p: a chip must have C / W = 2,550 tokens over the axes of its torus that gather, 850 with all three."""
    cfg = read_model("llama3-70b")
    for on, mesh, tokens in (("v5p-128", Mesh(data=1, fsdp=64), 850), ("v5p-128", Mesh(data=16, fsdp=4), 2550)):
        spans = layout(parse(on), {"data": mesh.data, "fsdp": mesh.fsdp})
        # weights alone: 2 bytes gathered and 2 FLOPs per token and weight in the forward pass
        whole = 2 * 70.6e9
        _, seconds = collective("all-gather", whole, next(s for s in spans if s.axis == "fsdp"))
        products = 2 * 70.6e9 * tokens / CHIPS["v5p"].bf16
        assert seconds == pytest.approx(products * (mesh.fsdp - 1) / mesh.fsdp, rel=0.02)
    assert cfg.dim == 8192


def test_collectives_are_those_of_the_book():
    """On v5e's ring of 16 with both directions: V / 90 GB/s, an all-reduce twice that; not closed to a ring, twice."""
    ring = layout(parse("v5e-256"), {"data": 16, "tensor": 16})[1]
    line = layout(parse("v5e-64"), {"data": 8, "tensor": 8})[1]
    sent, seconds = collective("all-gather", 16e9, ring)
    assert sent == 15e9 and seconds == pytest.approx(15 / 90, rel=0.01)
    assert collective("all-reduce", 16e9, ring)[1] == pytest.approx(2 * seconds, rel=0.01)
    assert collective("all-gather", 16e9, line)[1] == pytest.approx(14 / 45, rel=0.01)
    # 64 H100: the eight GPUs of a machine share its network
    gpus = layout(parse("h100x64"), {"fsdp": 64})[0]
    assert collective("all-gather", 64e9, gpus)[1] == pytest.approx(64 * 7 / 8 / 8 / 50, rel=0.01)


# --- MaxText's published runs (configs/v5p and configs/v5e of its repository) -----------------------------------------


def maxtext(scale: int):
    """Its scaled default model: heads and width, model dim, layers are doubled in turn."""
    thirds, rest = divmod(int(math.log2(scale)), 3)
    heads = 16 * 2 ** (thirds + (rest > 0))
    return parse_config(
        dict(
            model_type="llama", hidden_size=2048 * 2 ** (thirds + (rest > 1)), intermediate_size=448 * heads,
            num_hidden_layers=16 * 2**thirds, num_attention_heads=heads, num_key_value_heads=heads, head_dim=128,
            vocab_size=32000, max_position_embeddings=2048,
        )
    )  # fmt: skip


@pytest.mark.parametrize(
    ("billions", "on", "rows", "fsdp", "tensor", "mfu"),
    [
        (32, "v5p-128", 7, 16, 4, 0.7147), (64, "v5p-128", 3, 16, 4, 0.7031), (128, "v5p-256", 1, 16, 8, 0.6868),
        (512, "v5p-1024", 2, 64, 8, 0.6399), (16, "v5e-256", 6, 256, 1, 0.6110), (32, "v5e-256", 4, 256, 1, 0.6686),
        (64, "v5e-256", 2, 256, 1, 0.5990), (128, "v5e-256", 1, 16, 16, 0.5606), (16, "2 x v5e-256", 6, 256, 1, 0.5937),
    ],
)  # fmt: skip
def test_maxtexts_meshes_and_rates(billions, on, rows, fsdp, tensor, mfu):
    """Its mesh is within 10% of our best; its MFU, which counts all of attention, lies in our bounds."""
    machine = parse(on)
    found = plan_training(maxtext(billions), training("maxtext", rows * machine.total_devices, 2048), machine)
    theirs = next(
        one for one in found
        if (one.plan.mesh.fsdp, one.plan.mesh.tensor, one.plan.mesh.context) == (fsdp, tensor, 1)
    )  # fmt: skip
    assert theirs.time.likely <= 1.1 * found[0].time.likely
    low, high = theirs.mfu_of(causal=False)
    assert low < mfu < high


@pytest.mark.parametrize(
    ("model", "on", "batch", "length", "mfu"),
    [("llama3-8b", "v6e-256", 512, 8192, 0.455), ("llama3-70b", "h200x256", 512, 8192, 0.514)],
)
def test_other_published_rates(model, on, batch, length, mfu):
    low, high = plan_training(read_model(model), training(model, batch, length), parse(on))[0].mfu
    assert low < mfu < high


# --- one H200, as docs/performance.md and its peers have it -----------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "batch", "length", "remat", "rates"),
    [
        ("llama3-1b", 8, 4096, "none", (67_866, 57_277, 53_046, 48_434)),
        ("llama3-1b", 8, 4096, "dots", (50_926,)),
        ("llama3-1b", 1, 32768, "none", (33_867,)),
        ("qwen3-0.6b", 16, 4096, "none", (97_617,)),
        ("qwen3-0.6b", 16, 4096, "dots", (94_765,)),
        ("qwen3-0.6b", 8, 2048, "none", (106_194,)),
        ("smollm2-135m", 144, 1024, "none", (427_537,)),
    ],
)
def test_an_h200_runs_within_the_bounds(model, batch, length, remat, rates):
    cfg = read_model(model)
    longer = replace(cfg, max_len=max(cfg.max_len, length))
    best = plan_training(longer, training(model, batch, length, remat=remat), parse("h200x1"))[0]
    low, high = best.tokens_per_second
    for measured in rates:
        assert low < measured < high


@pytest.mark.parametrize(
    ("model", "batch", "length", "gib"),
    [
        ("llama3-1b", 8, 4096, 56.3), ("qwen3-0.6b", 16, 4096, 87.3), ("qwen3-0.6b", 8, 2048, 29.7),
        ("smollm2-135m", 144, 1024, 73.8),
    ],
)  # fmt: skip
def test_the_memory_of_an_h200_is_predicted(model, batch, length, gib):
    best = plan_training(read_model(model), training(model, batch, length, remat="none"), parse("h200x1"))[0]
    assert best.plan.memory.total / 2**30 == pytest.approx(gib, rel=0.1)


# --- the search -------------------------------------------------------------------------------------------------------


def test_qwen3_30b_on_64_h100_does_not_wait_for_its_links():
    cfg = read_model("qwen3-30b-a3b")
    best = plan_training(cfg, training("qwen3-30b-a3b", 1024, 4096), parse("h100x64"))[0]
    assert best.time.links < best.time.products and best.time.bound_by == "products"
    derived = derive(cfg, training("qwen3-30b-a3b", 1024, 4096), CHIPS["H100"], 64)
    assert derived.settings.mesh == best.plan.mesh and derived.settings.remat == best.plan.remat


def test_experts_far_apart_wait_for_each_other():
    """What the search was asked to avoid: tokens sent through network cards."""
    cfg = read_model("qwen3-30b-a3b")
    given = training("qwen3-30b-a3b", 1024, 4096, mesh=Mesh(data=1, fsdp=1, expert=64))
    best, worse = (plan_training(cfg, one, parse("h200x64"))[0].time for one in (training("q", 1024, 4096), given))
    assert worse.bound_by != "products" and worse.lower > 2 * worse.products and worse.likely > 3 * best.likely


def test_a_search_keeps_what_is_given():
    mesh = Mesh(data=4, fsdp=8, tensor=2, context=0)
    found = plan_training(read_model("llama3-8b"), training("llama3-8b", 64, 8192, mesh=mesh), parse("h200x64"))
    assert {(one.plan.mesh.data, one.plan.mesh.fsdp, one.plan.mesh.tensor) for one in found} == {(4, 8, 2)}
    assert all(found[0].time.likely <= 1.1 * one.time.likely for one in found)


def test_few_rows_are_shared_by_context_or_tensor():
    best = plan_training(read_model("llama3-8b"), training("llama3-8b", 2, 8192), parse("h200x8"))[0]
    assert best.plan.mesh.context * best.plan.mesh.tensor >= 4


def test_reasons_against_the_other_plans():
    found = plan_training(read_model("llama3-8b"), training("llama3-8b", 512, 8192), parse("4 x v5e-64"))
    said = [f"{one.what}: {one.why}" for one in losers(found)]
    assert len(said) == len(set(said)) > 2
    assert any("over DCN" in line for line in said)
    (misfit, *_) = misfits(found[0])
    assert misfit.what == "weights whole on each device" and "does not fit: 140 GiB" in misfit.why


def test_communication_is_named_with_its_link():
    """A batch so small that gradients take longer through the datacentre's network than products do."""
    found = plan_training(read_model("llama3-8b"), training("llama3-8b", 64, 4096), parse("8 x v5e-64"))
    assert found[0].time.bound_by == "data" and found[0].spans[0].over == "DCN"
    assert any("communication-bound by data over DCN" in one.why for one in losers(found))


@pytest.mark.parametrize(
    ("on", "batch", "length"), [("v5p-17920", 16_000_000, 8192), ("199 x v5e-256", 16_000_000, 4096)]
)
def test_whole_pods_are_planned_quickly(on, batch, length):
    """405B on 8,960 v5p and on 50,944 v5e: there a slice has no room for its state, and that is the answer."""
    machine, cfg = parse(on), read_model("llama3-405b")
    start = time.process_time()
    settings = training("llama3-405b", rows_of(batch, length, machine), length)
    if on.startswith("199"):
        with refuses(None, OutOfMemoryError, naming="it fits from v5p-"):
            plan_training(cfg, settings, machine)
    else:
        best = plan_training(cfg, settings, machine)[0]
        assert best.plan.memory.total <= best.limit and best.time.bound_by == "products"
    assert time.process_time() - start < 5


def test_70b_over_199_pods():
    machine = parse("199 x v5e-256")
    settings = training("llama3-70b", rows_of(32_000_000, 2048, machine), 2048)
    best = plan_training(read_model("llama3-70b"), settings, machine)[0]
    assert best.plan.mesh.data % 199 == 0 and best.settings.batch % 199 == 0


@pytest.mark.parametrize(
    ("batch", "length", "on", "rows"),
    [
        (4_000_000, 8192, "v5e-256", 512), (16_000_000, 8192, "v5p-17920", 1960), (5000, 4096, "h100x8", 1),
        (32_000_000, 2048, "199 x v5e-256", 15920),
    ],
)  # fmt: skip
def test_a_batch_of_tokens_becomes_rows_that_can_be_shared(batch, length, on, rows):
    assert rows_of(batch, length, parse(on)) == rows
    assert rows * length == pytest.approx(batch, rel=0.2)


# --- what a plan says -------------------------------------------------------------------------------------------------


def test_days_and_dollars_follow_from_the_step():
    machine = parse("v5e-256")
    prices = Prices(rate(machine.chip), rate(machine.chip, spot=True))
    settings = training("llama3-8b", 512, 8192, steps=0, tokens=10**12)
    best = plan_training(read_model("llama3-8b"), settings, machine, prices=prices)[0]
    low, high = best.costs
    assert low.seconds == pytest.approx(best.settings.total_steps * best.time.lower) and best.days[0] == low.days
    assert low.dollars == pytest.approx(256 * 1.20 * low.seconds / 3600)
    assert high.spot == pytest.approx(high.dollars * 0.34 / 1.20)
    assert best.tokens_per_second[1] == pytest.approx(512 * 8192 / best.time.lower)
    assert best.mfu[1] == pytest.approx(best.mfu[0] * best.time.upper / best.time.lower)
    unpriced = plan_training(read_model("llama3-8b"), settings, machine)[0]
    assert unpriced.dollars is None


def test_a_calibration_narrows_the_bounds():
    cfg, settings, machine = read_model("llama3-8b"), training("llama3-8b", 64, 4096), parse("h200x8")
    plain = plan_training(cfg, settings, machine)[0]
    known = Fractions("H200", products=0.6, links=0.7, runs=("runs/a",))
    told = plan_training(cfg, settings, machine, known=known)[0]
    assert plain.time.lower < told.time.lower and told.time.upper < plain.time.upper
    assert told.time.products == pytest.approx(told.time.lower) == pytest.approx(plain.time.products / 0.6, rel=0.05)


def test_a_cpu_can_be_planned_on():
    best = plan_training(read_model("tiny"), training("tiny", 8, 256, precision=Precision(compute="f32")), parse("cpu"))
    assert best[0].time.lower > 0.01 and best[0].chip.name == "CPU"


def test_adapters_move_less_and_compute_less():
    """Frozen weights are read and have no gradients of their own: 4 FLOPs per weight and token in place of 6."""
    whole = training("llama3-8b", 8, 4096)
    sft = {name: getattr(whole, name) for name in ("model", "batch", "length", "steps")}
    settings = read(Sft, {**sft, "data": {"sources": [{"path": "x"}]}, "lora": {"r": 16}})
    best = plan_training(read_model("llama3-8b"), settings, parse("h200x1"))[0]
    low, high = best.tokens_per_second
    assert low < 16_131 < high and 0.5 < best.mfu[1] <= 1.0


def test_stages_are_an_estimate():
    best = plan_training(read_model("llama3-8b"), training("llama3-8b", 512, 8192), parse("v5e-256"))[0]
    found = staged(best, 4)
    assert found.bubble == pytest.approx(3 / (found.microbatches + 3)) and "has no pipeline axis" in found.says
    with refuses("--stages", naming="32 layers"):
        staged(best, 3)


# --- what cannot be ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "on", "more", "words"),
    [
        ("llama3-70b", "v5p-32", {}, (r"x the 87\.4 GiB to plan with", "it fits from v5p-64")),
        ("llama3-8b", "v5e-4", {}, ("it fits from v5litepod-16",)),
        ("llama3-70b", "h100x8", {}, ("it fits from 4 x h100x8", "adafactor with precision.params=bf16")),
        ("llama3-8b", "h100x8", {"mesh": Mesh(data=8, fsdp=1)}, ("the mesh left open in place of mesh.data=8",)),
        (
            "llama3-8b",
            "h100x8",
            {"remat": "none", "per_device": 8, "mesh": Mesh(data=1, fsdp=8)},
            ("remat left open in place of none", "per_device and accumulate left open"),
        ),
        ("llama3-8b", "h100x8", {"mesh": Mesh(tensor=3)}, ("mesh.tensor=3 must divide",)),
        ("llama3-8b", "h100x8", {"mesh": Mesh(slices=2)}, ("must be the 1 of h100x8, got 2",)),
        ("llama3-8b", "h100x8", {"mesh": Mesh(data=3, fsdp=2)}, ("cannot be laid over 8 devices",)),
    ],
)
def test_bad_requests_are_refused_with_what_is_possible(model, on, more, words):
    with pytest.raises(ValueError) as error:
        plan_training(read_model(model), training(model, 64, 4096, **more), parse(on))
    for word in words:
        assert re.search(word, str(error.value)), str(error.value)


def test_the_proposal_of_a_refusal_fits():
    cfg, settings = read_model("llama3-70b"), training("llama3-70b", 64, 4096)
    assert plan_training(cfg, settings, parse("v5p-64"))
    assert plan_training(cfg, settings, parse("4 x h100x8"))
    lean = replace(settings, optimizer=Optimizer(name="adafactor"), precision=Precision(params="bf16"))
    assert plan_training(cfg, lean, parse("h100x8"))


def test_a_step_on_one_device_sends_nothing():
    settings = training("tiny", 8, 256)
    plan = MeshPlan(Mesh(data=1, fsdp=1), False, "none", 8, 1, memory(read_model("tiny"), settings, {}, "none", 8))
    found = step_time(read_model("tiny"), settings, plan, CHIPS["H200"], ())
    assert found.exchanges == () and found.links == 0 and found.lower <= found.upper
