"""Test the bytes that a plan counts against an H200's measurements and autodiff's residuals."""

from collections.abc import Iterator
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from dovetail.core import recipe
from dovetail.core.chips import CHIPS, GIB, LOGITS_BYTES
from dovetail.core.spec import abstract
from dovetail.core.types import Packed
from dovetail.data.settings import TuningData
from dovetail.models.block import block
from dovetail.models.decoder import trunk
from dovetail.models.lora import Lora
from dovetail.models.registry import parse_config, read_model
from dovetail.models.spec import spec
from dovetail.models.towers.encoder import SIGLIP
from dovetail.ops import chunks, dispatch
from dovetail.plan import train_memory as plan
from dovetail.plan.derive import derive
from dovetail.plan.flops import recomputed
from dovetail.plan.train_memory import LOOPED, LOOPED_ENCODER, memory
from dovetail.train.settings import Pretrain
from dovetail.tune.settings import Sft

pytestmark = pytest.mark.slow

QWEN, LLAMA = "qwen3-0.6b", "llama3-1b"
MIXTRAL = dict(
    model_type="mixtral", hidden_size=4096, intermediate_size=14336, num_hidden_layers=4, num_attention_heads=32,
    num_key_value_heads=8, vocab_size=32000, max_position_embeddings=32768, rms_norm_eps=1e-5, num_local_experts=8,
    num_experts_per_tok=2, hidden_act="silu",
)  # fmt: skip


SMOLVLM = dict(
    model_type="smolvlm", scale_factor=4, image_token_id=150,
    text_config=dict(model_type="llama", hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
                     vocab_size=49280, num_attention_heads=9, num_key_value_heads=3, max_position_embeddings=8192),
    vision_config=dict(hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12,
                       image_size=512, patch_size=16),
)  # fmt: skip
QWEN_MOE = dict(
    model_type="qwen3_moe", hidden_size=2048, num_hidden_layers=8, num_attention_heads=32, num_key_value_heads=4,
    head_dim=128, vocab_size=151936, max_position_embeddings=40960, rms_norm_eps=1e-6, num_experts=64,
    num_experts_per_tok=8, moe_intermediate_size=1024, intermediate_size=6144, norm_topk_prob=True, hidden_act="silu",
    tie_word_embeddings=False,
)  # fmt: skip
MOE, COPIES = "a small mixture of experts", 2
SMALL_MOE = QWEN_MOE | dict(
    hidden_size=256, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=64, vocab_size=512,
    num_experts=8, num_experts_per_tok=COPIES, moe_intermediate_size=320,
)  # fmt: skip
SFT = Sft(model="here", batch=1, length=512, steps=1, data=TuningData(path="here"))


def settings_of(name: str, batch: int, length: int, *more: str):
    return recipe.load(name, ["schedule.warmup=0", f"batch={batch}", f"length={length}", *more], Pretrain)


@pytest.mark.parametrize(
    ("name", "batch", "length", "more", "measured"),
    [
        (LLAMA, 8, 4096, [], 56.3), (LLAMA, 1, 32768, [], 56.3), (QWEN, 16, 4096, [], 87.3), (QWEN, 8, 2048, [], 29.7),
        (QWEN, 8, 2048, ["scan=true"], 51.9), (QWEN, 16, 4096, ["remat=dots"], 59.2),
        (QWEN, 16, 4096, ["accumulate=2"], 54.2), ("smollm2-135m", 144, 1024, [], 73.8),
        (MIXTRAL, 4, 4096, ["precision.params=bf16", "precision.logits=f32"], 75.4), (QWEN_MOE, 8, 4096, [], 86.4),
    ],
)  # fmt: skip
def test_counted_bytes_are_near_those_measured(name, batch, length, more, measured):
    """docs/performance.md, on one H200 with one document in a row."""
    cfg = read_model(name) if isinstance(name, str) else parse_config(name, "test")
    settings = settings_of(name if isinstance(name, str) else LLAMA, batch, length, "precision.params=f32", *more)
    rows = batch // (settings.accumulate or 1)
    counted = memory(cfg, settings, {}, settings.remat or "none", rows, documents=1).total / GIB
    assert counted == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize(("quantization", "measured"), [("", 87.1), ("nf4", 77.4)])
