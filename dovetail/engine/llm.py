"""LLM: a model to generate with, in one process.

llm = LLM("smollm2-135m")
outputs = llm.generate(["The capital of France is"], SamplingParams(temperature=0))
print(outputs[0].outputs[0].text)
"""

from __future__ import annotations

import functools
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Many
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, overload

import jax
import numpy as np

from dovetail.core.compute import compute_of
from dovetail.core.errors import RequestError, UserError
from dovetail.core.mesh import Placement, param_sharding
from dovetail.core.reporter import Progress
from dovetail.core.spec import init, is_spec
from dovetail.core.types import Params
from dovetail.engine.build import build_engine, build_torch_engine, check_model, compute_for, placement_of
from dovetail.engine.embed import Embedder, Pooling
from dovetail.engine.engine import Engine
from dovetail.engine.interface import EngineStats
from dovetail.engine.options import EngineOptions
from dovetail.engine.pages import warms_up
from dovetail.engine.request.images import ImageReader
from dovetail.engine.request.intake import Conversation, Prompt, as_many, holds_messages, is_conversation
from dovetail.engine.request.outputs import OutputDelta, RequestOutput
from dovetail.engine.request.params import SamplingParams, renamed_attribute
from dovetail.engine.terminal import RequestBar, compiling, deferred_interrupt, without_collection
from dovetail.io.chat import has_images
from dovetail.io.compiled import keep_compiled
from dovetail.io.hub import resolve
from dovetail.io.images.item import ImagePrompt
from dovetail.io.images.processor import ImageProcessor
from dovetail.io.late_tokenizer import LateTokenizer
from dovetail.io.load import load, open_checkpoint, served_blocks
from dovetail.io.quantized_folder import formats_of_config
from dovetail.io.tokenizer import Tokenizer
from dovetail.io.tokenizer_files import read_templates
from dovetail.models.config import ModelConfig
from dovetail.models.draft.draft import DraftModel
from dovetail.models.formats import Formats, rounded_formats, with_formats
from dovetail.models.publish import publish
from dovetail.models.registry import read_config
from dovetail.models.spec import spec
from dovetail.ops.quant.weight import rounded

log = logging.getLogger(__name__)
Tools = Many[Mapping[str, Any]] | None
ImageInput = Mapping[str, Any]  # a prompt with images, with vLLM's keys


_Keywords = ParamSpec("_Keywords")


def _with_keywords_of(
    options: Callable[_Keywords, Any],
) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, str | Path, _Keywords], None]]:
    """Give `__init__` the keywords of the options class, for type checkers and editors."""
    return lambda init: init


