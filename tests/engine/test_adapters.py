"""Adapters in the engine: mixed batches equal PEFT, and adapters are loaded, replaced and unloaded at run time."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from engine.engines import GREEDY, make_llm, mixed_prompts, theirs, tokens_of
from later import later
from reference_models import reference
from refusals import refuses

from dovetail.core.errors import CheckpointError, RequestError
from dovetail.engine.llm import LLM
from dovetail.io.load import load

pytestmark = pytest.mark.slow

peft = later("peft")

NAMES = [None, "a", "b", "a", "b", None, "b", "a"]
PROMPTS = mixed_prompts(len(NAMES), 8, 60)


def saved(folder, model: str, rank: int, seed: int, **options) -> str:
    """Save an adapter of PEFT with random weights that change every answer."""
    torch.manual_seed(seed)
    given: dict[str, Any] = {"target_modules": "all-linear"} | options
    config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, **given)
    wrapped = peft.get_peft_model(reference(model)[0], config)
    with torch.no_grad():
        for key, tensor in wrapped.named_parameters():
            if "lora_B" in key:
                tensor.copy_(torch.randn_like(tensor) * 0.3)
    wrapped.save_pretrained(str(folder))
    wrapped.unload()
    return str(folder)


def peft_tokens(model: str, folder: str | None, prompts: list[list[int]]) -> list[list[int]]:
    base = reference(model)[0]
    if folder is None:
        return [theirs(base, prompt) for prompt in prompts]
    wrapped = peft.PeftModel.from_pretrained(base, folder)
    try:
        return [theirs(wrapped, prompt) for prompt in prompts]
    finally:
        wrapped.unload()


def mixed(model: str, folders: dict[str, str]) -> list[list[int]]:
    """Return PEFT's tokens, each prompt with its own adapter."""
    found: dict[int, list[int]] = {}
    for name in {*NAMES}:
        own = [i for i, each in enumerate(NAMES) if each == name]
        answers = peft_tokens(model, folders[name] if name else None, [PROMPTS[i] for i in own])
        found |= dict(zip(own, answers, strict=True))
    return [found[i] for i in range(len(NAMES))]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    at = tmp_path_factory.mktemp("adapters")
    some = dict(target_modules=["q_proj", "v_proj", "down_proj"], use_rslora=True)
    return {"a": saved(at / "a", "llama3.1", 4, 1), "b": saved(at / "b", "llama3.1", 7, 2, **some)}


@pytest.fixture(scope="module")
def llm(folders) -> LLM:
    return make_llm("llama3.1", lora_modules=folders, max_loras=3)


# --- tokens -----------------------------------------------------------------------------------------------------------


def test_a_batch_with_several_adapters_equals_peft(llm, folders):
    expected = mixed("llama3.1", folders)
    assert tokens_of(llm.generate(PROMPTS, GREEDY, adapter=NAMES)) == expected
    assert len({tuple(answer) for answer in expected}) == len(expected)
    for name in (None, "a"):
        own = [i for i, each in enumerate(NAMES) if each == name]
        got = tokens_of(llm.generate([PROMPTS[i] for i in own], GREEDY, adapter=name))
        assert got == [expected[i] for i in own]


@pytest.mark.thorough
@pytest.mark.parametrize("model", ["phi3", "qwen3", "deepseek-v3"])
def test_other_families(model, tmp_path):
    """Phi joins q, k and v on disk already; DeepSeek's latents are multiplied from either side."""
    attention = {"deepseek-v3": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]}
    targets = dict(target_modules=attention.get(model, "all-linear"))
    ours = {name: saved(tmp_path / name, model, rank, rank, **targets) for name, rank in (("a", 3), ("b", 6))}
    llm = make_llm(model, lora_modules=ours)
    assert tokens_of(llm.generate(PROMPTS, GREEDY, adapter=NAMES)) == mixed(model, ours)


@pytest.mark.thorough
def test_on_two_devices(folders):
    llm = make_llm("llama3.1", lora_modules=folders, tensor_parallel_size=2)
    assert tokens_of(llm.generate(PROMPTS, GREEDY, adapter=NAMES)) == mixed("llama3.1", folders)


@pytest.mark.thorough
def test_streams_chunks_and_embeddings_take_one(llm, folders):
    long = mixed_prompts(1, 150, 200, seed=3)[0]  # in several steps: it is longer than one may be
    (expected,) = peft_tokens("llama3.1", folders["b"], [long])
    assert [token for update in llm.stream(long, GREEDY, adapter="b") for token in update.token_ids] == expected
    vectors = {name: llm._embedder.embed([long], adapter=name)[0] for name in (None, "a", "b")}
    assert vectors[None] == llm.embed([long])[0].tolist() and vectors["a"] != vectors["b"] != vectors[None]


# --- prefixes ---------------------------------------------------------------------------------------------------------


def cached(llm, name: str | None) -> int:
    (output,) = llm.generate([PROMPTS[0]], GREEDY, adapter=name)
    assert output.adapter is None or output.adapter.name == name
    return output.num_cached_tokens


def test_prefixes_are_found_by_requests_of_the_same_adapter(llm):
    llm.reset_prefix_cache()
    for name in (None, "a", "b"):
        assert cached(llm, name) == 0
        assert cached(llm, name) > 0


# --- coming and going -------------------------------------------------------------------------------------------------