def test_counted_bytes_of_adapters_are_near_those_measured(quantization, measured):
    settings = replace(SFT, model="llama3-8b", batch=8, length=4096, lora=Lora(r=16), quantization=quantization)
    counted = memory(read_model("llama3-8b"), settings, {}, "none", 4, documents=1).total / GIB
    assert counted == pytest.approx(measured, rel=0.05)


def test_rows_of_many_documents_have_more_sums_of_softmax():
    cfg, settings = read_model(QWEN), settings_of(QWEN, 16, 4096)
    one, many, unknown = (memory(cfg, settings, {}, "none", 16, documents=n).activations for n in (1, 16, 0))
    assert many == unknown and many - one == 15 * 4 * 16 * len(cfg.layers) * 16 * 4096


def test_the_logits_are_those_of_the_chunks_that_the_loss_takes(monkeypatch):
    monkeypatch.setattr(chunks, "CPU_BYTES", LOGITS_BYTES)
    cfg, settings = read_model(QWEN), settings_of(QWEN, 16, 4096)
    cut = chunks.chunks_of((16, 4096), cfg.vocab, itemsize=2, chunk=None, placement=None)
    assert plan._logits(cfg, settings, 1, 16 * 4096) == cut.size * cfg.vocab * 4


def test_microsteps_add_sums_and_scan_adds_gradients():
    cfg, settings = read_model(QWEN), settings_of(QWEN, 16, 4096)
    weights = memory(cfg, settings, {}, "none", 16).weights / 6
    parts, half = (memory(cfg, one, {}, "none", 8) for one in (settings, replace(settings, batch=8)))
    assert parts.gradients - half.gradients == 4 * weights
    assert parts.activations == int(half.activations * (1 + plan.HOLES))
    assert parts.total - half.total == 4 * weights + parts.activations - half.activations
    looped, plain = (memory(cfg, replace(settings, scan=scan), {}, "dots", 16).total for scan in (True, False))
    assert looped - plain == 2 * weights


def test_with_few_tokens_the_update_is_the_peak():
    cfg, settings = read_model(LLAMA), settings_of(LLAMA, 1, 128)
    found = memory(cfg, settings, {}, "full", 1)
    assert found.gradients == found.weights * 4 / 6 and found.logits == 0


# --- saved activations, as traced by jax ------------------------------------------------------------------------------

B, T = 2, 640  # which no weight has


@pytest.fixture
def cudnn(monkeypatch):
    """Trace what an NVIDIA GPU would run, where there is none; rows hold one document.

    jax keeps the traces of `block` for the whole process, by model, layer and shapes. They do not say whether cuDNN was
    there, so those made without it are dropped before the test, and those made with it after.
    """
    from jax._src.cudnn import fused_attention_stablehlo as fused

    block.clear_cache()

    monkeypatch.setattr(dispatch, "has_cudnn", lambda: True)
    monkeypatch.setattr(fused, "check_cudnn_version", lambda: 91900)
    monkeypatch.setattr(fused, "check_is_flash_attention", lambda *_, **__: None)
    monkeypatch.setattr(plan, "DOCUMENTS", 1)
    yield
    block.clear_cache()


def traced(name: str, layers: int, remat: str, scan: bool):
    """Return the model, its trunk, and the shapes to call it with."""
    cfg = parse_config(SMALL_MOE, "test") if name == MOE else read_model(name)
    cfg = replace(cfg, layers=cfg.layers[:layers], source=f"{name}, {layers} layers")

    def run(params, tokens):
        ctx = Packed(tokens, "cuda", None, 1)
        return trunk(params, cfg, tokens, tokens, ctx, remat=remat, scan=scan)[0]

    return cfg, run, (abstract(spec(cfg), "bfloat16"), jax.ShapeDtypeStruct((B, T), jnp.int32))


def count(jaxpr, name: str) -> int:
    inner = [getattr(part, "jaxpr", part) for eqn in jaxpr.eqns for part in jax.tree.leaves(list(eqn.params.values()))]
    here = sum(eqn.primitive.name.startswith(name) for eqn in jaxpr.eqns)
    return here + sum(count(one, name) for one in inner if hasattr(one, "eqns"))


