"""EngineOptions: the only declaration of an engine's options.

`dt.LLM(...)`, `dovetail serve`, `chat`, `eval`, `bench throughput` and `compile serve` are generated from its fields,
and the `engine:` section of an RL recipe checks its keys against them. Names are vLLM's where the meaning is the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, get_args

from dovetail.core.errors import UserError
from dovetail.core.option import check_name, check_options, option, options_of
from dovetail.engine.spec.config import SpeculativeConfig

SchedulingPolicy = Literal["fcfs", "priority"]
LoadFormat = Literal["auto", "dummy"]
Backend = Literal["jax", "torch"]
# The names that core.compute takes, repeated here because that module imports jax; a test compares the two.
DTYPES = ("bf16", "f32", "tf32", "f16", "bfloat16", "float32", "float16")
# The names of core.formats.ROUNDED, likewise, and what keeps or unpacks the weights of a file.
QUANTIZATIONS = ("int8", "w8a8", "fp8", "fp8_block", "int4", "int4_asym", "nf4", "mxfp4", "gguf", "gguf_int8", "none")


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Configure an engine. An option that is None is chosen by the model and the device.

    Raises:
        UserError: An option is out of its range or contradicts another one; `param` names it.
    """

    # Earlier names of the options and other engines' names for them. Each is refused with the present name.
    RENAMED: ClassVar[Mapping[str, str]] = {
        "memory_fraction": "gpu_memory_utilization", "kv_bytes": "kv_cache_memory_bytes",
        "kv_gib": "kv_cache_memory_bytes", "tensor_parallel": "tensor_parallel_size",
        "prefix_caching": "enable_prefix_caching", "policy": "scheduling_policy", "multi_step": "max_decode_steps",
        "page_size": "block_size", "adapters": "lora_modules", "adapter": "lora_modules",
        "max_adapters": "max_loras", "max_adapter_rank": "max_lora_rank",
        "tp": "tensor_parallel_size", "tp_size": "tensor_parallel_size", "lora_paths": "lora_modules",
        "mem_fraction_static": "gpu_memory_utilization", "context_length": "max_model_len",
        "max_running_requests": "max_num_seqs", "schedule_policy": "scheduling_policy",
        "num_scheduler_steps": "max_decode_steps",
    }  # fmt: skip

    dtype: Any = option(
        None, "Compute type: bf16, f32, tf32 or f16. Default: the type of the weights; on a CPU f32.",
        choices=DTYPES, metavar="TYPE",
    )  # fmt: skip
    quantization: str | None = option(
        None,
        "How weights are held: int8, w8a8, fp8, fp8_block, int4, int4_asym, nf4 or mxfp4 rounds the projections of "
        "layers, gguf keeps the blocks of a .gguf file (gguf_int8: and rounds activations on a CPU), none unpacks "
        "(docs/quantisation.md). Default: a quantised folder is kept as it is; gguf_int8 for a .gguf file on a CPU.",
        choices=QUANTIZATIONS, metavar="SCHEME",
    )  # fmt: skip
    kv_cache_dtype: str = option(
        "auto",
        "How keys and values are held: auto is the compute type; fp8 (or fp8_e4m3) is e4m3 without a scale, int8 has a "
        "scale per token and head. Layers with a sliding window keep the compute type.",
        choices=("auto", "fp8", "fp8_e4m3", "int8"), metavar="TYPE",
    )  # fmt: skip
    max_model_len: int | None = option(
        None, "Maximum length of prompt and output together, in tokens. Default: the model's limit.", least=2
    )
    max_num_seqs: int = option(256, "Maximum number of sequences per step.", least=1)
    max_num_batched_tokens: int | None = option(
        None,
        "Maximum number of tokens per step. Default: 16384. On a CPU: 8192, and fewer while responses are streamed, so "
        "that a step takes at most about 0.3 s.",
        least=1, defaults={"": 16384, "cpu": 8192},
    )  # fmt: skip
    gpu_memory_utilization: float | None = option(
        None,
        "Fraction of the device memory given to jax that weights, KV cache and steps may use together. Default: 0.97. "
        "On a CPU: fraction of the free memory for the KV cache alone; default 0.2.",
        least=0, most=1, above=True, defaults={"": 0.97, "cpu": 0.2},
    )  # fmt: skip
    kv_cache_memory_bytes: int | None = option(
        None, "Bytes of KV cache per device, in place of gpu_memory_utilization.", least=1
    )
    tensor_parallel_size: int = option(1, "Number of devices to split the model over.", least=1)
    load_format: LoadFormat = option(
        "auto", "auto: read the weights. dummy: random weights from a config.json, to measure speed.",
        choices=get_args(LoadFormat), metavar="auto|dummy",
    )  # fmt: skip
    backend: Backend = option(
        "jax", "torch: run a model that Dovetail does not implement as a PyTorch module, one sequence at a time.",
        choices=get_args(Backend), metavar="jax|torch",
    )  # fmt: skip
    enable_prefix_caching: bool = option(True, "Reuse the KV pages of prompts that start with the same tokens.")
    scheduling_policy: SchedulingPolicy = option(
        "fcfs", "fcfs: first come, first served. priority: lowest priority number first.",
        choices=get_args(SchedulingPolicy), metavar="fcfs|priority",
    )  # fmt: skip
    max_decode_steps: int | None = option(
        None, "Maximum number of decode steps per dispatch while no request waits. Default: as many as fit into 20 ms.",
        least=1,
    )  # fmt: skip
    block_size: int | None = option(
        None, "Tokens per KV page. Default: 16; on a TPU 128 or more.", least=1, defaults={"": 16, "tpu": 128}
    )
    warm_up: bool | None = option(None, "Compile every step at the start. Default: yes, except on a CPU.")
    lora_modules: Mapping[str, str] = option(
        dict, "LoRA adapters to load, as saved by PEFT; requests name one as their model.", metavar="NAME=PATH"
    )
    max_loras: int | None = option(
        None, "Number of adapters to reserve memory for. Default: as many as lora_modules has.", least=0
    )
    max_lora_rank: int | None = option(
        None, "Maximum rank of an adapter. Default: the largest rank of lora_modules, or 16.", least=1
    )
    speculative_config: Any = option(
        None, "Draft tokens that a step verifies: a JSON object with vLLM's keys (docs/speculation.md).", metavar="JSON"
    )
    seed: int | None = option(0, "Seed of requests without a seed. None: a new one at every start.", least=0)

    def __post_init__(self):
        modules = {name: str(folder) for name, folder in dict(self.lora_modules).items()}
        object.__setattr__(self, "lora_modules", modules)
        object.__setattr__(self, "speculative_config", SpeculativeConfig.of(self.speculative_config))
        check_options(self)
        self._check_together()

    def _check_together(self) -> None:
        tokens, rows = self.max_num_batched_tokens, self.max_num_seqs
        if tokens is not None and tokens < rows:
            raise UserError(
                f"`max_num_batched_tokens` must be at least max_num_seqs, because every running sequence takes one "
                f"token of a step, got {tokens} tokens for {rows} sequences: raise max_num_batched_tokens or lower "
                "max_num_seqs",
                param="max_num_batched_tokens",
            )
        count = len(self.lora_modules)
        if self.max_loras is not None and self.max_loras < count:
            raise UserError(
                f"`max_loras` must be at least the number of lora_modules, got {self.max_loras} for {count} adapters",
                param="max_loras",
            )
        if self.backend == "torch":
            self._check_torch()
        if not all(self.lora_modules):
            raise UserError("`lora_modules` must not have an empty name", param="lora_modules")

    def _check_torch(self) -> None:
        """Refuse what the torch backend cannot do."""
        without = {
            "tensor_parallel_size": self.tensor_parallel_size > 1, "load_format": self.is_dummy,
            "lora_modules": bool(self.lora_modules), "max_loras": bool(self.max_loras),
            "speculative_config": self.speculative_config is not None, "kv_cache_dtype": self.kv_cache_dtype != "auto",
        }  # fmt: skip
        unread = (
            "quantization",
            "max_lora_rank",
            "gpu_memory_utilization",
            "kv_cache_memory_bytes",
            "max_decode_steps",
        )
        for name, given in (without | {name: getattr(self, name) is not None for name in unread}).items():
            if given:
                raise UserError(f'`{name}` cannot be used with `backend="torch"`', param=name)

    @property
    def is_dummy(self) -> bool:
        """Return whether weights are random."""
        return self.load_format == "dummy"

    def with_own_draft(self, model: str) -> EngineOptions:
        """Return the options with the served model as the draft model of method mtp, if they name none."""
        config = self.speculative_config
        if config is None or config.model or not config.has_weights:
            return self
        return replace(self, speculative_config=replace(config, model=model))

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> EngineOptions:
        """Return the options from keywords; refuse an unknown name with the one that was probably meant."""
        known = options_of(cls)
        for name in given:
            check_name(name, known, cls.RENAMED, "the engine")
        return cls(**given)


def platform_default(name: str, platform: str) -> Any:
    """Return the value that an engine option left at None has on `platform`."""
    found = options_of(EngineOptions)[name].defaults
    return found.get(platform, found[""])
