"""The sampler: an engine beside the trainer, which gets the trainer's weights before each rollout.

One jitted function per kind of layer publishes the weights (models.publish). Of adapters only the adapters are
published; the base is in the engine once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import jax
import numpy as np

from dovetail.core.chips import usable_bytes
from dovetail.core.types import Params
from dovetail.engine.llm import LLM
from dovetail.engine.options import EngineOptions
from dovetail.engine.spec.suffix import SuffixDrafter
from dovetail.io.tokenizer import Tokenizer
from dovetail.models.draft.draft import DraftModel
from dovetail.models.frozen import dense
from dovetail.models.serving_lora import slot_values
from dovetail.train.prepare import Ready
from dovetail.train.state import Position
from dovetail.tune.rl.settings import POLICY, Rl, kv_cache_bytes

ADAPTER = "policy"  # the engine's name of the adapter that is trained


class PolicySampler:
    """Hold the engine of a run. It is created when weights are published for the first time."""

    def __init__(self, settings: Rl, ready: Ready, tokenizer: Tokenizer, draft: DraftModel | None = None):
        """Create a sampler; `draft` is the draft model whose weights `publish` is given."""
        self._settings, self._ready, self.tokenizer, self._draft = settings, ready, tokenizer, draft
        self._llm: LLM | None = None
        self._refreshed = 0  # version at which the drafter was last refreshed

    @property
    def llm(self) -> LLM:
        """The engine with its weights."""
        assert self._llm is not None, "weights are published before anything is sampled"
        return self._llm

    def publish(self, params: Params, version: int, drafter: Params | None = None) -> None:
        """Sample with these weights from now on.

        Args:
            params: The trained weights; with a critic, the tree of both models.
            version: The number of updates that they have had.
            drafter: The draft model's weights, if they have changed.
        """
        params = params[POLICY] if self._settings.has_critic else params
        llm = self._llm or self._start(params)
        engine = llm.engine
        if self._settings.lora:
            if engine.sleeping:
                engine.wake_up()
            adapters = engine.runner.adapters
            host = jax.tree.map(np.asarray, jax.device_get(params))
            values = slot_values(adapters.layout, host, self._settings.lora, engine.runner.compute.dtype)
            engine.put_adapter(ADAPTER, values, version + 1)  # version 0 stands for no adapter
            engine.reset_prefix_cache()
        else:
            engine.swap_weights(engine.published(params), version=version)
            engine.wake_up()
        if drafter is not None:
            engine.replace_draft(drafter)
        self._refresh_drafter(version)

    def _refresh_drafter(self, version: int) -> None:
        """Let the drafter drop the completions of older policies, every `speculation.refresh` updates."""
        speculator, every = self.llm.engine.speculator, self._settings.speculation.refresh
        drafter = speculator.drafter if speculator else None
        if isinstance(drafter, SuffixDrafter) and every and version - self._refreshed >= every:
            drafter.refresh()
            self._refreshed = version

    def sleep(self) -> None:
        """Give the engine's memory to the trainer, if the recipe has `engine.enable_sleep_mode`."""
        if self._settings.engine.enable_sleep_mode:
            # Level 2 drops the weights, because the next rollout publishes new ones; the base of an adapter is kept.
            self.llm.engine.sleep(1 if self._settings.lora else 2)

    def _start(self, params: Params) -> LLM:
        base = dense(self._frozen_base()) if self._settings.lora else params
        count = self._settings.engine.devices
        devices = jax.devices()[-count:] if count else ()
        self._llm = LLM.from_weights(
            self._ready.cfg, base, self.options(), self.tokenizer, devices=devices, draft=self._draft
        )
        return self._llm

    def _frozen_base(self) -> Params:
        """Return the base of the adapter; beside a teacher the frozen weights have names."""
        frozen = self._ready.frozen
        return frozen["base"] if self._settings.algo == "gkd" else frozen

    def draft_counts(self) -> tuple[int, int, float]:
        """Return the drafts verified so far, the draft tokens accepted, and the seconds saved (an estimate)."""
        speculator = self._llm.engine.speculator if self._llm else None
        if speculator is None:
            return 0, 0, 0.0
        return speculator.counts.drafts, speculator.counts.accepted_tokens, speculator.length.saved_seconds

    def options(self) -> EngineOptions:
        """Return the options of the engine: the recipe's `engine` section, and what follows from its other keys."""
        settings, cfg, lora = self._settings, self._ready.cfg, self._settings.lora
        given = {"max_num_seqs": settings.max_num_seqs, **settings.engine.options, **settings.speculation.options}
        if not settings.engine.has_own_memory:
            given["kv_cache_memory_bytes"] = kv_cache_bytes(settings, cfg, usable_bytes(jax.devices()[0]))
        return EngineOptions(
            dtype=settings.precision.compute, max_model_len=min(settings.max_sequence_length + 1, cfg.max_len),
            tensor_parallel_size=max(1, settings.engine.devices), seed=settings.seed,
            max_loras=1 if lora else None, max_lora_rank=lora.r if lora else None, **given,
        )  # fmt: skip


@contextmanager
def offloaded_optimizer(at: Position, wanted: bool = True) -> Iterator[None]:
    """Keep the optimizer's state in host memory within the context; afterwards it is on the device, bit for bit."""
    if not wanted:
        yield
        return
    opt = at.state.opt
    shardings = jax.tree.map(lambda x: x.sharding, opt)
    host = jax.device_get(opt)
    for leaf in jax.tree.leaves(opt):
        leaf.delete()  # free the memory now: the engine needs it
    try:
        yield
    finally:
        at.state = replace(at.state, opt=jax.tree.map(jax.device_put, host, shardings))
