"""LLM: a model to generate with, in one process and one call.

llm = LLM("smollm2-135m")
outputs = llm.generate(["The capital of France is"], SamplingParams(temperature=0))
"""

from __future__ import annotations

import gc
import logging
import time
from collections import deque
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Many
from contextlib import contextmanager
from numbers import Integral
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp

from dovetail.core.mesh import SERVE, Placement, make_mesh
from dovetail.core.spec import init
from dovetail.core.types import Params, Weights
from dovetail.engine.bars import RequestBar, compiling
from dovetail.engine.buckets import Buckets
from dovetail.engine.engine import Engine
from dovetail.engine.intake import Prompt
from dovetail.engine.interrupt import held_back
from dovetail.engine.memory import held_bytes, num_pages
from dovetail.engine.params import SamplingParams
from dovetail.engine.runner import Runner
from dovetail.engine.scheduler import Scheduler, SchedulerConfig
from dovetail.engine.sequence import RequestOutput, Update
from dovetail.engine.stats import Stats
from dovetail.io.compiled import keep_compiled
from dovetail.io.hub import Progress
from dovetail.io.load import DTYPES, load
from dovetail.io.tokenizer import Tokenizer
from dovetail.models.config import ModelConfig
from dovetail.models.fuse import fuse_taking
from dovetail.models.registry import read_config
from dovetail.models.spec import spec

log = logging.getLogger(__name__)


