"""Servers: SmolLM2 and its first layers with an engine in a process of its own, and scripted ones without an engine."""

import json
import logging
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import few_programs
import pytest
from xla_flags import flags


@pytest.fixture(autouse=True)
def own_logging():
    """Restore logging, which the command `serve` sets up for its process."""
    root, package = logging.getLogger(), logging.getLogger("dovetail")
    handlers, levels = list(root.handlers), (root.level, package.level)
    yield
    root.handlers[:] = handlers
    root.setLevel(levels[0])
    package.setLevel(levels[1])


@pytest.fixture(scope="session", autouse=True)
def _few_programs():
    """Let engine processes pad their steps to few shapes."""
    from dovetail.serve.remote import child

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(child, "COMMAND", (sys.executable, few_programs.__file__))
        yield


@pytest.fixture(scope="session")
def tokenizer(smollm2_gguf):
    from dovetail.serve.http.start import read_tokenizer

    return read_tokenizer(smollm2_gguf)


@contextmanager
def engine_of(model: Path, tokenizer, quick: bool, **more):
    """A server of `model` with a real engine process."""
    from serve.servers import running

    from dovetail.engine.options import EngineOptions
    from dovetail.serve.remote.client import EngineClient

    async def engine():
        size = dict(max_model_len=512, max_num_seqs=4, max_num_batched_tokens=32) | more
        options = EngineOptions(**size, scheduling_policy="priority", seed=None)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("XLA_FLAGS", flags(1, quick))
            return await EngineClient.start(model, options)

    with running(engine, tokenizer, admin_key="boss") as server:
        yield server


@pytest.fixture(scope="session")
def first_layers(smollm2_gguf, tmp_path_factory) -> Path:
    """SmolLM2's embeddings and first two of 30 layers: a fifteenth of what the model takes to compile."""
    from dovetail.io.load import load, save

    model = load(smollm2_gguf)
    source = json.dumps(json.loads(model.config.source) | {"num_hidden_layers": 2})
    config = replace(model.config, layers=model.config.layers[:2], source=source)
    folder = tmp_path_factory.mktemp("smollm2") / "first_layers"
    save(folder, config, {**model.params, "layers": model.params["layers"][:2]}, model.tokenizer)
    return folder


@pytest.fixture(scope="session")
def real(first_layers, tokenizer):
    """A server of SmolLM2's first layers with a real engine process."""
    with engine_of(first_layers, tokenizer, quick=True) as server:
        yield server


@pytest.fixture(scope="module")
def whole_model(smollm2_gguf, tokenizer):
    """A server of SmolLM2 with a real engine process. Programs of several decode steps are left to `real`.

    Activations stay in f32: its tokens are compared with transformers'.
    """
    with engine_of(smollm2_gguf, tokenizer, quick=False, max_decode_steps=1, quantization="gguf") as server:
        yield server


@pytest.fixture(scope="session")
def openai_client(real):
    import openai

    with openai.OpenAI(base_url=f"{real.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def scripted(tokenizer):
    """A server whose engine answers with `scripted.engine.texts`."""
    from serve.servers import Script, running

    async def engine():
        return Script(tokenizer)

    with running(engine, tokenizer) as server:
        yield server
