"""PyTorch beside jax (extra `torch`): unmodified modules as functions of jax, by torchax; our models in torch.

    from dovetail.interop.torch import as_module, from_module, train_step
    params, apply = from_module(module)
    jax.jit(apply)(params, tokens)

docs/torch.md has the whole of it.
"""

from typing import TYPE_CHECKING, Any

from dovetail.interop.torch.environment import implement
from dovetail.interop.torch.function import ModuleFunction, from_module
from dovetail.interop.torch.parity import ParityReport, parity
from dovetail.interop.torch.train_step import TorchState, TorchStep, train_step

if TYPE_CHECKING:
    from dovetail.interop.torch.jax_module import JaxModule, as_module

__all__ = [
    "JaxModule", "ModuleFunction", "ParityReport", "TorchState", "TorchStep", "as_module", "from_module", "implement",
    "parity", "train_step",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in ("JaxModule", "as_module"):  # their file imports torch
        from dovetail.interop.torch import jax_module

        return getattr(jax_module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