@pytest.mark.parametrize("name", [QWEN, LLAMA])
@pytest.mark.parametrize(("remat", "times"), [("none", 1), ("dots", 1), ("attention", 1), ("full", 2)])
def test_attention_is_recomputed_only_where_the_plan_says_so(cudnn, name, remat, times):
    cfg, run, shapes = traced(name, 2, remat, scan=False)
    grad = jax.make_jaxpr(jax.grad(lambda p, t: run(p, t).astype(jnp.float32).sum()))(*shapes)
    assert count(grad.jaxpr, "dot_product_attention_fwd") == times * 2
    assert count(grad.jaxpr, "dot_product_attention_bwd") == 2
    long, short = (recomputed(cfg, length, remat) for length in (8192, 4096))
    assert (long > short) == (times > 1)


@pytest.mark.parametrize(("name", "layers", "apart"), [("gemma3-4b", 12, True), (LLAMA, 2, False)])
def test_layers_of_a_group_are_recomputed_one_by_one(name, layers, apart):
    """A loop over single layers needs no barrier."""
    _, run, shapes = traced(name, layers, "dots", scan=True)
    assert list(barriers(jax.make_jaxpr(run)(*shapes).jaxpr)) == [apart] * (6 if apart else 1)


def barriers(jaxpr) -> Iterator[bool]:
    """Yield, for every recomputed layer, whether XLA is kept from merging it with the first computation."""
    for eqn in jaxpr.eqns:
        if "prevent_cse" in eqn.params:
            yield eqn.params["prevent_cse"]
            continue
        for part in jax.tree.leaves(list(eqn.params.values())):
            if hasattr(inner := getattr(part, "jaxpr", part), "eqns"):
                yield from barriers(inner)


def kept(name: str, layers: int, remat: str, scan: bool) -> float:
    """Return the bf16 numbers per token that autodiff saves, without the weights."""
    _, run, (params, tokens) = traced(name, layers, remat, scan)
    left = jax.tree.leaves(jax.eval_shape(lambda p, t: jax.vjp(lambda p: run(p, t), p)[1], params, tokens))
    of_tokens = [leaf for leaf in left if (B, T) in (leaf.shape[:2], leaf.shape[1:3]) or leaf.shape[-1:] == (T,)
                 or leaf.shape[:1] == (B * T * COPIES,)]  # fmt: skip
    return sum(leaf.size * leaf.dtype.itemsize for leaf in of_tokens) / (2 * B * T)


@pytest.mark.parametrize("name", [QWEN, LLAMA])
@pytest.mark.parametrize(("remat", "scan"), [("none", True), ("dots", False), ("attention", False), ("full", False)])
def test_saved_activations_equal_autodiffs_residuals(cudnn, name, remat, scan):
    """Compare one layer: half the difference between models of 4 and 2 layers."""
    D, layer = read_model(name).dim, read_model(name).layers[0]
    found = (kept(name, 4, remat, scan) - kept(name, 2, remat, scan)) / 2
    expected = plan._saved(D, layer, 1, 1, remat) * (LOOPED if scan else 1)
    assert found == pytest.approx(expected, rel=0.06 if scan else 0)


@pytest.mark.parametrize("remat", ["dots", "attention", "full"])
def test_saved_activations_of_experts_equal_autodiffs_residuals(cudnn, remat):
    """The output of the down projection is not saved: rows are weighted before it."""
    cfg = parse_config(SMALL_MOE, "test")
    found = (kept(MOE, 4, remat, False) - kept(MOE, 2, remat, False)) / 2
    assert found == plan._saved(cfg.dim, cfg.layers[0], 1, 1, remat)


