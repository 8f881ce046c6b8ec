"""Trainer and engine in one process give the same tokens and log-probabilities.

An engine built from a trainer's f32 weights takes new ones in one call. Its tokens equal those of an engine that loads
the weights from disk, and its log-probabilities equal those of the packed forward.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from corners import corners
from train_cases import CONFIGS, alone, recipe, some_batch

from dovetail.core.training import Optimizer
from dovetail.core.types import Packed
from dovetail.engine.llm import LLM
from dovetail.engine.options import EngineOptions
from dovetail.engine.request.params import SamplingParams
from dovetail.models.decoder import forward, unembed
from dovetail.models.registry import parse_config
from dovetail.train.next_token import next_token
from dovetail.train.objective import export, step_context
from dovetail.train.optim import learning_rate, make_optimizer
from dovetail.train.settings import PretrainLoss
from dovetail.train.state import init_state
from dovetail.train.step import make_step

pytestmark = pytest.mark.slow

PAGE, CHUNK, LENGTH = 4, 16, 64  # a prompt of 37 tokens is computed in three chunks
OPTIONS = EngineOptions(
    dtype="f32", max_num_seqs=1, max_model_len=LENGTH, max_num_batched_tokens=CHUNK, block_size=PAGE,
    kv_cache_memory_bytes=2**20, max_decode_steps=1,
)  # fmt: skip
# sampled, so that a token's log-probability is anything but the largest
PARAMS = SamplingParams(temperature=1.0, seed=5, max_tokens=12, ignore_eos=True, logprobs=0)
RNG = np.random.default_rng(0)
SHARED = RNG.integers(1, 96, 25).tolist()  # what both prompts begin with: six pages and a token
PROMPTS = [SHARED + RNG.integers(1, 96, 12).tolist() for _ in range(2)]
# as small as may be: a local layer and a global one; a dense layer and one of experts
FEW = {"local": dict(num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"])}
FEW["latent"] = dict(num_hidden_layers=2)
LOSS = {"latent": PretrainLoss(mtp=0.3, router_bias_rate=1e-3), "moe": PretrainLoss(router_aux=1e-2)}


def trainer(name: str):
    """(config, a state, a step that donates it) on one device."""
    cfg = parse_config(CONFIGS[name] | FEW.get(name, {}) | {"initializer_range": 0.2})
    settings = recipe(loss=LOSS.get(name, PretrainLoss()), optimizer=Optimizer(lr=1e-2))
    objective = next_token(settings)
    rate = learning_rate(settings.schedule, settings.optimizer.lr, settings.total_steps)
    optimizer = make_optimizer(settings.optimizer, rate, objective.specs(cfg))
    state = init_state(cfg, objective.specs(cfg), settings, optimizer, alone())
    step = make_step(cfg, settings, objective, optimizer, rate, step_context(settings, alone()))
    return cfg, state, jax.jit(step, donate_argnums=0)


@functools.partial(jax.jit, static_argnames="cfg")
def scores(params, cfg, tokens):
    """[T, V]: row i is the log-probability of each token to follow tokens[:i + 1], as training has it."""
    positions = jnp.arange(tokens.shape[0])[None]
    with jax.default_matmul_precision("highest"):
        hidden, _ = forward(params, cfg, tokens[None], positions, Packed(jnp.ones_like(positions)))
        return jax.nn.log_softmax(unembed(params, cfg, hidden)[0].astype(jnp.float32))


def check(llm: LLM, params) -> list[tuple[int, ...]]:
    """Both prompts' tokens, the second of which finds the first's pages; the log-probability of each is the packed
    forward's."""
    found = []
    for prompt, cached in zip(PROMPTS, (0, len(SHARED) // PAGE * PAGE), strict=True):
        steps = llm.stats().steps
        (output,) = llm.generate(prompt, PARAMS)
        assert output.num_cached_tokens == cached
        chunks = -(-(len(prompt) - cached) // CHUNK)
        assert llm.stats().steps - steps >= chunks + PARAMS.max_tokens - 1
        (completion,) = output.outputs
        tokens = completion.token_ids
        given = jnp.asarray((*prompt, *tokens))
        expected = np.asarray(scores(params, llm.config, given))[len(prompt) - 1 : -1][range(len(tokens)), tokens]
        np.testing.assert_allclose([entry.logprob for entry in completion.logprobs], expected, rtol=0, atol=1e-5)
        found.append(tokens)
    return found


@pytest.mark.parametrize("name", corners(["dense", "latent", "local", "moe"], ["dense"]))
def test_an_engine_on_a_trainers_weights(name, tmp_path):
    cfg, state, step = trainer(name)
    assert ("mtp" in state.params) == (name == "latent")
    llm = LLM.from_weights(cfg, state.params, OPTIONS)
    before = check(llm, state.params)

    state, metrics = step(state, some_batch(0))  # takes the old state's buffers: the engine has its own
    assert np.isfinite(metrics["loss"])
    assert llm.update_weights(state.params) == 1
    after = check(llm, state.params)
    assert after != before

    export(tmp_path / "exported", cfg, state.params, None, jnp.float32)
    assert check(LLM(tmp_path / "exported", **vars(OPTIONS)), state.params) == after
