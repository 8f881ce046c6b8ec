"""LLM: a model to generate with, in one process and one call.

llm = LLM("smollm2-135m")
outputs = llm.generate(["The capital of France is"], SamplingParams(temperature=0))
"""

from __future__ import annotations

import gc
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Many
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, overload

import jax
import numpy as np

from dovetail.core.compute import compute_of
from dovetail.core.errors import UserError
from dovetail.core.mesh import Placement
from dovetail.core.spec import init
from dovetail.core.types import Params
from dovetail.engine.build import build_engine, check_model, compute_for, placement_of
from dovetail.engine.embed import Embedder, Pooling
from dovetail.engine.options import EngineOptions
from dovetail.engine.request.intake import Conversation, Prompt, as_many, holds_messages, is_conversation
from dovetail.engine.request.outputs import RequestOutput, Update
from dovetail.engine.request.params import SamplingParams
from dovetail.engine.stats import Stats
from dovetail.engine.terminal import RequestBar, compiling, deferred_interrupt
from dovetail.io.compiled import keep_compiled
from dovetail.io.hub import Progress
from dovetail.io.load import load
from dovetail.io.tokenizer import Tokenizer
from dovetail.io.tokenizer_files import read_templates
from dovetail.models.config import ModelConfig
from dovetail.models.publish import publish
from dovetail.models.registry import read_config
from dovetail.models.spec import spec

log = logging.getLogger(__name__)
Tools = Many[Mapping[str, Any]] | None


_Keywords = ParamSpec("_Keywords")


def _with_keywords_of(
    options: Callable[_Keywords, Any],
) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, str | Path, _Keywords], None]]:
    """Give `__init__` the keywords of the options class, for type checkers and editors."""
    return lambda init: init


