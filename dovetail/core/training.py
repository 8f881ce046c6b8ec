"""Settings of a training recipe. Each class refuses values that it cannot honour.

`Training` has what every kind of training needs. Each kind inherits it and adds its own keys, as
`train.settings.Pretrain` adds its data and its loss, so that a recipe's keys stay flat (`optimizer.lr`, `data.seed`).

A 0 (or an empty string, or None) means "derive it": `plan.derive` does so from the model and the hardware, and prints
how. Read from YAML by `core.recipe`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from dovetail.core.choice import not_negative, one_of, require
from dovetail.core.recipe import Count

OPTIMIZERS = ("adamw", "muon", "adafactor")
LOGGERS = ("tensorboard", "wandb")
SCHEDULES = ("cosine", "wsd", "linear", "constant")
# Keys that only some optimizers or schedules read: (which ones, the defaults that recipes start from).
OPTIMIZER_KEYS: Mapping[str, tuple[tuple[str, ...], tuple[float, ...]]] = {
    "beta1": (("adamw", "muon"), (0.9,)),
    "beta2": (("adamw", "muon"), (0.95, 0.999)),  # pretraining's and fine-tuning's
    "eps": (("adamw", "muon"), (1e-8,)),
    "momentum": (("muon",), (0.95,)),
}
SCHEDULE_KEYS: Mapping[str, tuple[tuple[str, ...], tuple[float, ...]]] = {
    "decay": (("wsd",), (0.2,)),
    "final": (("cosine", "linear", "wsd"), (0.1,)),
}
REMATS = ("none", "dots", "attention", "full")  # from the most memory to the most recomputation


def _refuse_unread(settings: Any, keys: Mapping[str, tuple[tuple[str, ...], tuple[float, ...]]]) -> None:
    """Refuse a key that the chosen optimizer or schedule does not read, if it differs from its default."""
    for key, (readers, defaults) in keys.items():
        value = getattr(settings, key)
        require(
            settings.name in readers or value in defaults,
            f"{key} is read by {' and '.join(readers)} only, got {value} with {settings.name}: leave it at "
            f"{defaults[0]}",
            param=key,
        )


@dataclass(frozen=True)
class Optimizer:
    """Configure the optimizer."""

    name: str = "adamw"  # adamw, muon or adafactor
    lr: float = 3e-4  # the learning rate after the warmup
    beta1: float = 0.9  # Adam's decay of the mean of gradients
    beta2: float = 0.95  # Adam's decay of the mean of squared gradients
    eps: float = 1e-8  # Adam's term against division by 0
    weight_decay: float = 0.1  # decoupled weight decay, multiplied by the learning rate
    max_grad_norm: float = 1.0  # clip gradients to this global norm; 0: do not clip
    momentum: float = 0.95  # Muon's momentum, for the weights that are matrices

    def __post_init__(self) -> None:
        one_of("name", self.name, OPTIMIZERS)
        require(0 < self.lr < math.inf, f"lr must be above 0, such as 3e-4; got {self.lr}", param="lr")
        for name in ("beta1", "beta2", "momentum"):
            value = getattr(self, name)
            require(0 <= value < 1, f"{name} must be at least 0 and below 1; got {value}", param=name)
        require(self.eps > 0, f"eps must be above 0, such as 1e-8; got {self.eps}", param="eps")
        not_negative(self, "weight_decay", "max_grad_norm")
        _refuse_unread(self, OPTIMIZER_KEYS)


@dataclass(frozen=True)
class Schedule:
    """Configure the learning rate over the run: warmup, then the named curve down to `final` of it."""

    name: str = "cosine"  # how the rate falls after the warmup: cosine, wsd, linear or constant
    warmup: int = 0  # steps over which the learning rate rises to lr
    decay: float = 0.2  # wsd: the last share of the run, in which the rate falls
    final: float = 0.1  # the share of lr that is left at the end

    def __post_init__(self) -> None:
        one_of("name", self.name, SCHEDULES)
        not_negative(self, "warmup")
        require(
            0 < self.decay < 1, f"decay must be a share of the run between 0 and 1; got {self.decay}", param="decay"
        )
        require(0 <= self.final <= 1, f"final must be a share of lr from 0 to 1; got {self.final}", param="final")
        _refuse_unread(self, SCHEDULE_KEYS)


@dataclass(frozen=True)
class Precision:
    """Configure the types of computation, weights and logits."""

    compute: str = "bf16"  # what is computed in: bf16, f32, or tf32 (f32 with a GPU's TF32 products)
    params: str = "f32"  # what trained weights are held in: f32, or bf16 with stochastic rounding
    logits: str = ""  # what the loss's logits are held in: bf16 or f32; default: as compute

    def __post_init__(self) -> None:
        one_of("compute", self.compute, ("bf16", "f32", "tf32"))
        one_of("logits", self.logits, ("", "bf16", "f32"))
        one_of("params", self.params, ("f32", "bf16"))


@dataclass(frozen=True)
class Health:
    """Configure the detection of bad steps, hangs and lost processes."""

    spike: float = 10.0  # a gradient norm above this multiple of its running geometric mean is a spike
    warmup: int = 20  # steps before spikes are judged
    replays: int = 1  # times that a bad step is repeated on its batch, to tell bad data from bad hardware
    max_skips: int = 10  # batches left out before the run stops
    max_rollbacks: int = 2  # times that the run goes back to a checkpoint before it stops
    hang_seconds: float = 1800.0  # write every thread's stack after so long without a step; 0: never
    lost_seconds: float = 20.0  # end all processes after so long without a sign of life from one

    def __post_init__(self) -> None:
        require(
            self.lost_seconds >= 2, f"lost_seconds must be at least 2; got {self.lost_seconds}", param="lost_seconds"
        )
        require(self.spike > 1, f"spike must be a multiple above 1, such as 10; got {self.spike}", param="spike")
        not_negative(self, "warmup", "replays", "max_skips", "max_rollbacks", "hang_seconds")


@dataclass(frozen=True)
class Checkpoint:
    """Configure checkpoints and exports."""

    every: int = 500  # steps between checkpoints; 0: none by steps
    minutes: float = 0.0  # minutes between checkpoints; 0: none by the clock
    keep: int = 3  # how many of the newest checkpoints to keep
    keep_every: int = 0  # also keep every checkpoint whose step is a multiple of this; 0: none
    durable: str = ""  # a second folder or bucket, slower and safer
    durable_every: int = 0  # steps between copies into the durable folder
    export_hf: int = 0  # steps between exports to a Hugging Face folder; 0: none
    allow_changed_inputs: bool = False  # resume although the data or the rewards changed behind the same names

    def __post_init__(self) -> None:
        not_negative(self, "every", "minutes", "keep_every", "durable_every", "export_hf")
        require(
            self.keep >= 1,
            f"keep must be at least 1: a run that keeps no checkpoint cannot resume; got {self.keep}",
            param="keep",
        )
        require(
            bool(self.durable) == bool(self.durable_every),
            "durable_every and durable must be set together: a folder or bucket, and the steps between two copies into "
            f"it; got durable={self.durable!r}, durable_every={self.durable_every}",
            param="durable_every",
        )


@dataclass(frozen=True)
class Eval:
    """Configure measurements on held-out data, and a command on exported weights."""

    every: int = 0  # steps between measurements of the held-out loss; 0: none
    batches: int = 8  # held-out batches of one measurement
    command: str = ""  # a command to run beside the training on the exported folder
    command_every: int = 0  # steps between runs of the command

    def __post_init__(self) -> None:
        not_negative(self, "every", "command_every")
        require(
            self.batches >= 1,
            f"batches must be at least 1; got {self.batches} (every=0 measures nothing)",
            param="batches",
        )
        require(
            bool(self.command) == bool(self.command_every),
            "command_every and command must be set together: the command, and the steps between two runs of it; "
            f"got command={self.command!r}, command_every={self.command_every}",
            param="command_every",
        )


@dataclass(frozen=True)
class Mesh:
    """Set the devices along each axis; their product, without slices, is the number of devices. 0 means derived."""

    data: int = 0  # devices with a copy of the weights, for other rows; 0: derived
    fsdp: int = 0  # devices that share one copy of the weights; 0: derived
    expert: int = 1  # devices that share the experts; 0: derived
    tensor: int = 1  # devices that split each projection; 0: derived
    context: int = 1  # devices that split each row; 0: derived
    slices: int = 1  # groups of devices joined by a slower network; each holds an equal part of `data`

    def __post_init__(self) -> None:
        not_negative(self, "data", "fsdp", "expert", "tensor", "context")
        require(self.slices >= 1, f"slices must be at least 1 (it is not derived); got {self.slices}", param="slices")
        require(
            self.data % self.slices == 0,
            f"data must be a multiple of the {self.slices} slices, because only data crosses slices; got {self.data}",
            param="data",
        )


DERIVED = Mesh(expert=0, tensor=0, context=0)  # all of it


@dataclass(frozen=True)
class TorchModel:
    """Name a function that returns a torch module, in place of a model that Dovetail implements."""

    torch: str  # where the function is: package.module:name or file.py:name
    args: Mapping[str, Any] = field(default_factory=dict)  # its keyword arguments
    tokenizer: str = ""  # a folder, a name or a hub id whose tokenizer the module was made for

    def __post_init__(self) -> None:
        module, _, name = self.torch.rpartition(":")
        require(
            bool(module and name),
            f"torch must be package.module:name or file.py:name, got {self.torch!r}",
            param="torch",
        )

    def __str__(self) -> str:
        return self.torch.rpartition(":")[2]


@dataclass(frozen=True)
class StepModels:
    """List which weights a training step trains and which it only reads."""

    # the trained adapters (models.lora.Lora) or the trained draft model; None: the model's weights are trained
    adapter: Any = None
    # models that are read only: (a ModelConfig, or None for the trained model's; its format of models.frozen.HELD)
    frozen: tuple[tuple[Any, str], ...] = ()
    # settings of a reference in the training state, a copy of the initial weights that may be synchronised; None: none
    reference: Any = None
    mtp: bool = False  # whether layers of multi-token prediction are trained
    images: tuple[int, int] = (0, 0)  # items of images in a row, which the step encodes, and patches of an item


@dataclass(frozen=True, kw_only=True)
class Training:
    """Hold the settings that every kind of training has."""

    ALTERNATIVES: ClassVar = (("steps", "tokens"),)  # an override of one removes the other of the recipe
    exports_at_end: ClassVar[bool] = False  # whether a finished run exports its weights even without export_hf
    scores: ClassVar[bool] = False  # whether the model is trained to score texts instead of predicting tokens
    starts_from_model: ClassVar[bool] = False  # whether training starts from the model's weights if init is empty
    takes_torch: ClassVar[bool] = False  # whether the model may be a torch module

    # a folder, a .gguf file, a catalogue name, a hub id, a shipped architecture, or {torch: package.module:function}
    model: str | TorchModel
    batch: int  # rows of one step over all devices
    length: int  # tokens of one row
    steps: Count = 0  # how long to train
    tokens: Count = 0  # in place of steps: 10B, 300M
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    precision: Precision = Precision()
    health: Health = Health()
    checkpoint: Checkpoint = Checkpoint()
    eval: Eval = Eval()
    mesh: Mesh = Mesh()
    remat: str = ""  # what is recomputed in the backward pass: none, dots, attention or full; default: derived
    scan: bool | None = None  # compile equal layers as a loop: compile time stays flat in depth; default: derived
    accumulate: int = 0  # microsteps per step; 0: derived
    per_device: int = 0  # rows of one microstep on one device; 0: derived
    ema: float = 0.0  # decay of an average of the weights, such as 0.999; 0: none is kept
    seed: int = 0  # seed of new weights and of dropout
    log_every: int = 1  # steps between lines of metrics
    report_to: tuple[str, ...] = ("tensorboard",)  # where numbers go besides metrics.jsonl: tensorboard, wandb
    profile: str = ""  # steps to trace: 10:13 traces steps 10, 11 and 12
    init: str = ""  # weights to start from, if they are not the model's: a folder, a name or a hub id

    def __post_init__(self) -> None:
        require(bool(self.model), "model must name a model or a config.json; it is empty", param="model")
        if isinstance(self.model, TorchModel):
            self._check_torch()
        self._check_rows()
        self._check_duration()
        if self.remat:
            one_of("remat", self.remat, REMATS)
        not_negative(self, "accumulate", "per_device", "seed")
        require(
            self.accumulate == 0 or self.batch % self.accumulate == 0,
            f"accumulate must divide batch, so that microsteps are equal; got {self.accumulate} and {self.batch} rows",
            param="accumulate",
        )
        require(
            0 <= self.ema < 1, f"ema must be a decay below 1, such as 0.999, or 0 for none; got {self.ema}", param="ema"
        )
        require(self.log_every >= 1, f"log_every must be at least 1 step; got {self.log_every}", param="log_every")
        for name in self.report_to:
            one_of("report_to", name, LOGGERS)
        profile_window(self.profile)

    def _check_torch(self) -> None:
        """Refuse keys that require a model whose layers are known."""
        require(
            self.takes_torch,
            "model must be a name or a folder: torch modules are trained by pretrain and sft only",
            param="model",
        )
        mesh = self.mesh
        unread = {
            "remat": self.remat not in ("", "none"), "scan": bool(self.scan), "init": bool(self.init),
            **{f"mesh.{name}": getattr(mesh, name) > 1 for name in ("expert", "tensor", "context")},
        }  # fmt: skip
        for key, is_set in unread.items():
            require(not is_set, f"{key} must not be set for a torch module: leave it out", param=key)

    def _check_rows(self) -> None:
        require(self.batch >= 1, f"batch must be at least 1 row; got {self.batch}", param="batch")
        require(self.length >= 2, f"length must be at least 2 tokens; got {self.length}", param="length")

    def _check_duration(self) -> None:
        names = self.ALTERNATIVES[0]
        not_negative(self, *names)
        given = [f"{name}={getattr(self, name):,}" for name in names]
        require(
            sum(bool(getattr(self, name)) for name in names) == 1,
            f"{_listed(names, 'or')} must say how long to train, and not {'both' if len(names) == 2 else 'several'}; "
            f"got {_listed(given, 'and')}",
            param=names[0],
        )
        warmup = self.schedule.warmup
        require(
            warmup <= self.total_steps or not self.total_steps,
            f"schedule.warmup must end within the run, which has {self.total_steps:,} steps; it is {warmup:,}: "
            f"lower it, as with schedule.warmup={self.total_steps // 10}, or train longer",
            param="schedule.warmup",
        )

    @property
    def tokens_per_step(self) -> int:
        """Return the tokens of one step over all devices."""
        return self.batch * self.length

    @property
    def total_steps(self) -> int:
        """Return the steps of the run, with `tokens` rounded up; 0 if they depend on the data (epochs)."""
        return self.steps or -(-self.tokens // self.tokens_per_step)

    @property
    def weights(self) -> str:
        """Return the folder of the initial weights; empty for random ones and for those of a torch module."""
        return self.init or (self.model if self.starts_from_model and isinstance(self.model, str) else "")

    @property
    def tokenizer_place(self) -> str:
        """Return where the model's own tokenizer is: with the model, or where the recipe says for a torch module."""
        return self.model if isinstance(self.model, str) else self.model.tokenizer

    # --- overridden by kinds of training ------------------------------------------------------------------------------

    @property
    def effective(self) -> Self:
        """Return the settings with the values that another key decides (`loss.*` by `algo`) filled in."""
        return self

    @property
    def step_models(self) -> StepModels:
        """Return which models a step holds besides the trained weights."""
        return StepModels()


def profile_window(profile: str) -> tuple[int, int] | None:
    """Return (first, one past the last) step to trace from a text such as `10:13`; None for an empty one."""
    if not profile:
        return None
    first, colon, end = profile.partition(":")
    require(
        bool(colon) and first.isdecimal() and end.isdecimal() and int(first) < int(end),
        f"profile must be two steps, first:end with first < end, such as 10:13; got {profile!r}",
        param="profile",
    )
    return int(first), int(end)


def _listed(words: Sequence[str], last: str) -> str:
    return f"{', '.join(words[:-1])} {last} {words[-1]}"
