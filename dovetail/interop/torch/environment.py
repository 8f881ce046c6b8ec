"""Load torchax and give its environment, or say which versions work together.

torchax runs torch operators as jax operators: a tensor on its device holds a jax array, and inside its environment each
operator of torch is dispatched to a function of jax. It takes torch's one free device slot (PrivateUse1), which
`torch_tpu` takes as well: a process uses one of the two.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from importlib import metadata
from typing import Any

from dovetail.core.errors import MissingPackageError, UnsupportedError
from dovetail.interop.torch.operators import operators

INSTALL = "`pip install 'dovetail[torch]'`"


@functools.cache
def environment() -> Any:
    """Return torchax's environment, in which operators of torch run on jax.

    Raises:
        MissingPackageError: torch or torchax is not installed.
        UnsupportedError: The installed versions do not work together, or `torch_tpu` has the device slot.
    """
    if "torch_tpu" in sys.modules:
        raise UnsupportedError(
            "torch_tpu is loaded, and torch has one slot for such a device: use torchax in a process of its own."
        )
    try:
        import torchax
    except ImportError as error:
        raise MissingPackageError(f"PyTorch modules need torch and torchax: {INSTALL} ({error})") from error
    except AttributeError as error:
        raise UnsupportedError(_mismatch(error)) from error
    try:
        env = torchax.default_env()
    except AttributeError as error:
        raise UnsupportedError(_mismatch(error)) from error
    for operator, function in operators().items():
        env.override_op_definition(operator, function)
    return env


def implement(operator: Any, function: Callable[..., Any]) -> None:
    """Run a torch operator with a function of jax arrays.

    Args:
        operator: What an error named, as torch spells it: `torch.ops.aten.erfcx.default`, or a function of torch.
        function: Takes the operator's arguments with jax arrays in place of tensors, and returns jax arrays.
    """
    env = environment()
    from torchax.ops.ops_registry import Operator

    env._ops[operator] = Operator(
        operator, function, is_jax_function=True, is_user_defined=True, needs_env=False, is_view_op=False
    )


def _mismatch(error: AttributeError) -> str:
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("torchax", "torch", "jax"))
    return (
        f"{versions} do not work together: {error}. torchax 0.0.13 and earlier name operators that torch 2.13 removed; "
        f"{INSTALL} brings one that works with torch 2.13."
    )
