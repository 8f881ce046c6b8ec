"""Helpers of the engine's tests: small engines, and the tokens that transformers generates."""

from __future__ import annotations

import copy
import random
from dataclasses import replace

import numpy as np
import torch
from reference_models import reference

from dovetail.engine.engine import Engine
from dovetail.engine.llm import LLM
from dovetail.engine.request.params import SamplingParams
from dovetail.engine.schedule.scheduler import Scheduler

NEW = 12
PAGE = 4  # small, so that an answer needs several and a pool runs out of them
OPTIONS = dict(max_num_seqs=8, max_model_len=256, max_num_batched_tokens=64, block_size=PAGE)
GREEDY = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)


def make_llm(name: str, **options) -> LLM:
    return LLM(reference(name)[1], **(OPTIONS | options))


def variant(llm: LLM, pages: int | None = None, caching: bool = True, steps: int = 1) -> LLM:
    """Another engine on the same compiled steps: it may use fewer pages than there are, and takes `steps` decode steps
    a dispatch (how many it would choose itself depends on how fast the machine is)."""
    config = llm.engine.scheduler.config
    config = replace(config, num_pages=pages or config.num_pages, enable_prefix_caching=caching)
    other = copy.copy(llm)
    other.engine = Engine(llm.runner, Scheduler(config), llm.tokenizer)
    other.engine._steps_wanted = lambda: steps  # type: ignore[method-assign]
    other.launched = _record_steps(other.engine)  # type: ignore[attr-defined]
    return other


def _record_steps(engine: Engine) -> list[int]:
    """Record the number of steps of each plan that the engine launches."""
    steps, launch = [], engine._launch

    def recorded(plan, **more):
        steps.append(plan.steps)
        return launch(plan, **more)

    engine._launch = recorded  # type: ignore[method-assign]
    return steps


def mixed_prompts(count: int, least: int = 8, most: int = 120, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, 160) for _ in range(rng.randint(least, most))] for _ in range(count)]


def theirs(model, prompt: list[int], **options) -> list[int]:
    """Return the tokens of transformers' greedy generate; without options an end token is ignored."""
    ids = torch.tensor([prompt])
    stops = model.generation_config.eos_token_id
    if not options:
        model.generation_config.eos_token_id = None
    try:
        with torch.no_grad():
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False, pad_token_id=0, **options
            )
    finally:
        model.generation_config.eos_token_id = stops
    return out[0, len(prompt) :].tolist()


def log_softmax(model, tokens: list[int]) -> np.ndarray:
    """[length, V]: row i is what position i says of token i + 1."""
    with torch.no_grad():
        return torch.log_softmax(model(torch.tensor([tokens])).logits[0].float(), -1).numpy()


def tokens_of(outputs) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]
