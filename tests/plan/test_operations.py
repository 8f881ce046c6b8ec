"""Test that the products of a model add up to its FLOPs and bytes, and split as its weights do."""

import pytest
from refusals import refuses

from dovetail.core.spec import num_bytes
from dovetail.core.training import Mesh, Training
from dovetail.models.registry import read_model
from dovetail.models.spec import flops_per_token, kv_bytes_per_token, spec
from dovetail.plan.flops import train_flops_per_token
from dovetail.plan.operations import serving_operations, training_operations
from dovetail.plan.plans import MeshPlan, axes_of
from dovetail.plan.train_memory import memory


def step(model: str, mesh: Mesh, remat: str = "none", rows: int = 2, microsteps: int = 1, length: int = 4096):
    cfg = read_model(model)
    settings = Training(model=model, batch=64, length=length, steps=1, mesh=mesh)
    plan = MeshPlan(mesh, True, remat, rows, microsteps, memory(cfg, settings, axes_of(mesh), remat, rows))
    return training_operations(cfg, settings, plan)


def total(operations, what: str = "flops") -> float:
    return sum(getattr(one, what) * one.times for one in operations)


@pytest.mark.parametrize("model", ["llama3-8b", "gemma3-4b", "qwen3-30b-a3b", "deepseek-v3"])
def test_a_training_step_adds_up_to_the_models_flops(model):
    found = total(step(model, Mesh(data=8, fsdp=1), microsteps=3)) / (3 * 2 * 4096)
    assert found == pytest.approx(train_flops_per_token(read_model(model), 4096, causal=True), rel=1e-3)


@pytest.mark.parametrize("axes", [{"tensor": 4}, {"context": 4}, {"expert": 16}, {"expert": 4, "tensor": 2}])
def test_devices_share_the_products(axes):
    alone = total(step("qwen3-30b-a3b", Mesh(data=1, fsdp=1)))
    shared = total(step("qwen3-30b-a3b", Mesh(data=1, fsdp=1, **axes)))
    # an expert's devices bring rows of their own; the router is not split over tensor
    parts = axes.get("tensor", 1) * axes.get("context", 1)
    assert shared == pytest.approx(alone / parts, rel=0.03)


def test_remat_repeats_products():
    none, attention, full = (
        total(step("llama3-8b", Mesh(data=8, fsdp=1), remat)) for remat in ("none", "attention", "full")
    )
    assert none < attention < full < 4 / 3 * none


def test_gradients_have_the_shapes_of_their_factors():
    found = {one.phase: one for one in step("llama3-8b", Mesh(data=8, fsdp=1)) if one.name == "mlp.down"}
    tokens = 2 * 4096
    shapes = {phase: (one.m, one.k, one.n) for phase, one in found.items()}
    assert shapes["forward"] == (tokens, 14336, 4096)
    assert shapes["gradient of the input"] == (tokens, 4096, 14336)
    assert shapes["gradient of the weight"] == (4096, tokens, 14336)
    assert {one.bytes for one in found.values()} == {2 * (tokens * 14336 + 14336 * 4096 + tokens * 4096)}


def test_decoding_reads_the_weights_and_the_cache_once():
    cfg, sequences, context = read_model("llama3-8b"), 16, 2048
    found = serving_operations(cfg, {}, sequences, context)
    read = total(found, "read")
    weights = num_bytes(spec(cfg), "bfloat16") - 2 * cfg.vocab * cfg.dim  # the look-up is no product
    assert read == pytest.approx(weights + sequences * context * kv_bytes_per_token(cfg), rel=0.01)
    assert total(found) == pytest.approx(sequences * flops_per_token(cfg, context), rel=1e-3)


def test_few_tokens_reach_few_experts():
    cfg = read_model("qwen3-30b-a3b")
    copies = {
        tokens: next(one.copies for one in serving_operations(cfg, {}, tokens, 128) if one.name == "moe.experts.up")
        for tokens in (1, 16, 4096)
    }
    assert copies == {1: 8, 16: 82, 4096: 128}


def test_latent_attention_decodes_in_the_cached_form():
    cfg = read_model("deepseek-v3")
    scores = next(one for one in serving_operations(cfg, {}, 1, 1000) if one.name == "attention scores")
    assert (scores.m, scores.k, scores.n) == (128, 512 + 64, 1000) and scores.copies == 1


def test_a_step_without_sequences_is_refused():
    with refuses("sequences", naming="at least 1"):
        serving_operations(read_model("tiny"), {}, 0, 128)
