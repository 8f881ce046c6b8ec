"""The actor: an engine beside the trainer, given the trainer's weights before each rollout.

Weights are published by one jitted function per kind of layer (models.publish); of adapters only they themselves are
handed over, and the base lies in the engine once.
"""

from __future__ import annotations

import jax
import numpy as np

from dovetail.core.chips import usable_bytes
from dovetail.core.types import Params
from dovetail.engine.llm import LLM
from dovetail.engine.options import EngineOptions
from dovetail.io.tokenizer import Tokenizer
from dovetail.models.frozen import dense
from dovetail.models.serving_lora import slot_values
from dovetail.train.prepare import Ready
from dovetail.tune.rl.player import ADAPTER
from dovetail.tune.rl.settings import Rl


class Actor:
    def __init__(self, settings: Rl, ready: Ready, tokenizer: Tokenizer):
        self._settings, self._ready, self.tokenizer = settings, ready, tokenizer
        self._llm: LLM | None = None

    @property
    def llm(self) -> LLM:
        assert self._llm is not None, "weights are published before anything is sampled"
        return self._llm

    def publish(self, params: Params, version: int) -> None:
        """The weights that sample from now on, and how many updates they have had."""
        llm = self._llm or self._begin(params)
        engine = llm.engine
        if self._settings.lora:
            if engine.sleeping:
                engine.wake_up()
            adapters = engine.runner.adapters
            host = jax.tree.map(np.asarray, jax.device_get(params))
            values = slot_values(adapters.layout, host, self._settings.lora, engine.runner.compute.dtype)
            engine.put_adapter(ADAPTER, values, version + 1)  # 0 would be none
            engine.reset_prefix_cache()
        else:
            engine.swap_weights(engine.published(params), version=version)
            engine.wake_up()

    def rest(self) -> None:
        """Give its memory to the trainer, where the recipe says so: weights that are trained come anew anyway."""
        if self._settings.engine.sleep:
            self.llm.engine.sleep(1 if self._settings.lora else 2)

    def _begin(self, params: Params) -> LLM:
        base = dense(self._frozen_base()) if self._settings.lora else params
        cfg, options = self._ready.cfg, self.options()
        devices = jax.devices()[-self._settings.engine.devices :] if self._settings.engine.devices else ()
        self._llm = LLM.from_weights(cfg, base, options, self.tokenizer, devices=devices)
        return self._llm

    def _frozen_base(self) -> Params:
        """Beside a teacher it has a name."""
        frozen = self._ready.frozen
        return frozen["base"] if self._settings.algo == "gkd" else frozen

    def options(self) -> EngineOptions:
        wanted, settings = self._settings.engine, self._settings
        lora = settings.lora
        # with devices or a time of its own, it takes what is free there
        alone, hbm = wanted.devices or wanted.sleep, usable_bytes(jax.devices()[0])
        pool = int(wanted.kv_gib * 2**30) or None if alone else settings.pool_bytes(self._ready.cfg, hbm)
        return EngineOptions(
            dtype=settings.precision.compute, max_model_len=min(settings.longest + 1, self._ready.cfg.max_len),
            max_num_seqs=settings.sequences, tensor_parallel_size=max(1, wanted.devices), seed=settings.seed,
            kv_cache_memory_bytes=pool, max_loras=1 if lora else None,
            max_lora_rank=lora.r if lora else None,
        )  # fmt: skip