@pytest.mark.parametrize("looped", [False, True])
def test_saved_activations_of_an_encoder_are_near_autodiffs_residuals(looped):
    """XLA recomputes the f32 values inside norms, except in a loop."""
    tower, N, P = read_model("vit-s16").images.tower, 3, 197
    layers = abstract(dict(layers=tower.encoder.spec(dict.fromkeys(SIGLIP, ""))), "bfloat16")["layers"][:1]
    x = jax.ShapeDtypeStruct((N, P, tower.encoder.dim), jnp.bfloat16)
    left = jax.eval_shape(lambda p, x: jax.vjp(lambda p, x: tower.encoder(p, x, scan=looped), p, x)[1], layers, x)
    shaped = [leaf for leaf in jax.tree.leaves(left) if N in leaf.shape and P in leaf.shape]
    kept = sum(leaf.size * (leaf.dtype.itemsize if looped else 2) for leaf in shaped if leaf.dtype != bool)
    D, layer = tower.encoder.dim, read_model("vit-s16").layers[0]
    expected = plan._saved(D, layer, 1, 1, "none") * (LOOPED_ENCODER if looped else 1)
    norms = 0 if looped else 2 * D  # a norm's output is kept in place of two values inside of it
    assert kept / (2 * N * P) - norms == pytest.approx(expected, rel=0.03)


def test_the_tower_is_counted_in_a_step_with_images():
    """The peak is at the tower's backward pass, where the gradients of all layers are there."""
    cfg, D, F, layers = parse_config(SMOLVLM), 768, 3072, 12
    shown, more = (replace(SFT, image_items=items, image_patches=1024) for items in (5, 10))
    tower = 5 * 1024 * layers * (8 * D + 2 * F) * 2

    def counted(settings: Sft, remat: str = "none") -> int:
        return memory(cfg, settings, {}, remat, 1).activations

    assert counted(shown) == tower and counted(more) == counted(more, "full") == 2 * tower
    only_text, fc1 = Lora(), Lora(target_modules=("fc1",))
    assert counted(replace(more, lora=only_text)) == counted(replace(SFT, lora=only_text))
    assert counted(replace(more, lora=fc1)) > 2 * tower


@pytest.mark.parametrize(
    ("name", "chip", "devices", "slices", "compiled"),
    [
        ("smollm2-135m", "v5e", 4, 1, 11.94), ("qwen3-0.6b", "v5e", 16, 1, 8.60), ("llama3-1b", "v6e", 16, 1, 18.23),
        ("gemma3-4b", "v5p", 16, 1, 50.20), ("mistral-7b", "v5p", 64, 1, 73.68), ("llama3-8b", "v5p", 64, 1, 54.52),
        ("llama3-8b", "v5p", 128, 2, 55.14), ("llama3-8b", "v6e", 256, 1, 14.06),
        ("mixtral-8x7b", "v5p", 128, 1, 75.96), ("qwen3-30b-a3b", "v5p", 128, 1, 76.56),
        ("qwen3-30b-a3b", "TPU7x", 128, 1, 32.02), ("deepseek-v3", "v5p", 1024, 1, 81.37),
    ],
)  # fmt: skip
def test_counted_bytes_are_near_those_libtpu_assigned(name, chip, devices, slices, compiled):
    """The numbers are docs/tpu.md's. If a plan changes, compile its step again."""
    settings = recipe.load(name, [f"mesh.slices={slices}"], Pretrain)
    found = derive(read_model(name), settings, CHIPS[chip], devices, slices)
    assert compiled == pytest.approx(found.memory.total / GIB, rel=0.15)


def test_a_tpu_pads_heads_of_64_to_128_and_saves_softmax_sums_once():
    for name, wider in ((LLAMA, 32 * 64), ("llama3-8b", 0)):
        cfg = read_model(name)
        on, off = (plan._saved(cfg.dim, cfg.layers[0], 1, 1, "dots", on_tpu) for on_tpu in (True, False))
        assert on - off == wider - 2 * (plan.DOCUMENTS - 1) * 32


def test_saved_activations_are_not_counted_as_recomputed():
    cfg = read_model("llama3-8b")
    found = [plan.activations_of(cfg, 0, 1, 1, remat) for remat in ("full", "attention", "dots", "none")]
    assert sorted(found) == found and sorted(found, key=lambda one: -one[1]) == found
    assert len({(kept - 2 * cfg.dim) / len(cfg.layers) + working for kept, working in found}) == 1