class LLM:
    """Run a model with an engine in this process.

    Args:
        model: A folder, .gguf file, hub id or catalogue name.
        **options: The fields of `EngineOptions`, each documented there.

    Raises:
        UserError: The model is not found, or an option is unknown or not valid for it.
    """

    @_with_keywords_of(EngineOptions)
    def __init__(self, model: str | Path, **options: Any):
        self._open(model, EngineOptions.of(options), None, text=True)

    @classmethod
    def from_options(
        cls, model: str | Path, options: EngineOptions, *, progress: Progress | None = None, text: bool = True
    ) -> LLM:
        """Load a model.

        Args:
            model: A folder, .gguf file, hub id or catalogue name.
            options: The engine's options.
            progress: `progress(what, done, total)` reports loading and compiling in place of a bar.
            text: Whether texts are read and written here; if not, the tokenizer is let go until a grammar needs it.
        """
        llm = cls.__new__(cls)
        llm._open(model, options, progress, text)
        return llm

    def _open(self, model: str | Path, options: EngineOptions, progress: Progress | None, text: bool) -> None:
        start = time.perf_counter()
        keep_compiled()
        log.info("reading the weights of %s", model)
        if options.backend == "torch":
            found = load(model, options.dtype, progress=progress, backend="torch")
            build = functools.partial(build_torch_engine, found, options)
            self._begin(found.config, found.tokenizer, options, build, progress, start)
        else:
            placement, options = placement_of(options), options.with_own_draft(str(model))
            config, params, tokenizer = _load(model, options, placement, progress)
            if tokenizer and not text:
                tokenizer = LateTokenizer(functools.partial(_read_tokenizer, model), tokenizer.eos_ids)
            build = functools.partial(build_engine, config, params, options, tokenizer, placement)
            del params  # `build` has the last reference
            self._begin(config, tokenizer, options, build, progress, start)
        self._images = ImageReader(model, self.config.vision, self.tokenizer)

    @classmethod
    def from_weights(
        cls,
        config: ModelConfig,
        params: Params,
        options: EngineOptions = EngineOptions(),
        tokenizer: Tokenizer | None = None,
        *,
        processor: ImageProcessor | None = None,
        progress: Progress | None = None,
        devices: Many[Any] = (),
        draft: DraftModel | None = None,
    ) -> LLM:
        """Return an LLM on weights that are in memory.

        Args:
            config: The model's config.
            params: Weights as `dt.load` returns them or as a trainer has them, such as f32 masters with an MTP branch.
                They are copied, so that a train step may donate its own.
            options: The engine's options.
            tokenizer: The model's, if it has one.
            processor: The model's, if it sees images and prompts have them otherwise than as ImagePrompts.
            progress: See LLM.
            devices: The devices to use; by default jax's first.
            draft: A draft model in place of the one that the options name. Its weights are random until
                `engine.replace_draft` is called.
        """
        start = time.perf_counter()
        keep_compiled()
        placement = placement_of(options, devices, always=bool(devices))
        formats = rounded_formats(spec(config), options.quantization) if options.quantization else None
        published = publish(params, config, compute_for(options, params).dtype, placement, formats=formats)
        llm = cls.__new__(cls)
        build = functools.partial(build_engine, config, published, options, tokenizer, placement, draft)
        llm._begin(config, tokenizer, options, build, progress, start)
        llm._images = ImageReader(None, config.vision, tokenizer, processor)
        return llm

    def _begin(
        self,
        config: ModelConfig,
        tokenizer: Tokenizer | None,
        options: EngineOptions,
        build: Callable[[], Engine],
        progress: Progress | None,
        start: float,
    ) -> None:
        self.config, self.tokenizer, self.options = config, tokenizer, options
        self._adapter_folders = {name: Path(folder) for name, folder in options.lora_modules.items()}
        self.load_seconds = time.perf_counter() - start
        log.info("loaded the weights in %.1f s", self.load_seconds)
        self.engine = build()
        self.runner = self.engine.runner
        self._embedder = Embedder(self.engine, lambda function: function(self.engine))
        self._count = 0
        self._streams: dict[str, deque[OutputDelta]] = {}  # deltas that each open stream has not yielded yet
        log.info(self.describe())
        began = time.perf_counter()
        if config.scored:
            pass  # it takes no steps: a score is a forward pass, compiled when a prompt of its length first comes
        elif warms_up(options):
            with compiling(self.describe(), progress) as report:
                self.runner.warm_up(self.engine.sampler, report)
        else:
            self.runner.load_kept()
        self._start = start
        self._log_steps(began)
        self.start_seconds = time.perf_counter() - start

    def prepare(self, progress: Progress | None = None) -> None:
        """Compile what every request needs, if the start did not compile all steps (on a CPU).

        A server calls this before it is ready.
        """
        if not self.runner.is_warm and not self.config.scored:
            began = time.perf_counter()
            with compiling(self.describe(), progress) as report:
                self.engine.prepare(report)
            self._log_steps(began)
            self.start_seconds = time.perf_counter() - self._start

    def _log_steps(self, began: float) -> None:
        compiled, seconds = self.runner.steps.compilations.begun, time.perf_counter() - began
        log.info("%d steps ready after %.1f s, %d of them compiled", len(self.runner.steps), seconds, compiled)

    def generate(
        self,
        prompts: Prompt | ImageInput | Many[Prompt | ImageInput],
        sampling_params: SamplingParams | Many[SamplingParams] | None = None,
        progress: bool | None = None,
        adapter: str | Many[str | None] | None = None,
    ) -> list[RequestOutput]:
        """Generate completions of one or many prompts.

        Args:
            prompts: Text or token ids, or a list of them. A prompt with images is an ImagePrompt, or a dict with vLLM's
                keys: `{"prompt": text, "multi_modal_data": {"image": images}}`, where the text (or
                `prompt_token_ids`) has the model's placeholder for each image.
            sampling_params: For all prompts, or one per prompt.
            progress: Whether to show a bar; by default for more than 8 prompts.
            adapter: The name of a loaded adapter, or one name per prompt (None: the base model).

        Returns:
            One output per prompt, in order.

        Raises:
            RequestError: If a prompt or parameter is refused; then nothing is generated.
        """
        many = [self._with_images(each) for each in as_many(prompts)]
        if sampling_params is None or not isinstance(sampling_params, Many):
            sampling_params = [SamplingParams() if sampling_params is None else sampling_params] * len(many)
        adapters = self._adapters_for(adapter, len(many))
        if len(sampling_params) != len(many):
            count = f"got {len(sampling_params)} for {len(many)}"
            raise RequestError(f"expected one `sampling_params` per prompt, {count}", param="sampling_params")
        with without_collection():
            ids = self._add(many, sampling_params, adapters)
            return self._finish(ids, len(many) > 8 if progress is None else progress)

    @overload
    def chat(
        self,
        messages: Conversation,
        sampling_params: SamplingParams | None = None,
        tools: Tools = None,
        adapter: str | None = None,
        **template: Any,
    ) -> RequestOutput: ...
    @overload
    def chat(
        self,
        messages: Many[Conversation],
        sampling_params: SamplingParams | Many[SamplingParams] | None = None,
        tools: Tools = None,
        adapter: str | Many[str | None] | None = None,
        **template: Any,
    ) -> list[RequestOutput]: ...
    def chat(
        self,
        messages: Any,
        sampling_params: Any = None,
        tools: Tools = None,
        adapter: Any = None,
        **template: Any,
    ) -> Any:
        """Generate the next message of one or many conversations.

        Args:
            messages: A list of messages (dicts with role and content), or a list of such lists. A content may be a list
                of parts: `{"type": "text", "text": ...}`, `{"type": "image", "image": ...}` with a PIL image, an array,
                bytes or a path, and OpenAI's `{"type": "image_url", ...}` with a data: URL.
            sampling_params: For all conversations, or one per conversation.
            tools: Tools in OpenAI's format, for the chat template.
            adapter: See `generate`. An adapter whose folder has a chat template uses that one.
            **template: Further variables of the chat template.

        Returns:
            The output, or for a list of conversations the list of outputs.

        Raises:
            RequestError: If the messages or a parameter are refused.
        """
        one = is_conversation(messages)
        if one and isinstance(sampling_params, Many):
            raise RequestError(
                f"one conversation takes one `sampling_params`, got {len(sampling_params)}", param="sampling_params"
            )
        many = [messages] if one else messages
        adapters = self._adapters_for(adapter, len(many))
        prompts = [self.chat_prompt(*each, tools, template) for each in zip(many, adapters, strict=True)]
        outputs = self.generate(prompts, sampling_params, adapter=adapter)
        return outputs[0] if one else outputs

    def embed(self, prompts: Prompt | Many[Prompt], pooling: Pooling = "mean") -> np.ndarray:
        """Return one vector of length 1 per prompt, pooled from its final hidden states.

        Args:
            prompts: Text or token ids, or a list of them.
            pooling: "mean" over the prompt's tokens, or "last".

        Returns:
            [prompts, model dim] f32, as the server's /v1/embeddings.

        Raises:
            RequestError: If a prompt is refused.
        """
        tokens = [self.engine.intake.encode(each) for each in as_many(prompts)]
        return np.asarray(self._embedder.embed(tokens, pooling), np.float32).reshape(len(tokens), self.config.dim)

    def score(
        self,
        prompts: Prompt | Many[Prompt] | Conversation | Many[Conversation],
        tools: Tools = None,
        **template: Any,
    ) -> np.ndarray:
        """Return the score that a reward model gives each text, list of token ids or conversation at its last token.

        Args:
            prompts: Texts or token ids are used as they are, so that an end-of-text token which training added must be
                added here too. Conversations go through the chat template as in training.
            tools: Tools of the conversations.
            **template: Further variables of the chat template.

        Returns:
            [prompts] f32.

        Raises:
            RequestError: If a prompt is refused, or the model is not a reward model.
        """
        if holds_messages(prompts):
            many: Any = [prompts] if is_conversation(prompts) else prompts  # type: ignore[arg-type]
            whole = {"add_generation_prompt": False, **template}
            tokens = [self.engine.intake.encode(self.chat_prompt(each, None, tools, whole)) for each in many]
        elif tools or template:
            raise RequestError("`tools` and template variables require conversations, got texts or token ids")
        else:
            tokens = [self.engine.intake.encode(each) for each in as_many(prompts)]  # type: ignore[arg-type]
        return np.asarray(self._embedder.score(tokens), np.float32)

    def stream(
        self, prompt: Prompt | ImageInput, sampling_params: SamplingParams | None = None, adapter: str | None = None
    ) -> Iterator[OutputDelta]:
        """Yield the deltas of one prompt as its tokens come; leaving the loop early aborts the request.

        Args:
            prompt: Text, token ids, or a prompt with images (see `generate`).
            sampling_params: The sampling parameters.
            adapter: The name of a loaded adapter.

        Raises:
            RequestError: If the prompt or a parameter is refused.
        """
        one = [self._with_images(each) for each in as_many(prompt)]
        if len(one) != 1:
            raise RequestError(f"stream takes one prompt, got {len(one)}", param="prompt")
        (id,) = self._add(one, [sampling_params or SamplingParams()], [adapter])
        deltas = self._streams[id] = deque()
        try:
            while deltas or not self.engine.is_done(id):
                if not deltas:
                    self._step()
                while deltas:
                    yield deltas.popleft()
        finally:
            del self._streams[id]
            self.engine.abort(id)

    def describe(self) -> str:
        """Return a line with the size of the KV cache."""
        config = self.engine.scheduler.config
        if self.options.backend == "torch":
            return (
                f"a PyTorch module run by torchax: one sequence at a time, of at most {config.max_model_len:,} tokens"
            )
        tokens = config.num_pages * config.page_size
        many = f"{tokens / config.max_model_len:,.1f} sequences of {config.max_model_len:,}"
        return f"{config.num_pages:,} KV pages of {config.page_size} tokens, room for {many}"

    def prediction(self) -> str:
        """Return a line with the predicted decode throughput, or why it is unknown."""
        config = self.engine.scheduler.config
        return self.engine.predicted.describe(config.max_num_seqs, min(1024, config.max_model_len))

    def stats(self) -> EngineStats:
        """Return the engine's state and counters."""
        return self.engine.stats()

    # --- weights and memory -------------------------------------------------------------------------------------------

    def update_weights(self, params: Params) -> int:
        """Replace the weights by a copy of `params`, as `dt.load` returns them or as a trainer has them.

        Returns:
            The new version.
        """
        self._rest("the weights are changed")
        return self.engine.update_weights(params)

    def load_adapter(self, name: str, folder: str | Path) -> int:
        """Load a LoRA adapter from a PEFT folder, or replace the one of that name, and return its version.

        Requests in progress keep the adapter they started with.
        """
        version = self.engine.put_adapter(*self.engine.read_adapter(name, str(folder)))
        self._adapter_folders[name] = Path(folder)
        return version

    def unload_adapter(self, name: str) -> None:
        """Unload an adapter; requests in progress keep it, and its slot is free when they have ended."""
        self.engine.drop_adapter(name)

    def reset_prefix_cache(self) -> None:
        """Make all cached prefixes unfindable."""
        self.engine.reset_prefix_cache()

    def sleep(self, level: int = 1) -> None:
        """Free the device's memory until `wake_up`.

        Args:
            level: 1 frees the KV cache and moves the weights to the host. 2 also drops the weights: call
                `update_weights` before the next request.
        """
        self._rest("the engine goes to sleep")
        self.engine.sleep(level)

    def wake_up(self) -> None:
        """Allocate the memory that `sleep` freed."""
        self.engine.wake_up()

    def _rest(self, before: str) -> None:
        if self.engine.scheduler.has_work:
            raise UserError(f"a stream is open: finish or close it before {before}")
        self.engine.drain()  # a step may be in flight whose sequences have all ended

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise renamed_attribute(self, name, {"wake": "wake_up"})

    # --- requests -----------------------------------------------------------------------------------------------------

    def _step(self, prompts_first: bool = False) -> list[OutputDelta]:
        """Take a step of the engine; every open stream gets its deltas, also when `generate` takes the step."""
        with deferred_interrupt():
            deltas = self.engine.step(prompts_first, ended_only=not self._streams)
            for delta in deltas if self._streams else ():
                if delta.request_id in self._streams:
                    self._streams[delta.request_id].append(delta)
        return deltas

    def _finish(self, ids: list[str], progress: bool) -> list[RequestOutput]:
        """Take steps until these requests are done; return their outputs in order."""
        remaining, outputs = set(ids), {}
        try:
            with RequestBar(len(ids), progress, lambda: self.runner.is_compiling) as tick:
                while remaining:
                    deltas = self._step(prompts_first=True)
                    for id in {delta.request_id for delta in deltas if delta.finish_reason} & remaining:
                        if self.engine.is_done(id):
                            outputs[id] = self.engine.output(id)
                            remaining.discard(id)
                            tick()
        finally:  # an interrupt leaves no request behind
            for id in remaining:
                self.engine.abort(id)
        return [outputs[id] for id in ids]

    def _adapters_for(self, adapter: str | Many[str | None] | None, count: int) -> list[str | None]:
        adapters = [adapter] * count if adapter is None or isinstance(adapter, str) else list(adapter)
        if len(adapters) != count:
            raise RequestError(f"expected one `adapter` per prompt, got {len(adapters)} for {count}", param="adapter")
        return adapters

    def _with_images(self, prompt: Prompt | ImageInput) -> Prompt:
        return self._images.prompt(prompt) if isinstance(prompt, Mapping) else prompt

    def chat_prompt(
        self,
        messages: Conversation,
        adapter: str | None = None,
        tools: Tools = None,
        template: Mapping[str, Any] = MappingProxyType({}),
    ) -> list[int] | ImagePrompt:
        """Return the prompt of one conversation, for `stream`; `chat` lists the arguments."""
        if self.tokenizer is None:
            raise RequestError("the model has no tokenizer and so no chat template: use generate with token ids")
        folder = self._adapter_folders.get(adapter) if adapter else None
        own = read_templates(folder) if folder else None
        tokenizer = self.tokenizer.with_templates(own) if own else self.tokenizer
        if tools and "tool" not in tokenizer.chat(tools, template.get("chat_template")).source:
            raise RequestError(
                "the model's chat template does not read tools: pass a `chat_template` that does", param="tools"
            )
        try:
            if has_images(messages):
                return self._images.chat(tokenizer, messages, tools, template)
            return tokenizer.encode_chat(messages, tools, **template)
        except UserError as error:
            raise RequestError(str(error), param=error.param, code=error.code) from None

    def _add(self, prompts: Many[Prompt], params: Many[SamplingParams], adapters: Many[str | None]) -> list[str]:
        """Queue all prompts, or none if one is refused."""
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
    """Return a model's config, its weights in the engine's layout, and its tokenizer."""
    if options.load_format == "dummy":
        return _dummy(model, options, placement)
    check = functools.partial(check_model, options=options)
    path = resolve(model, progress)
    held = options.quantization or served_blocks(path, options.dtype, placement)
    loaded = load(path, options.dtype, placement, progress, check, held)
    params = publish(loaded.params, loaded.config, loaded.compute.dtype, placement, take=True)
    return loaded.config, params, loaded.tokenizer


