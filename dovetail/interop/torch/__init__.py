"""Unmodified PyTorch modules as functions of jax, by way of torchax (extra `torch`).

    from dovetail.interop.torch import from_module
    params, apply = from_module(module)
    jax.jit(apply)(params, tokens)

docs/torch.md has the whole of it.
"""

from dovetail.interop.torch.environment import implement
from dovetail.interop.torch.function import ModuleFunction, from_module
from dovetail.interop.torch.parity import ParityReport, parity

__all__ = ["ModuleFunction", "ParityReport", "from_module", "implement", "parity"]