class LLM:
    """`load_format="dummy"` needs only a config.json: random weights, for measuring speed."""

    def __init__(
        self,
        model: str | Path,
        *,
        dtype: Any = None,
        max_model_len: int | None = None,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int | None = None,
        memory_fraction: float | None = None,
        kv_bytes: int | None = None,
        tensor_parallel: int = 1,
        load_format: str = "auto",
        prefix_caching: bool = True,
        policy: Literal["fcfs", "priority"] = "fcfs",
        multi_step: bool = True,
        page_size: int = 16,
        warm_up: bool | None = None,
        seed: int = 0,
        progress: Progress | None = None,
    ):
        """`memory_fraction`: of a device's memory (0.9 unless told), or of a CPU's free memory, for the pages alone
        (0.2). `kv_bytes`: of each device, instead. `progress(what, done, total)`: a bar on a terminal unless told."""
        start = time.perf_counter()
        _check_numbers(
            max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens, kv_bytes=kv_bytes,
            tensor_parallel=tensor_parallel, page_size=page_size,
        )  # fmt: skip
        keep_compiled()
        on_cpu = jax.default_backend() == "cpu"
        placement = None
        if tensor_parallel > 1:
            placement = Placement(make_mesh({"tensor": tensor_parallel}, jax.devices()[:tensor_parallel]), SERVE)
        cfg, params, self.tokenizer = _load(model, dtype, load_format, seed, placement, progress)
        self.config, self.load_seconds = cfg, time.perf_counter() - start
        max_model_len = _max_len(cfg, max_model_len)
        max_num_batched_tokens = max_num_batched_tokens or (8192 if on_cpu else 16384)
        max_pages = -(-max_model_len // page_size)
        buckets = Buckets(max_num_seqs, max_num_batched_tokens, max_pages, page_size, growth=4 if on_cpu else 2)
        weights = Weights(params)

        def make_runner(pages: int) -> Runner:
            return Runner(cfg, weights, buckets, page_size, pages, placement=placement)

        trial = make_runner(1)
        step_bytes = 0 if on_cpu or kv_bytes else trial.step_memory()
        pages = num_pages(
            held_bytes(trial.cache), page_size, kv_bytes=kv_bytes, fraction=memory_fraction,
            weight_bytes=held_bytes(params), step_bytes=step_bytes, most=max_num_seqs * max_pages,
        )  # fmt: skip
        self.runner = make_runner(pages)
        config = SchedulerConfig(
            max_num_seqs, max_num_batched_tokens, max_model_len, page_size, pages, prefix_caching, policy
        )
        self.engine = Engine(self.runner, Scheduler(config), self.tokenizer, seed, multi_step)
        self._count = 0
        self._streams: dict[str, deque[Update]] = {}  # what each open stream has not been given yet
        log.info(self.describe())
        if warm_up if warm_up is not None else not on_cpu:
            with compiling(self.describe(), progress) as report:
                self.runner.warm_up(self.engine.sampler, buckets.needed(), buckets.common(), report)
        self.start_seconds = time.perf_counter() - start

    def generate(
        self,
        prompts: Prompt | Many[Prompt],
        params: SamplingParams | Many[SamplingParams] | None = None,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """One output a prompt, in order. A prompt is text or token ids. Many prompts show a bar."""
        many = _as_many(prompts)
        each = (
            list(params) if isinstance(params, Many) else [SamplingParams() if params is None else params] * len(many)
        )
        if len(each) != len(many):
            raise ValueError(f"{len(many)} prompts but {len(each)} sampling params")
        with _no_collection():
            return self._finish(self._add(many, each), len(many) > 8 if progress is None else progress)

    def chat(
        self,
        messages: Many[Mapping[str, Any]],
        params: SamplingParams | None = None,
        tools: Many[Mapping[str, Any]] | None = None,
        **template: Any,
    ) -> RequestOutput:
        """The answer to one conversation, through the model's chat template."""
        return self.generate([self._chat_tokens(messages, tools, template)], params)[0]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Update]:
        """The updates of one prompt as its tokens come. Leaving the loop early aborts it."""
        one = _as_many(prompt)
        if len(one) != 1:
            raise ValueError(f"stream takes one prompt, text or token ids; got {len(one)}")
        (id,) = self._add(one, [params or SamplingParams()])
        updates = self._streams[id] = deque()
        try:
            while updates or not self.engine.is_done(id):
                if not updates:
                    self._step()
                while updates:
                    yield updates.popleft()
        finally:
            del self._streams[id]
            self.engine.abort(id)

    def describe(self) -> str:
        """What there is room for, in a line."""
        config = self.engine.scheduler.config
        tokens = config.num_pages * config.page_size
        many = f"{tokens / config.max_model_len:,.1f} sequences of {config.max_model_len:,}"
        return f"{config.num_pages:,} KV pages of {config.page_size} tokens, room for {many}"

    def stats(self) -> Stats:
        return self.engine.stats()

    # --- weights and memory -------------------------------------------------------------------------------------------

    def update_weights(self, params: Params) -> int:
        """New weights, in the form `dt.load` gives them; their version."""
        self._rest("the weights are changed")
        return self.engine.update_weights(params)

    def reset_prefix_cache(self) -> None:
        """Nothing computed so far is found again."""
        self.engine.reset_prefix_cache()

    def sleep(self, level: int = 1) -> None:
        """Give the device's memory back until `wake`: the KV pool, and the weights, which level 1 keeps on the host.
        Level 2 drops them too: update_weights must bring new ones before the next generate."""
        self._rest("the engine goes to sleep")
        self.engine.sleep(level)

    def wake(self) -> None:
        self.engine.wake()

    def _rest(self, before: str) -> None:
        if self.engine.scheduler.has_work:
            raise ValueError(f"a stream is open: finish or close it before {before}")
        self.engine.drain()  # a step may be under way whose sequences have all ended

    # --- requests -----------------------------------------------------------------------------------------------------

    def _step(self, prompts_first: bool = False) -> list[Update]:
        """A step of the engine. Whoever takes it (generate amid a stream, say), no stream misses a token."""
        with held_back():
            updates = self.engine.step(prompts_first)
            for update in updates:
                if update.id in self._streams:
                    self._streams[update.id].append(update)
        return updates

    def _finish(self, ids: list[str], progress: bool) -> list[RequestOutput]:
        """Step until these are done; their outputs, in order."""
        remaining, outputs = set(ids), {}
        try:
            with RequestBar(len(ids), progress) as tick:
                while remaining:
                    for id in {update.id for update in self._step(prompts_first=True) if update.finished} & remaining:
                        if self.engine.is_done(id):
                            outputs[id] = self.engine.output(id)
                            remaining.discard(id)
                            tick()
        finally:  # who interrupts this leaves nothing behind
            for id in remaining:
                self.engine.abort(id)
        return [outputs[id] for id in ids]

    def _chat_tokens(self, messages, tools, template) -> list[int]:
        if self.tokenizer is None:
            raise ValueError("the model has no tokenizer, so no chat template: use generate with token ids")
        if tools and "tool" not in self.tokenizer.chat(tools, template.get("chat_template")).source:
            raise ValueError("the model's chat template does not read tools: pass a chat_template that does")
        return self.tokenizer.encode_chat(messages, tools, **template)

    def _add(self, prompts: Many[Prompt], params: Many[SamplingParams]) -> list[str]:
        """All or none: a bad prompt is refused and its neighbours are not left behind."""
        if self.engine.blocked:
            raise ValueError(self.engine.blocked)
        ids = []
        try:
            for prompt, each in zip(prompts, params, strict=True):
                self._count += 1
                ids.append(str(self._count))
                self.engine.add(ids[-1], prompt, each)
        except BaseException:
            for id in ids:
                self.engine.abort(id)
            raise
        return ids


def _load(
    model, dtype, load_format: str, seed: int, placement, progress
) -> tuple[ModelConfig, Params, Tokenizer | None]:
    if load_format == "auto":
        loaded = load(model, dtype, placement, progress)
        params = loaded.params if placement else fuse_taking(loaded.params)
        return loaded.config, params, loaded.tokenizer
    if load_format != "dummy":
        raise ValueError(f"load_format is auto or dummy; got {load_format!r}")
    cfg = read_config(model)
    name = dtype or ("f32" if jax.default_backend() == "cpu" else "bf16")
    if isinstance(name, str) and name not in DTYPES:
        raise ValueError(f"dtype is one of {', '.join(DTYPES)}; got {name!r}")
    kind, specs = DTYPES[name] if isinstance(name, str) else jnp.dtype(name), spec(cfg)
    params = init(specs, jax.random.key(seed), kind, shardings=placement.shardings(specs) if placement else None)
    return cfg, params if placement else fuse_taking(params), None


def _check_numbers(**numbers: int | None) -> None:
    for name, value in numbers.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, Integral) or value < 1):
            raise ValueError(f"{name} is an integer of at least 1; got {value!r}")


def _max_len(cfg: ModelConfig, asked: int | None) -> int:
    if asked is None:
        return cfg.max_len
    if not 2 <= asked <= cfg.max_len:
        raise ValueError(f"max_model_len must be between 2 and the model's own {cfg.max_len}; got {asked}")
    return asked


def _as_many(prompts: Prompt | Many[Prompt]) -> list[Any]:
    """One prompt (text, or ids) or many of them, as a list."""
    if isinstance(prompts, str | bytes):
        return [prompts]
    if not isinstance(prompts, Many) and not hasattr(prompts, "__array__"):
        raise ValueError(f"prompts are text or lists of token ids, one or a list of them; got {repr(prompts)[:80]}")
    return [prompts] if len(prompts) > 0 and isinstance(prompts[0], Integral) else list(prompts)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Python looks for garbage afterwards: a search through all that jax has made would hold up a step."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