def _read_tokenizer(model: str | Path) -> Tokenizer:
    """Return the tokenizer of a model that has one."""
    tokenizer = open_checkpoint(resolve(model))[2]
    assert tokenizer is not None
    return tokenizer


def _dummy(
    model: str | Path, options: EngineOptions, placement: Placement | None
) -> tuple[ModelConfig, Params, Tokenizer | None]:
    """Return a config with random weights, for load_format="dummy"."""
    cfg = read_config(model)
    check_model(cfg, options)
    compute = compute_of(options.dtype or ("f32" if jax.default_backend() == "cpu" else "bf16"))
    given, specs = options.quantization, spec(cfg)
    formats = rounded_formats(specs, given) if given else formats_of_config(model, specs)
    params = _random(specs, formats, options.seed or 0, compute.dtype, placement)
    return cfg, publish(params, cfg, compute.dtype, placement, take=True), None


def _random(specs: Any, formats: Formats, seed: int, dtype: Any, placement: Placement | None) -> Params:
    """Return random weights; quantised ones are made one by one, so that only one of them is there unpacked."""
    key, places = jax.random.key(seed), placement.shardings(specs) if placement else None
    if not formats:
        return init(specs, key, dtype, shardings=places)
    specs = with_formats(specs, formats)
    flat, treedef = jax.tree.flatten(specs, is_leaf=is_spec)
    made = []
    for i, leaf in enumerate(flat):
        own = init(leaf, jax.random.fold_in(key, i), dtype, shardings=param_sharding(placement, leaf))
        made.append(jax.block_until_ready(rounded(leaf, own, placement)))
    return jax.tree.unflatten(treedef, made)
