"""Turn a failure inside a torch module into an error that names the operator and the module that called it."""

from __future__ import annotations

import contextlib
import re
import types
from collections.abc import Iterator
from typing import TYPE_CHECKING

import jax

from dovetail.core.errors import UnsupportedError

if TYPE_CHECKING:
    import torch


@contextlib.contextmanager
def explained(module: torch.nn.Module) -> Iterator[None]:
    """Raise UnsupportedError for an operator that torchax lacks, and for code that depends on a traced value."""
    from torchax.tensor import OperatorNotFound

    try:
        yield
    except OperatorNotFound as error:
        found = re.search(r"with name (\S+) has", str(error))
        operator = found[1] if found else str(error)
        raise UnsupportedError(
            f"torchax has no implementation of `{operator}`, called by {_caller(module, error)}. Give it one in jax: "
            f"`dovetail.interop.torch.implement({_spelled(operator)}, function)`, or replace that module by one with "
            "other operators, or use a newer torchax.",
            param=operator,
            code="unsupported_operator",
        ) from error
    except jax.errors.ConcretizationTypeError as error:
        raise UnsupportedError(
            f"{_caller(module, error)} reads the value of a tensor (an `if`, `.item()` or a shape made of data), "
            "which a jitted function cannot. Pass that value as a Python number, or call the function without jit.",
            code="data_dependent",
        ) from error


def _caller(module: torch.nn.Module, error: BaseException) -> str:
    """Return the innermost module of the traceback: its path in the tree, class, file and line."""
    import torch.nn.modules.module as nn_module

    paths = {id(child): path for path, child in module.named_modules()}
    innermost = (type(module).__name__, "")
    for frame, line in _frames(error.__traceback__):
        owner = frame.f_locals.get("self")
        if id(owner) in paths and frame.f_code.co_filename != nn_module.__file__:
            path = paths[id(owner)]
            name = f"`{path}` ({type(owner).__name__})" if path else type(owner).__name__
            innermost = (name, f" at {frame.f_code.co_filename}:{line}")
    return "".join(innermost)


def _frames(traceback: types.TracebackType | None) -> Iterator[tuple[types.FrameType, int]]:
    while traceback is not None:
        yield traceback.tb_frame, traceback.tb_lineno
        traceback = traceback.tb_next


def _spelled(operator: str) -> str:
    """Return `aten::sort.stable` as `torch.ops.aten.sort.stable`."""
    name = operator.replace("::", ".")
    return f"torch.ops.{name}" + ("" if name.count(".") > 1 else ".default")