class LLM:
    """A model and an engine, in this process.

    Args:
        model: A folder, .gguf file, hub id or catalogue name.
        **options: The fields of `EngineOptions`, each documented there.

    Raises:
        UserError: The model is not found, or an option is unknown or not valid for it.
    """

    @_with_keywords_of(EngineOptions)
    def __init__(self, model: str | Path, **options: Any):
        self._open(model, EngineOptions.of(options), None)

    @classmethod
    def from_options(cls, model: str | Path, options: EngineOptions, *, progress: Progress | None = None) -> LLM:
        """Load a model; `progress(what, done, total)` reports loading and compiling in place of a bar."""
        llm = cls.__new__(cls)
        llm._open(model, options, progress)
        return llm

    def _open(self, model: str | Path, options: EngineOptions, progress: Progress | None) -> None:
        start = time.perf_counter()
        keep_compiled()
        placement = placement_of(options)
        log.info("reading the weights of %s", model)
        loaded = _load(model, options, placement, progress)
        self._begin(*loaded, options, placement, progress, start)

    @classmethod
    def from_weights(
        cls,
        config: ModelConfig,
        params: Params,
        options: EngineOptions = EngineOptions(),
        tokenizer: Tokenizer | None = None,
        *,
        progress: Progress | None = None,
        devices: Many[Any] = (),
    ) -> LLM:
        """An engine on weights that are in memory: what `dt.load` gives, or a trainer's, f32 masters with an MTP branch
        too. They are copied: a train step may donate its own. `devices`: in place of jax's first."""
        start = time.perf_counter()
        keep_compiled()
        placement = placement_of(options, devices, always=bool(devices))
        published = publish(params, config, compute_for(options, params).dtype, placement)
        llm = cls.__new__(cls)
        llm._begin(config, published, tokenizer, options, placement, progress, start)
        return llm

    def _begin(
        self,
        config: ModelConfig,
        params: Params,
        tokenizer: Tokenizer | None,
        options: EngineOptions,
        placement: Placement | None,
        progress: Progress | None,
        start: float,
    ) -> None:
        self.config, self.tokenizer, self.options = config, tokenizer, options
        self._adapter_folders = {name: Path(folder) for name, folder in options.lora_modules.items()}
        self.load_seconds = time.perf_counter() - start
        log.info("read and placed the weights in %.1f s", self.load_seconds)
        self.engine = build_engine(config, params, options, tokenizer, placement)
        self.runner = self.engine.runner
        self._embedder = Embedder(self.engine, lambda function: function(self.engine))
        self._count = 0
        self._streams: dict[str, deque[Update]] = {}  # what each open stream has not been given yet
        log.info(self.describe())
        began = time.perf_counter()
        if config.scored:
            pass  # it takes no steps: a score is a forward, compiled when a prompt of its length first comes
        elif options.warm_up if options.warm_up is not None else jax.default_backend() != "cpu":
            with compiling(self.describe(), progress) as report:
                self.runner.warm_up(self.engine.sampler, report)
        else:
            self.runner.load_kept()
        self._start = start
        self._log_steps(began)
        self.start_seconds = time.perf_counter() - start

    def prepare(self, progress: Progress | None = None) -> None:
        """Have what no answer can do without before the first request comes, where the start has not compiled all: on a
        CPU. A server does this before it is ready."""
        if not self.runner.is_warm and not self.config.scored:
            began = time.perf_counter()
            with compiling(self.describe(), progress) as report:
                self.engine.prepare(report)
            self._log_steps(began)
            self.start_seconds = time.perf_counter() - self._start

    def _log_steps(self, began: float) -> None:
        compiled, seconds = self.runner.steps.compilations.begun, time.perf_counter() - began
        log.info("%d steps ready after %.1f s, of which %d were compiled", len(self.runner.steps), seconds, compiled)

    def generate(
        self,
        prompts: Prompt | Many[Prompt],
        params: SamplingParams | Many[SamplingParams] | None = None,
        progress: bool | None = None,
        adapter: str | Many[str | None] | None = None,
    ) -> list[RequestOutput]:
        """One output per prompt, in order. A prompt is text or token ids. Many prompts show a bar. `adapter`: the name
        of one that is loaded, or a list of names, with None for the model alone."""
        many = as_many(prompts)
        each = (
            list(params) if isinstance(params, Many) else [SamplingParams() if params is None else params] * len(many)
        )
        adapters = [adapter] * len(many) if adapter is None or isinstance(adapter, str) else list(adapter)
        for count, what in ((len(each), "sampling params"), (len(adapters), "adapters")):
            if count != len(many):
                raise UserError(f"{len(many)} prompts but {count} {what}")
        with without_collection():
            return self._finish(self._add(many, each, adapters), len(many) > 8 if progress is None else progress)

    @overload
    def chat(
        self,
        messages: Conversation,
        params: SamplingParams | None = None,
        tools: Tools = None,
        adapter: str | None = None,
        **template: Any,
    ) -> RequestOutput: ...
    @overload
    def chat(
        self,
        messages: Many[Conversation],
        params: SamplingParams | Many[SamplingParams] | None = None,
        tools: Tools = None,
        adapter: str | Many[str | None] | None = None,
        **template: Any,
    ) -> list[RequestOutput]: ...
    def chat(self, messages: Any, params: Any = None, tools: Tools = None, adapter: Any = None, **template: Any) -> Any:
        """The answer to a conversation (a list of messages), through the chat template of the model, or of the adapter
        where its folder has one; to a list of conversations, the list of their answers."""
        one = is_conversation(messages)
        if one and isinstance(params, Many):
            raise UserError(f"one conversation takes one SamplingParams; got {len(params)}")
        many = [messages] if one else messages
        adapters = [adapter] * len(many) if adapter is None or isinstance(adapter, str) else list(adapter)
        if len(adapters) != len(many):
            raise UserError(f"expected one adapter per conversation, got {len(adapters)} for {len(many)}")
        prompts = [self._chat_tokens(*each, tools, template) for each in zip(many, adapters, strict=True)]
        outputs = self.generate(prompts, params, adapter=adapter)
        return outputs[0] if one else outputs

    def embed(self, prompts: Prompt | Many[Prompt], pooling: Pooling = "mean") -> np.ndarray:
        """[prompts, model dim] f32: for each a vector of length 1, pooled from its final hidden states, as a server's
        /v1/embeddings has it."""
        tokens = [self.engine.intake.encode(each) for each in as_many(prompts)]
        return np.asarray(self._embedder.embed(tokens, pooling), np.float32).reshape(len(tokens), self.config.dim)

    def score(
        self,
        prompts: Prompt | Many[Prompt] | Conversation | Many[Conversation],
        tools: Tools = None,
        **template: Any,
    ) -> np.ndarray:
        """[prompts] f32, of a reward model: the score of each text, list of token ids or conversation, read at its last
        token. A conversation goes through the chat template, as whole as its training saw it. A text is taken as it
        is: where it was trained with an end-of-text token, it must have one here too."""
        if holds_messages(prompts):
            many = [prompts] if is_conversation(prompts) else prompts  # type: ignore[arg-type]
            whole = {"add_generation_prompt": False, **template}
            tokens = [self._chat_tokens(each, None, tools, whole) for each in many]
        elif tools or template:
            raise UserError("tools and what a chat template reads go with conversations; got texts or token ids")
        else:
            tokens = [self.engine.intake.encode(each) for each in as_many(prompts)]  # type: ignore[arg-type]
        return np.asarray(self._embedder.score(tokens), np.float32)

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, adapter: str | None = None
    ) -> Iterator[Update]:
        """The updates of one prompt as its tokens come. Leaving the loop early aborts it."""
        one = as_many(prompt)
        if len(one) != 1:
            raise UserError(f"stream takes one prompt, text or token ids; got {len(one)}")
        (id,) = self._add(one, [params or SamplingParams()], [adapter])
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

    def prediction(self) -> str:
        """How fast it should decode, in a line, or why that is not known."""
        config = self.engine.scheduler.config
        return self.engine.predicted.says(config.max_num_seqs, min(1024, config.max_model_len))

    def stats(self) -> Stats:
        return self.engine.stats()

    # --- weights and memory -------------------------------------------------------------------------------------------

    def update_weights(self, params: Params) -> int:
        """New weights, as `dt.load` gives them or as a trainer has them; their version. They are copied."""
        self._rest("the weights are changed")
        return self.engine.update_weights(params)

    def load_adapter(self, name: str, folder: str | Path) -> int:
        """Load a LoRA adapter as PEFT writes it, and return its version. One of that name is replaced; requests under
        way keep the one they began with."""
        version = self.engine.put_adapter(*self.engine.read_adapter(name, str(folder)))
        self._adapter_folders[name] = Path(folder)
        return version

    def unload_adapter(self, name: str) -> None:
        """Unload an adapter. Requests under way keep it; its slot is free when they have ended."""
        self.engine.drop_adapter(name)

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
            raise UserError(f"a stream is open: finish or close it before {before}")
        self.engine.drain()  # a step may be under way whose sequences have all ended

    # --- requests -----------------------------------------------------------------------------------------------------

    def _step(self, prompts_first: bool = False) -> list[Update]:
        """A step of the engine. Whoever takes it (generate amid a stream, say), no stream misses a token."""
        with deferred_interrupt():
            updates = self.engine.step(prompts_first, ended_only=not self._streams)
            for update in updates if self._streams else ():
                if update.id in self._streams:
                    self._streams[update.id].append(update)
        return updates

    def _finish(self, ids: list[str], progress: bool) -> list[RequestOutput]:
        """Step until these are done; their outputs, in order."""
        remaining, outputs = set(ids), {}
        try:
            with RequestBar(len(ids), progress, lambda: self.runner.is_compiling) as tick:
                while remaining:
                    updates = self._step(prompts_first=True)
                    for id in {update.id for update in updates if update.finish_reason} & remaining:
                        if self.engine.is_done(id):
                            outputs[id] = self.engine.output(id)
                            remaining.discard(id)
                            tick()
        finally:  # an interrupt leaves no request behind
            for id in remaining:
                self.engine.abort(id)
        return [outputs[id] for id in ids]

    def _chat_tokens(self, messages, adapter, tools, template) -> list[int]:
        if self.tokenizer is None:
            raise UserError("the model has no tokenizer, so no chat template: use generate with token ids")
        folder = self._adapter_folders.get(adapter)
        own = read_templates(folder) if folder else None
        tokenizer = self.tokenizer.with_templates(own) if own else self.tokenizer
        if tools and "tool" not in tokenizer.chat(tools, template.get("chat_template")).source:
            raise UserError("the model's chat template does not read tools: pass a chat_template that does")
        return tokenizer.encode_chat(messages, tools, **template)

    def _add(self, prompts: Many[Prompt], params: Many[SamplingParams], adapters: Many[str | None]) -> list[str]:
        """All or none: a bad prompt is refused and its neighbours are not left behind."""
        if self.engine.blocked:
            raise UserError(self.engine.blocked)
        ids = []
        try:
            for prompt, each, adapter in zip(prompts, params, adapters, strict=True):
                self._count += 1
                ids.append(str(self._count))
                self.engine.add(ids[-1], prompt, each, adapter=adapter)
        except BaseException:
            for id in ids:
                self.engine.abort(id)
            raise
        return ids


def _load(
    model: str | Path, options: EngineOptions, placement: Placement | None, progress: Progress | None
) -> tuple[ModelConfig, Params, Tokenizer | None]:
    """A model's config, its weights in the engine's form, its tokenizer."""
    if options.load_format == "dummy":
        return _dummy(model, options, placement)
    loaded = load(model, options.dtype, placement, progress, lambda cfg: check_model(cfg, options))
    params = publish(loaded.params, loaded.config, loaded.compute.dtype, placement, take=True)
    return loaded.config, params, loaded.tokenizer


def _dummy(
    model: str | Path, options: EngineOptions, placement: Placement | None
) -> tuple[ModelConfig, Params, Tokenizer | None]:
    cfg = read_config(model)
    check_model(cfg, options)
    compute = compute_of(options.dtype or ("f32" if jax.default_backend() == "cpu" else "bf16"))
    specs = spec(cfg)
    places = placement.shardings(specs) if placement else None
    params = init(specs, jax.random.key(options.seed or 0), compute.dtype, shardings=places)
    return cfg, publish(params, cfg, compute.dtype, placement, take=True), None


@contextmanager
def without_collection() -> Iterator[None]:
    """Python looks for garbage afterwards: a search through all that jax has made would hold up a step."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