def test_loaded_replaced_and_unloaded_at_run_time(llm, folders):
    ask = lambda name: tokens_of(llm.generate(PROMPTS[:2], GREEDY, adapter=name))  # noqa: E731
    first, second = ask("a"), ask("b")
    before = llm.load_adapter("c", folders["a"])
    assert ask("c") == first and cached(llm, "c") > 0
    assert llm.load_adapter("c", folders["b"]) == before + 1
    assert cached(llm, "c") == 0 and ask("c") == second
    (output,) = llm.generate(PROMPTS[0], GREEDY, adapter="c")
    assert output.adapter.version == before + 1
    with refuses("max_loras", naming="3 adapter slots"):
        llm.load_adapter("d", folders["a"])
    llm.unload_adapter("c")
    with refuses("adapter", RequestError, naming="loaded: a, b"):
        ask("c")
    with refuses("adapter", RequestError):
        llm.unload_adapter("c")
    assert ask("a") == first


def test_requests_keep_the_adapter_they_began_with(llm, folders):
    """An unloaded or replaced adapter keeps its slot until its requests have ended."""
    first, second = (tokens_of(llm.generate(PROMPTS[:1], GREEDY, adapter=name)) for name in ("a", "b"))
    engine = llm.engine
    engine.add("old", PROMPTS[0], GREEDY, adapter="a")
    engine.step()
    llm.load_adapter("a", folders["b"])  # in another slot
    engine.add("new", PROMPTS[0], GREEDY, adapter="a")
    assert engine.offer_adapter("a", engine.runner.adapters.read("a", folders["a"])) == 0, "no slot is free"
    with refuses("max_loras", naming="requests in progress"):
        llm.load_adapter("a", folders["b"])
    while engine.has_work:
        engine.step()
    assert [[list(engine.output(id).outputs[0].token_ids)] for id in ("old", "new")] == [first, second]
    assert llm.load_adapter("a", folders["a"]) > 0


def test_a_request_that_was_checked_before_a_reload_gets_the_new_one(llm, folders):
    expected = tokens_of(llm.generate(PROMPTS[:1], GREEDY, adapter="b"))
    llm.load_adapter("c", folders["a"])
    request = llm.engine.intake.request("late", PROMPTS[0], GREEDY, adapter="c")
    llm.load_adapter("c", folders["b"])
    llm.engine.enqueue(request)
    while llm.engine.has_work:
        llm.engine.step()
    assert [list(llm.engine.output("late").outputs[0].token_ids)] == expected
    request = llm.engine.intake.request("later", PROMPTS[0], GREEDY, adapter="c")
    llm.unload_adapter("c")
    with refuses("adapter", RequestError):
        llm.engine.enqueue(request)


def test_adapters_sleep_and_wake_with_the_engine(llm, folders):
    expected = tokens_of(llm.generate(PROMPTS[:3], GREEDY, adapter=NAMES[:3]))
    llm.sleep(1)
    with refuses(naming="wake_up()"):
        llm.load_adapter("c", folders["a"])
    llm.wake_up()
    assert tokens_of(llm.generate(PROMPTS[:3], GREEDY, adapter=NAMES[:3])) == expected


@pytest.mark.thorough
def test_new_weights_come_below_the_adapters(folders):
    """The same after a sleep of level 2, and with an adapter loaded in between."""
    llm = make_llm("llama3.1", lora_modules={"a": folders["a"]}, max_loras=2, max_lora_rank=8)
    model = load(reference("llama3.1")[1], dtype="f32")
    names = [name for name in NAMES if name != "b"]
    expected = tokens_of(llm.generate(PROMPTS[: len(names)], GREEDY, adapter=names))
    llm.update_weights({**model.params, "embed": model.params["embed"][::-1]})
    assert tokens_of(llm.generate(PROMPTS[: len(names)], GREEDY, adapter=names)) != expected
    llm.sleep(2)
    llm.wake_up()
    llm.load_adapter("b", folders["b"])
    llm.update_weights(model.params)
    assert tokens_of(llm.generate(PROMPTS[: len(names)], GREEDY, adapter=names)) == expected
    assert tokens_of(llm.generate(PROMPTS[:2], GREEDY, adapter="b")) == peft_tokens(
        "llama3.1", folders["b"], PROMPTS[:2]
    )


# --- refusals --------------------------------------------------------------------------------------------------


def test_adapters_that_do_not_fit_are_refused(llm, tmp_path):
    with refuses("max_lora_rank", CheckpointError, naming="room for 7"):
        llm.load_adapter("c", saved(tmp_path / "wide", "llama3.1", 9, 1))
    with refuses(None, CheckpointError, naming="merge it"):
        llm.load_adapter("c", saved(tmp_path / "dora", "llama3.1", 4, 1, use_dora=True))
    with refuses(None, CheckpointError, naming="another model"):
        llm.load_adapter("c", saved(tmp_path / "phi", "phi3", 4, 1))
    with refuses(None, CheckpointError, naming="nowhere"):
        llm.load_adapter("c", tmp_path / "nowhere")
    with refuses("adapter", RequestError, naming="got 2 for 8"):
        llm.generate(PROMPTS, GREEDY, adapter=["a", "b"])
    assert llm.runner.adapters.names == ["a", "b"]


def test_an_engine_without_adapter_slots_refuses_adapters(folders):
    llm = make_llm("llama3.1")
    with refuses("max_loras"):
        llm.load_adapter("a", folders["a"])
    with refuses("adapter", RequestError, naming="'a'"):
        llm.generate(PROMPTS, GREEDY, adapter="a")
    assert json.dumps(llm.options.lora_modules) == "{}"
