"""TorchRunner: runs plans of one sequence with a PyTorch module, in place of a Runner.

The scheduler, the sampler, requests and the server are the same. There are no pages: the one running sequence has a
cache of the engine's whole length, so an engine runs one sequence at a time, and others wait.

T tokens of a step, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from dovetail.core.errors import UnsupportedError
from dovetail.core.types import Params, Weights
from dovetail.engine.device.adapters import RANK, Adapters
from dovetail.engine.device.batch import NUMBERS, Buckets, row_tokens
from dovetail.engine.device.programs import Compilations, Programs
from dovetail.engine.device.runner import LaunchedStep
from dovetail.engine.device.sampler import Sampler
from dovetail.engine.device.step import Unsampled, run_sampler
from dovetail.engine.request.params import MAX_LOGPROBS
from dovetail.engine.schedule.plan import UNKNOWN, StepPlan
from dovetail.models.serving_lora import SlotLayout
from dovetail.ops.sample import SampleInputs, logprobs

if TYPE_CHECKING:
    from dovetail.interop.torch.language_model import TorchLanguageModel
    from dovetail.interop.torch.static_cache import CacheKind

LEAST = 16  # tokens of the smallest step with a prompt


class TorchRunner:
    """Run plans of one row with a torch module and one static cache.

    Args:
        model: The model.
        max_len: The most tokens of a sequence.
        max_tokens: The most tokens of a step, a power of two.
        page_size: The unit in which the scheduler counts tokens.
    """

    is_warm, is_compiling = True, False  # a step compiles its program when it is first launched
    draft = features = followed = platform = placement = None  # what a Runner may have and this one has not

    def __init__(self, model: TorchLanguageModel, max_len: int, max_tokens: int, page_size: int):
        self.cfg, self.compute, self._steps = model.config, model.compute, model.steps
        self.weights, self._max_tokens = Weights(model.params), max_tokens
        self.buckets = Buckets(1, max_tokens, -(-max_len // page_size))
        self.programs = Programs(self.cfg, self.compute, self.buckets, page_size)
        self.adapters = Adapters(SlotLayout(self.cfg, 0, RANK), self.compute.dtype)
        self.steps = _Sizes()
        # A step is padded to a power of two: with whole chunks of tokens it ends within the cache.
        self._length = -(-max_len // max_tokens) * max_tokens
        self.kind: CacheKind = self._steps.choose(self.params, min(LEAST, max_tokens), self._length)
        self._allocate()

    @property
    def params(self) -> Params:
        """Return the weights by name."""
        return self.weights.params

    def _allocate(self) -> None:
        self.cache = self._steps.new_cache(self.params, self._length, self.kind)
        self.last = jnp.zeros(2, jnp.int32)  # the last token of the sequence, and padding's

    def renew(self) -> None:
        """Allocate the cache again if a step that failed has consumed it."""
        if any(array.is_deleted() for array in jax.tree.leaves((self.cache, self.last))):
            self._allocate()

    def launch(self, plan: StepPlan, sampler: Sampler, keeps_hidden: bool = False, waits: bool = True) -> LaunchedStep:
        """Launch a plan of one row; with `keeps_hidden`, its logits [T, V] take the place of hidden states."""
        (row,) = plan.rows
        size = 1 if row.count == 1 else min(self._max_tokens, max(LEAST, 1 << (row.count - 1).bit_length()))
        waited, began = size not in self.steps, time.perf_counter()
        known = row_tokens(row)
        tokens: Any = np.zeros((1, size), np.int32)
        tokens[0, : row.count] = known
        if known == [UNKNOWN]:
            tokens = self.last[None, :1]
        logits, self.cache = self._steps.run_step(self.params, self.cache, tokens, np.int32(row.start), kind=self.kind)
        inputs = sampler.inputs(plan, 1)
        slots: Any = np.array([not row.samples], np.int32)
        left = Unsampled(_at(logits, np.int32(row.count - 1)), slots, _numbers(inputs))
        asked = dict(bias_ids=inputs.bias_ids, bias=inputs.bias, mask=inputs.mask)
        out, (self.last, sampler.history) = run_sampler(self.last, sampler.history, left, asked)
        self.steps.add(size, time.perf_counter() - began)
        hidden = logits[0] if keeps_hidden else None
        return LaunchedStep(plan, out.tokens, out.logprobs, hidden, self.weights.version, size, waited)

    def propose(self, plan: StepPlan, sampler: Sampler) -> None:
        """Do nothing: there is no draft model."""

    def score(self, hidden: jax.Array, targets: np.ndarray) -> tuple[jax.Array, ...]:
        """Return the log-probabilities (see ops.sample.logprobs) of targets [n] from logits [n, V]."""
        return _score(hidden, targets)

    def hidden_states(self, params: Params, tokens: jax.Array, count: jax.Array, adapter: jax.Array) -> jax.Array:
        """Return the final hidden states [1, T, D] of tokens [1, T]."""
        return self._steps.hidden(params, tokens)

    def warm_up(self, sampler: Sampler, progress: Callable[[str, int, int], None] | None = None) -> None:
        """Compile nothing more: choosing the cache has compiled a decode step and the smallest step with a prompt."""

    def load_kept(self) -> None:
        """Load nothing: programs are in jax's own cache of compilations."""

    def read(self, path: str) -> NoReturn:
        """Refuse new weights."""
        raise UnsupportedError('`backend="torch"` cannot replace weights: start the engine again', param="path")

    published = read


class _Sizes(set):
    """Hold the sizes of the steps that have run, and the time of each one's first launch."""

    def __init__(self):
        super().__init__()
        self.compilations = Compilations()

    def add(self, size: int, seconds: float = 0.0) -> None:
        """Count a step of this size."""
        if size not in self:
            super().add(size)
            self.compilations.begin()
            self.compilations.end(seconds)


def _numbers(inputs: SampleInputs) -> Any:
    return np.stack([np.asarray(getattr(inputs, name)).view(np.int32) for name in NUMBERS])


@jax.jit
def _at(logits: jax.Array, at: jax.Array) -> jax.Array:
    return logits[:, at].astype(jnp.float32)


@jax.jit
def _score(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, ...]:
    return logprobs(logits, targets, MAX_LOGPROBS)
