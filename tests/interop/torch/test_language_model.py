"""Hugging Face architectures that Dovetail does not implement: logits, generation, the engine and the server."""

import functools
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from refusals import refuses
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from typer.testing import CliRunner

import dovetail as dt
from dovetail.cli.main import app
from dovetail.core.compute import compute_of
from dovetail.core.errors import UnsupportedError, UserError
from dovetail.engine.options import EngineOptions
from dovetail.interop.torch.language_model import TorchLanguageModel
from dovetail.models.registry import FAMILIES
from dovetail.serve.remote.wire import StartEngine

pytestmark = pytest.mark.slow

VOCAB, END = 257, 256
SIZES = dict(
    vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
    max_position_embeddings=64, bos_token_id=END, eos_token_id=END, pad_token_id=END,
)  # fmt: skip
# (further fields of the config, the kind of cache that is chosen)
ARCHITECTURES = {
    "gpt2": (dict(n_embd=32, n_layer=2, n_head=4, n_positions=64), "static"),
    "opt": (dict(ffn_dim=64, word_embed_proj_dim=32), "masked"),
    "gpt_neox": ({}, "static"),
    "falcon": ({}, "static"),
    "stablelm": (dict(num_key_value_heads=2), "static"),
    "cohere": (dict(num_key_value_heads=2), "static"),
    "bloom": (dict(n_layer=2, n_head=4), "static"),
    "mpt": (dict(d_model=32, n_heads=4, n_layers=2, max_seq_len=64), "none"),
    "starcoder2": (dict(num_key_value_heads=2, sliding_window=8), "static"),
}
QUICK = ("gpt2", "opt")
PROMPT = [7, 14, 21, 28, 35, 42, 49, 3, 10, 17, 24]


