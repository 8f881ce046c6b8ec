"""Draft models in the engine: whatever they propose, the output is the one without them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from data.conftest import small_tokenizer
from engine.engines import GREEDY, OPTIONS, mixed_prompts, variant
from engine.test_speculation import CASES, SAMPLED, TEXTS, Always, same
from refusals import refuses
from safetensors.numpy import save_file
from tune.small_models import CONFIG, model_folder

from dovetail.core.errors import CheckpointError
from dovetail.core.spec import init
from dovetail.engine.llm import LLM
from dovetail.engine.spec.speculator import Speculator, speculator_of
from dovetail.io.draft_folder import save_draft
from dovetail.io.hf import write_specs
from dovetail.io.load import save
from dovetail.io.peft import save_adapter
from dovetail.io.tool_formats.formats import TOOL_FORMATS
from dovetail.io.tool_formats.grammar import grammar_for
from dovetail.models.draft.registry import parse_draft
from dovetail.models.lora import Lora, lora_spec
from dovetail.models.mtp import with_mtp
from dovetail.models.registry import parse_config, read_config
from dovetail.models.spec import spec

pytestmark = pytest.mark.slow

DRAFTS = 4
PROMPTS = mixed_prompts(5, most=60)
SIZES = {name: CONFIG[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads",
                                         "num_key_value_heads", "max_position_embeddings")}  # fmt: skip
LAYER = SIZES | dict(model_type="qwen3", head_dim=16, rms_norm_eps=1e-5, num_hidden_layers=1, rope_theta=10_000.0)
BLOCKS = dict(draft_vocab_size=CONFIG["vocab_size"], block_size=DRAFTS + 1, mask_token_id=2,
              aux_hidden_state_layer_ids=[1, 2])  # fmt: skip
PUBLISHED = {
    "eagle3": dict(draft_vocab_size=CONFIG["vocab_size"], eagle_aux_hidden_state_layer_ids=[1, 2, 2]),
    "dflash": BLOCKS,
    "dspark": BLOCKS | dict(markov_rank=8),
    "dflash2": BLOCKS | dict(conv_kernel_size=2, conv_group_size=8, selector_rank=8, selector_top_k=4),
}
GEMMA4 = SIZES | dict(
    model_type="gemma4_text", layer_types=["sliding_attention", "full_attention", "full_attention"],
    num_hidden_layers=3, num_kv_shared_layers=1, sliding_window=8, head_dim=16, global_head_dim=16,
    hidden_size_per_layer_input=0, final_logit_softcapping=20.0, eos_token_id=1,
)  # fmt: skip
ASSISTANT = dict(
    model_type="gemma4_assistant", backbone_hidden_size=SIZES["hidden_size"], use_ordered_embeddings=True,
    num_centroids=20, centroid_intermediate_top_k=8,
    text_config=GEMMA4 | dict(hidden_size=32, num_hidden_layers=2, num_kv_shared_layers=2,
                              layer_types=["sliding_attention", "full_attention"]),
)  # fmt: skip
SOME = ["itself", "eagle3", "dspark"]
OTHERS = ("another model", "dflash", "dflash2", "mtp", "assistant")
KINDS = [*SOME, *(pytest.param(kind, marks=pytest.mark.thorough) for kind in OTHERS)]


def target_folder(kind: str, place) -> str:
    """Return the model that a kind of draft model is for."""
    if kind not in ("assistant", "mtp"):
        return model_folder(place, num_hidden_layers=2)  # two outputs for a draft model to read
    cfg = parse_config(GEMMA4 if kind == "assistant" else CONFIG | dict(num_nextn_predict_layers=1))
    folder, specs = place / "target", spec(cfg) if kind == "assistant" else with_mtp(spec(cfg), cfg)
    if not folder.exists():
        save(folder, cfg, init(specs, jax.random.key(0), jnp.float32, 0.1), small_tokenizer())
    return str(folder)


def assistant_folder(place) -> str:
    """Return a Gemma 4 assistant in its published format."""
    draft, folder = parse_draft(ASSISTANT, parse_config(GEMMA4), "here"), place / "assistant"
    params = init(draft.spec(), jax.random.key(5), jnp.float32, 0.1)
    params["clusters"]["tokens"] = jax.random.permutation(jax.random.key(6), SIZES["vocab_size"])
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(ASSISTANT))
    save_file({name: array for name, _, array in write_specs(draft.spec(), params, {})}, folder / "model.safetensors")
    return str(folder)


def draft_folder(kind: str, place) -> str:
    """Return a draft model of a kind for the model of `target_folder(kind, place)`."""
    if kind == "assistant":
        return assistant_folder(place)
    if kind == "mtp":
        return target_folder(kind, place)
    if kind == "itself":
        return target_folder(kind, place)
    if kind == "another model":
        return model_folder(place, seed=1, num_hidden_layers=1)
    config = dict(speculators_model_type=kind, transformer_layer_config=LAYER, **PUBLISHED[kind])
    draft, folder = parse_draft(config, read_config(Path(target_folder(kind, place))), kind), place / kind
    save_draft(folder, draft, init(draft.spec(), jax.random.key(5), jnp.float32, 0.1), config)
    return str(folder)


@pytest.fixture(scope="module", params=KINDS)
def llm(request, tmp_path_factory):
    return made_llm(request.param, tmp_path_factory.mktemp("drafts"))


def config_of(kind: str, place) -> dict:
    own = {"method": "mtp"} if kind == "mtp" else {}
    return {"model": draft_folder(kind, place), "num_speculative_tokens": DRAFTS, **own}


def made_llm(kind: str, place) -> LLM:
    config = config_of(kind, place)
    made = LLM(target_folder(kind, place), **OPTIONS | dict(max_num_seqs=4), speculative_config=config)
    made.kind = kind
    compile_drafting(made)
    return made


def test_an_assistant_drafts_from_the_targets_pages(tmp_path):
    """All tests of this file with an assistant are thorough; this is the cheapest."""
    config = {"method": "mtp", "model": assistant_folder(tmp_path), "num_speculative_tokens": DRAFTS}
    llm = LLM(target_folder("assistant", tmp_path), **OPTIONS | dict(max_num_seqs=1), speculative_config=config)
    llm.runner.steps.all([llm.runner.buckets.verify(1, DRAFTS)])
    engine = drafting(llm)
    for params in (CASES["greedy"], SAMPLED):
        same(variant(llm).generate(PROMPTS[:1], params), engine.generate(PROMPTS[:1], params))
    assert engine.engine.stats().speculation.drafts > 0


def compile_drafting(llm: LLM) -> None:
    buckets = llm.runner.buckets  # a program that is not compiled is not waited for
    llm.runner.steps.all([make(rows, DRAFTS) for rows in (4,) for make in (buckets.verify, buckets.proposal)])


def drafting(llm: LLM, **how) -> LLM:
    engine = variant(llm, **how)
    made = speculator_of(llm.options.speculative_config, (DRAFTS,))
    engine.engine.speculator = Speculator(made.drafter, Always((DRAFTS,)))
    return engine


ALIKE = ("greedy", "sampled, n=3", "logprobs", "penalties", "truncation", "min_tokens")


@pytest.mark.parametrize("name", [*ALIKE, pytest.param("bias", marks=pytest.mark.thorough)])
def test_the_output_is_the_one_without_a_draft_model(llm, name):
    params = CASES[name]
    engine = drafting(llm)
    same(variant(llm).generate(PROMPTS, params), engine.generate(PROMPTS, params))
    counts = engine.engine.stats().speculation
    assert counts.drafts > 0
    if llm.kind == "itself" and name != "penalties":  # the penalties of draft tokens are not counted while drafting
        assert counts.accepted_tokens == counts.draft_tokens


def test_preempted_sequences_and_prefix_hits(llm):
    params = replace(SAMPLED, n=2, max_tokens=40)
    expected = variant(llm).generate(PROMPTS, params)
    engine = drafting(llm, pages=40)
    for _ in range(2):  # the second time, prompts and outputs are in the prefix cache, with the draft model's pages
        same(expected, engine.generate(PROMPTS, params))
    stats = engine.engine.stats()
    assert stats.preemptions > 0 and stats.prefix_hit_tokens > 0
    if llm.kind == "itself":
        assert stats.speculation.accepted_tokens == stats.speculation.draft_tokens


RARE = [pytest.param(name, marks=pytest.mark.thorough) for name in ("bad words", "grammar, penalties, logprobs")]


@pytest.mark.parametrize("name", ["JSON schema", "tool", *RARE])
def test_draft_tokens_of_a_grammar(llm, name):
    """Masks of a grammar depend on each token: its draft tokens reach the host first, those of others do not."""
    free = replace(SAMPLED, max_tokens=20)
    masked = replace(free, max_tokens=30, **TEXTS[name] if name in TEXTS else dict(structured_outputs=call_grammar()))
    params, prompts = [free, masked, replace(GREEDY, max_tokens=20), masked], ["say one", "say two", "three", "<7>"]
    engine = drafting(llm)
    same(variant(llm).generate(prompts, params), engine.generate(prompts, params))
    assert engine.engine.stats().speculation.drafts > 0
    alone = drafting(llm)
    found = alone.generate(prompts[1], masked)
    same(variant(llm).generate(prompts[1], masked), found)
    counts = alone.engine.stats().speculation
    assert counts.drafts > 0 and found[0].outputs[0].spec_decode_metrics.num_draft_tokens == counts.draft_tokens
    if llm.kind == "itself":
        assert counts.accepted_tokens > 0


def call_grammar() -> dict:
    """Return the grammar of a required call of a tool."""
    function = {"name": "f", "parameters": {"type": "object", "properties": {"x": {"type": "boolean"}}}}
    return {"grammar": grammar_for(TOOL_FORMATS["hermes"], [{"type": "function", "function": function}], "required")}


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_stop_strings_inside_a_block(llm, temperature):
    params = replace(SAMPLED, temperature=temperature, max_tokens=30, stop=("a", "th", "on"))
    prompts = ["say 5", "the one and the other", "<7>"]
    expected, engine = variant(llm).generate(prompts, params), drafting(llm)
    found = engine.generate(prompts, params)
    same(expected, found)
    assert [each.outputs[0].text for each in found] == [each.outputs[0].text for each in expected]
    assert engine.engine.stats().speculation.drafts > 0


HARD = ["dspark", *(pytest.param(kind, marks=pytest.mark.thorough) for kind in ("itself", "eagle3", *OTHERS))]


@pytest.mark.parametrize("kind", HARD)
def test_over_two_devices_and_with_adapters(kind, tmp_path):
    folder = target_folder(kind, tmp_path)
    lora, cfg = Lora(r=2, lora_alpha=8), read_config(Path(folder))
    values = jax.tree.map(np.asarray, init(lora_spec(cfg, lora), jax.random.key(1), jnp.float32, 0.3))
    values = jax.tree_util.tree_map_with_path(lambda path, x: x + 0.1 if path[-1].key == "lora_b" else x, values)
    save_adapter(tmp_path / "adapter", cfg, values, lora, folder)
    config = config_of(kind, tmp_path)
    options = OPTIONS | dict(max_num_seqs=4, tensor_parallel_size=2, lora_modules={"a": str(tmp_path / "adapter")})
    llm = LLM(folder, **options, speculative_config=config)
    compile_drafting(llm)
    params, names = replace(SAMPLED, logprobs=2), ["a", None, "a", None, "a"]
    expected = variant(llm).generate(PROMPTS, params, adapter=names)
    assert expected[0].outputs[0].token_ids != variant(llm).generate(PROMPTS[0], params)[0].outputs[0].token_ids
    engine = drafting(llm)
    same(expected, engine.generate(PROMPTS, params, adapter=names))
    assert engine.engine.stats().speculation.drafts > 0
    masked, alone = replace(params, **TEXTS["regular expression"]), drafting(llm)
    same(variant(llm).generate("say two", masked, adapter="a"), alone.generate("say two", masked, adapter="a"))
    assert alone.engine.stats().speculation.drafts > 0


def test_several_steps_a_dispatch_before_draft_tokens(llm):
    """Decode steps keep the draft model's pages complete."""
    engine = drafting(llm, steps=4)
    engine.engine.speculator.length = Late((DRAFTS,))
    same(variant(llm).generate(PROMPTS[:1], SAMPLED), engine.generate(PROMPTS[:1], SAMPLED))
    counts = engine.engine.stats().speculation
    assert counts.drafts > 0 and (llm.kind != "itself" or counts.accepted_tokens == counts.draft_tokens)


class Late(Always):
    """Speculate after a few dispatches."""

    asked = 0

    def choose(self, rows):
        self.asked += 1
        return self.choices[-1] if self.asked > 3 else 0


def test_sleep_and_new_weights_keep_the_draft_model(llm):
    expected = drafting(llm).generate(PROMPTS[:2], GREEDY)
    engine = drafting(llm)
    engine.engine.sleep(1)
    engine.engine.wake_up()
    same(expected, engine.generate(PROMPTS[:2], GREEDY))
    assert engine.engine.stats().speculation.drafts > 0


@pytest.mark.parametrize(
    ("changes", "config", "param"),
    [
        ({"vocab_size": CONFIG["vocab_size"] + 8}, {}, "speculative_config.model"),
        ({}, {"method": "eagle3"}, "speculative_config.method"),
        ({}, {"method": "mtp"}, "speculative_config.method"),
        ({}, {"num_speculative_tokens": 63, "method": "dspark"}, "speculative_config.method"),
    ],
)
def test_what_cannot_draft_is_refused(changes, config, param, tmp_path):
    other = model_folder(tmp_path, seed=2, **changes)
    with refuses(param, CheckpointError):
        LLM(model_folder(tmp_path), **OPTIONS, speculative_config={"model": other, **config})
