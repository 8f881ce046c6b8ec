"""EngineOptions: what an engine is told when it is built. LLM, `dovetail serve` and the engine's process take the same.

Nothing but the standard library is imported here: a command line shows these before it loads jax.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import Annotated, Any, Literal, TypedDict, get_type_hints

from dovetail.core.choice import did_you_mean, one_of, require
from dovetail.core.errors import UserError

Policy = Literal["fcfs", "priority"]
LoadFormat = Literal["auto", "dummy"]
MEMORY_FRACTION = 0.97  # of what jax may take of a device
CPU_MEMORY_FRACTION = 0.2  # of the memory that is free: the machine is often somebody's laptop
# The names that core.compute takes, repeated here because that module imports jax; a test compares the two.
DTYPES = ("bf16", "f32", "tf32", "f16", "bfloat16", "float32", "float16")


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Beside each option is its help, which the command line shows too. None: chosen by the model and the device."""

    dtype: Annotated[Any, "bf16, f32, tf32 or f16; otherwise the weights' own, on a CPU f32."] = None
    max_model_len: Annotated[int | None, "Most tokens of a prompt and its answer; otherwise the model's limit."] = None
    max_num_seqs: Annotated[int, "Most sequences in one step."] = 256
    max_num_batched_tokens: Annotated[
        int | None,
        "Most tokens in one step; otherwise 16384. On a CPU: 8192, and while streams are open as many as take 0.3 s.",
    ] = None
    memory_fraction: Annotated[
        float | None,
        "Share of what jax may take of the device's memory for weights, KV pages and steps in all (0.97), never more "
        "than is free at the start. On a CPU: share of the free memory for the KV pages alone (0.2).",
    ] = None
    kv_bytes: Annotated[int | None, "Bytes of each device for the KV pages, in place of memory_fraction."] = None
    tensor_parallel: Annotated[int, "Devices to split the model over."] = 1
    load_format: Annotated[LoadFormat, "auto; or dummy: random weights from a config.json, to measure speed."] = "auto"
    prefix_caching: Annotated[bool, "Prompts that begin alike share KV pages."] = True
    policy: Annotated[Policy, "fcfs: first come, first served; priority: requests of the lowest number first."] = "fcfs"
    multi_step: Annotated[bool, "Several decode steps per dispatch while no request waits."] = True
    page_size: Annotated[int | None, "Tokens per KV page; otherwise 16, on TPUs 128 or more."] = None
    warm_up: Annotated[bool | None, "Compile all steps at the start; otherwise everywhere but on a CPU."] = None
    adapters: Annotated[Mapping[str, str], "LoRA adapters to load: name -> folder, as PEFT writes it."] = field(
        default_factory=dict
    )
    max_adapters: Annotated[int | None, "Adapters that there is room for; otherwise those that are loaded."] = None
    max_adapter_rank: Annotated[int | None, "Their greatest rank; otherwise that of those loaded, or 16."] = None
    seed: Annotated[int | None, "Seeds the requests that bring no seed; None: differently at each start."] = 0

    def __post_init__(self):
        for name in (
            "max_num_seqs",
            "max_num_batched_tokens",
            "kv_bytes",
            "tensor_parallel",
            "page_size",
            "max_adapter_rank",
        ):
            _check_count(name, getattr(self, name), least=1)
        _check_count("max_model_len", self.max_model_len, least=2)
        _check_count("seed", self.seed, least=0)
        _check_count("max_adapters", self.max_adapters, least=0)
        object.__setattr__(self, "adapters", {name: str(folder) for name, folder in dict(self.adapters).items()})
        fraction = self.memory_fraction
        require(
            fraction is None or (isinstance(fraction, Real) and not isinstance(fraction, bool) and 0 < fraction <= 1),
            f"memory_fraction is above 0 and at most 1; got {fraction!r}",
        )
        one_of("load_format", self.load_format, ("auto", "dummy"))
        one_of("policy", self.policy, ("fcfs", "priority"))
        if isinstance(self.dtype, str):
            one_of("dtype", self.dtype, DTYPES)
        self._check_together()

    def _check_together(self) -> None:
        """Check the options that depend on each other."""
        tokens, rows = self.max_num_batched_tokens, self.max_num_seqs
        require(
            tokens is None or tokens >= rows,
            f"max_num_batched_tokens must be at least max_num_seqs, because each running sequence takes a token of a "
            f"step; got {tokens} tokens for {rows} sequences. Raise max_num_batched_tokens or lower max_num_seqs.",
        )
        room, count = self.max_adapters, len(self.adapters)
        require(
            room is None or room >= count,
            f"max_adapters must be at least the number of adapters to load; got {room} for {count} adapters",
        )
        require(all(self.adapters), "adapters: a name must not be empty")

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> EngineOptions:
        """From keywords as a user types them; an unknown one is refused with what was probably meant."""
        known = [option.name for option in fields(cls)]
        for name in given:
            hint = did_you_mean(name, known) or f" There are {', '.join(known)}."
            require(name in known, f"an engine has no option {name!r}.{hint}")
        return cls(**given)

    @classmethod
    def help(cls, name: str) -> str:
        return get_type_hints(cls, include_extras=True)[name].__metadata__[0]


class OptionKeywords(TypedDict, total=False):
    """EngineOptions' fields as keyword arguments, for editors and type checkers; a test holds the two together."""

    dtype: Any
    max_model_len: int | None
    max_num_seqs: int
    max_num_batched_tokens: int | None
    memory_fraction: float | None
    kv_bytes: int | None
    tensor_parallel: int
    load_format: LoadFormat
    prefix_caching: bool
    policy: Policy
    multi_step: bool
    page_size: int | None
    warm_up: bool | None
    adapters: Mapping[str, str]
    max_adapters: int | None
    max_adapter_rank: int | None
    seed: int | None


def _check_count(name: str, value: Any, least: int) -> None:
    is_integer = isinstance(value, Integral) and not isinstance(value, bool)
    if value is not None and not (is_integer and int(value) >= least):
        raise UserError(f"{name} is an integer of at least {least}; got {value!r}")