def module_of(name: str) -> torch.nn.Module:
    config = transformers.AutoConfig.for_model(name, **SIZES | ARCHITECTURES[name][0])
    config.initializer_range = 0.3  # of random weights that repeat one token the generation would show little
    torch.manual_seed(1)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.thorough) for name in ARCHITECTURES]
)
def test_logits_and_generation_are_those_of_torch(name):
    assert name not in FAMILIES
    module = module_of(name)
    model = TorchLanguageModel(module, compute_of("f32"))
    with torch.no_grad():
        want = module(torch.tensor([PROMPT])).logits[0].numpy()
    assert np.abs(model.logits(PROMPT) - want).max() < 1e-4
    settings = dict(max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    written = module.generate(torch.tensor([PROMPT]), **settings)[0, len(PROMPT) :].tolist()
    written = written[: written.index(END) + 1] if END in written else written
    assert list(model.generate(PROMPT, 12)) == written
    assert model.steps.kind == ARCHITECTURES[name][1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A GPT-2 whose tokens are bytes."""
    path = tmp_path_factory.mktemp("gpt2")
    alphabet = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=alphabet | {"<|end|>": END}, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>"])
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer.save_pretrained(path)
    module_of("gpt2").save_pretrained(path)
    return path


def test_an_engine_runs_the_module_one_sequence_at_a_time(folder):
    """Compare its tokens and scores with the model's; concurrent requests wait and get the same tokens."""
    model = dt.load(folder, backend="torch")
    llm = dt.LLM(folder, backend="torch", max_model_len=48)
    asked = [
        dt.SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, prompt_logprobs=0),
        dt.SamplingParams(temperature=1, max_tokens=8, ignore_eos=True, seed=7),
    ]
    greedy, drawn = llm.generate([PROMPT, PROMPT], asked)
    with torch.no_grad():
        settings = dict(max_new_tokens=8, min_new_tokens=8, do_sample=False, pad_token_id=0, eos_token_id=None)
        want = module_of("gpt2").generate(torch.tensor([PROMPT]), **settings)[0, len(PROMPT) :].tolist()
    assert list(greedy.outputs[0].token_ids) == want
    own = list(model.generate(PROMPT, 8, temperature=1.0, seed=7))
    assert list(drawn.outputs[0].token_ids)[: len(own)] == own
    scores = [entry.logprob for entry in greedy.prompt_logprobs[1:]]
    np.testing.assert_allclose(scores, model.logprobs(PROMPT), atol=1e-5)
    np.testing.assert_allclose(llm.embed([PROMPT])[0], model.embed(PROMPT), atol=1e-5)
    assert "one sequence at a time" in llm.describe()
    with refuses("path", UnsupportedError):
        llm.engine.read_weights(str(folder))


def test_steps_are_compiled_once_per_shape(folder):
    """Prompts of other lengths, and other settings of sampling, use the programs that are there."""
    model = dt.load(folder, backend="torch")
    list(model.generate(PROMPT, 4))
    counts = model.steps.run_step._cache_size()
    list(model.generate(PROMPT[:3], 6, temperature=0.7, top_p=0.9, seed=3))
    assert model.steps.run_step._cache_size() == counts
    model.logprobs(PROMPT)
    compiled = model.steps.run_logits._cache_size()
    model.logprobs(PROMPT[:5])
    assert model.steps.run_logits._cache_size() == compiled


def test_info_and_eval_take_it(folder, tmp_path):
    (tmp_path / "texts.txt").write_text("Hello there\n\nAnd again\n")
    run = functools.partial(CliRunner().invoke, app, env={"COLUMNS": "200"}, catch_exceptions=False)
    shown = run(["info", str(folder), "--backend", "torch"])
    assert shown.exit_code == 0 and "a PyTorch module run by torchax" in shown.output, shown.output
    asked = ["eval", str(folder), "--backend", "torch", "--tasks", "loss", "--data", str(tmp_path / "texts.txt")]
    found = run(asked)
    assert found.exit_code == 0 and "loss" in found.output, found.output


def test_what_the_torch_backend_cannot_do_is_refused(folder):
    with refuses("tensor_parallel_size"):
        dt.LLM(folder, backend="torch", tensor_parallel_size=2)
    with refuses("lora_modules"):
        dt.LLM(folder, backend="torch", lora_modules={"a": "b"})
    with refuses("kv_cache_memory_bytes"):
        dt.LLM(folder, backend="torch", kv_cache_memory_bytes=1 << 20)
    with pytest.raises(UserError, match='backend="torch"'):
        dt.LLM(folder)


def test_a_killed_engine_is_started_again_with_the_same_options():
    start = StartEngine("gpt2", EngineOptions(backend="torch", max_model_len=48))
    info = SimpleNamespace(max_loras=0, max_lora_rank=0, kv_cache_memory_bytes=1 << 20)
    assert start.again(info).options == start.options


@pytest.mark.thorough
def test_a_server_of_a_torch_module_answers_openais_client(folder):
    import openai

    arguments = ["serve", str(folder), "--backend", "torch", "--port", "0", "--served-model-name", "gpt2"]
    process = subprocess.Popen(
        [sys.executable, "-m", "dovetail", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    assert process.stdout is not None
    try:
        printed = ""
        while (found := re.search(r"ready at (http://\S+)", printed)) is None:
            line = process.stdout.readline()
            assert line, printed
            printed += line
        client = openai.OpenAI(base_url=f"{found[1]}/v1", api_key="none")
        hello = [{"role": "user", "content": "Hi"}]
        answer = client.chat.completions.create(model="gpt2", messages=hello, max_tokens=4, temperature=0)
        assert answer.usage.completion_tokens in range(1, 5)
        asked = dict(model="gpt2", prompt=PROMPT, max_tokens=6, temperature=1, seed=3)
        first, again = (client.completions.create(**asked).choices[0].text for _ in range(2))
        streamed = "".join(part.choices[0].text for part in client.completions.create(**asked, stream=True))
        assert first == again == streamed
        assert len(client.embeddings.create(model="gpt2", input="Hello").data[0].embedding) == 32
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
