"""Servers: one with the real SmolLM2 in a process of its own, and scripted ones that need no engine."""

import logging

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


@pytest.fixture(scope="session")
def tokenizer(smollm2_gguf):
    from dovetail.serve.http.start import read_tokenizer

    return read_tokenizer(smollm2_gguf)


@pytest.fixture(scope="session")
def real(smollm2_gguf, tokenizer):
    """A server of the real model with a real engine process."""
    from serve.servers import running

    from dovetail.engine.options import EngineOptions
    from dovetail.serve.remote.client import EngineClient

    async def engine():
        size = dict(max_model_len=512, max_num_seqs=4, max_num_batched_tokens=32)
        options = EngineOptions(**size, scheduling_policy="priority", seed=None)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("XLA_FLAGS", flags(1, quick=False))  # as `optimised`
            return await EngineClient.start(smollm2_gguf, options)

    with running(engine, tokenizer, admin_key="boss") as server:
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
