"""`from_module`: a torch module as a pure function over a dict of its parameters."""

from __future__ import annotations

import contextlib
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import jax

from dovetail.interop.torch.environment import environment
from dovetail.interop.torch.failure import explained
from dovetail.interop.torch.tree import register_hugging_face, to_jax, to_torch

if TYPE_CHECKING:
    import torch

Arrays = dict[str, jax.Array]
_TRACING = threading.RLock()  # a call puts arrays in the place of the module's own tensors, for every thread


def from_module(module: torch.nn.Module) -> tuple[Arrays, ModuleFunction]:
    """Return a module's trainable parameters, and the module as a pure function of them.

    `params` is a dict of jax arrays under the names of `module.state_dict()`. Weights that are tied appear once, under
    the first of their names. Parameters that require no gradient, buffers, and tensors kept as plain attributes are
    constants of the function, in `apply.buffers`.

    `apply(params, *args, rng=None, **kwargs)` calls `module.forward` and can be jitted, differentiated, vmapped and
    sharded. Arguments and results are jax arrays, in the same containers (tuples, dicts, Hugging Face outputs and
    caches). Without `rng` the module is in eval mode; with a key it is in train mode and dropout draws from that key.

    Args:
        module: Any module whose tensors are on the CPU. It is not changed, and must not be changed while in use.

    Raises:
        UnsupportedError: A call uses an operator that torchax lacks; raised by `apply`, naming operator and module.
    """
    apply = ModuleFunction(module)
    return apply.arrays(trainable=True), apply


class ModuleFunction:
    """Call a torch module with given parameters, without side effects.

    Attributes:
        module: The torch module; its own tensors are only read, by `from_module`.
        buffers: The constants of the function, by name: buffers, frozen parameters, tensor attributes.
    """

    def __init__(self, module: torch.nn.Module):
        environment()
        register_hugging_face()
        self.module = module
        self.buffers = self.arrays(trainable=False)

    def __call__(self, params: Arrays, *args: Any, rng: jax.Array | None = None, **kwargs: Any) -> Any:
        """Return what `module.forward` returns, with jax arrays in place of tensors.

        Args:
            params: As from `from_module`; a subset, or names of `buffers`, may be given too.
            args: Arguments of the module.
            rng: A key: the module is in train mode and draws from it. None: eval mode.
            kwargs: Arguments of the module by name.
        """
        return self.with_buffers(params, self.buffers, *args, rng=rng, **kwargs)[0]

    def with_buffers(
        self, params: Arrays, buffers: Arrays, *args: Any, rng: jax.Array | None = None, method: str = "", **kwargs: Any
    ) -> tuple[Any, Arrays]:
        """Return the module's result and its buffers afterwards, such as the running statistics of a batch norm.

        Args:
            params: As in a plain call.
            buffers: Used in place of `self.buffers`.
            args: As in a plain call.
            rng: As in a plain call.
            method: The method of the module to call; empty for the module itself.
            kwargs: As in a plain call.
        """
        from torch.nn.utils import stateless

        state = to_torch({**buffers, **params})
        args, kwargs = to_torch((args, kwargs))
        function = getattr(self.module, method) if method else self.module
        packed = len(args) > 2 or "position_ids" in kwargs
        with _TRACING, _running(self.module, rng), explained(self.module), _causal(packed):
            with stateless._reparametrize_module(self.module, state, tie_weights=True):
                result = function(*args, **kwargs)
            # An assignment to a buffer in `forward` is in `state`, too: leaving the block above puts it there.
            return to_jax(result), to_jax({name: state[name] for name in buffers})

    def arrays(self, *, trainable: bool) -> Arrays:
        """Return copies of the module's own tensors: the trainable parameters, or everything else."""
        env = environment()
        return {
            name: env.t2j_copy(tensor.detach())
            for name, tensor in _tensors(self.module)
            if _is_trainable(tensor) == trainable
        }


def _tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of a module once, with its name: parameters, buffers, then tensors kept as attributes."""
    import torch

    yield from module.named_parameters()
    yield from module.named_buffers()
    for path, child in module.named_modules():
        for name, value in vars(child).items():
            if isinstance(value, torch.Tensor):
                yield f"{path}.{name}" if path else name, value


@contextlib.contextmanager
def _causal(packed: bool) -> Iterator[None]:
    """Let transformers attend causally without a mask, unless the caller gives positions, which may be of packed rows.

    Under jit it cannot look at positions that a model counts itself, and would make a mask as for packed rows: flash
    attention takes none.
    """
    masking: Any = sys.modules.get("transformers.masking_utils")
    if packed or not hasattr(masking, "find_packed_sequence_indices"):
        yield
        return
    own = masking.find_packed_sequence_indices
    masking.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking.find_packed_sequence_indices = own


def _is_trainable(tensor: torch.Tensor) -> bool:
    import torch

    return isinstance(tensor, torch.nn.Parameter) and tensor.requires_grad


@contextlib.contextmanager
def _running(module: torch.nn.Module, rng: jax.Array | None) -> Iterator[None]:
    """Set up a call: torchax's environment, its random key, the module's mode; undo all of it afterwards."""
    import torch

    env = environment()
    modes = {child: child.training for child in module.modules()}
    key = jax.random.key(0) if rng is None else rng
    try:
        module.train(rng is not None)
        with warnings.catch_warnings(), torch.no_grad(), env.override_property(prng=key), env, torch.device("jax"):
            # torch's integers are int64, and jax says at each that it is made an int32.
            warnings.filterwarnings("ignore", message="Explicitly requested dtype")
            yield
    finally:
        for child, mode in modes.items():
            child.training = mode
