"""Use a Dovetail model in a torch script: a `torch.nn.Module` whose forward and backward passes run on jax.

Parameters are torch tensors under the names of a Hugging Face checkpoint, so optimizers, `state_dict` and clipping work
as on any module. A call hands them to jax by dlpack, without a copy where torch and jax share a device.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import torch

from dovetail.core.compute import Compute
from dovetail.core.spec import ParamSpec, tree_map
from dovetail.core.types import Packed, Params
from dovetail.interop.loaded import LoadedModel, check_text
from dovetail.interop.torch.state import from_tensor, to_tensor
from dovetail.models.config import ModelConfig
from dovetail.models.decoder import trunk, unembed
from dovetail.models.spec import spec

IGNORED = -100  # the label of a token without loss, as in transformers


class CausalOutput(NamedTuple):
    """Hold what a call of `JaxModule` returns, under the names of transformers."""

    loss: torch.Tensor | None  # the mean cross entropy of the labels; None without labels
    logits: torch.Tensor  # [B, T, V] f32


def as_module(model: LoadedModel) -> JaxModule:
    """Return a model of Dovetail as a torch module.

        module = as_module(dt.load("smollm2-135m", dtype="f32"))
        optimizer = torch.optim.AdamW(module.parameters(), 1e-5)
        module(input_ids, labels=input_ids).loss.backward()

    Args:
        model: A loaded model. Its weights are copied.

    Raises:
        UnsupportedError: The model is not a causal language model of text.
    """
    return JaxModule(model)


class JaxModule(torch.nn.Module):
    """Run a Dovetail model as a torch module; see `as_module`."""

    def __init__(self, model: LoadedModel):
        super().__init__()
        check_text(model.config)
        self._names: list[str] = []
        for name, array in model.tensors():
            _register(self, name, torch.nn.Parameter(to_tensor(array)))
            self._names.append(name)
        self._model = replace(model, params={})  # type: ignore[type-var]
        self._programs = _programs(model.config, model.compute)

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
    ) -> CausalOutput:
        """Return the logits of token rows, and their loss.

        Args:
            input_ids: [B, T] tokens.
            attention_mask: [B, T]: 0 for padding, which must be at the ends of rows.
            labels: [B, T]: the tokens themselves, shifted here; -100 for those without loss.
        """
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        own = dict(self.named_parameters())
        rows = (from_tensor(input_ids.to(torch.int32)), from_tensor(mask.to(torch.int32)))
        logits: Any = _Run.apply(self._programs, self._names, rows, *(own[name] for name in self._names))
        if labels is None:
            return CausalOutput(None, logits)
        flat = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten().long()
        return CausalOutput(torch.nn.functional.cross_entropy(*flat, ignore_index=IGNORED), logits)

    def to_model(self) -> Any:
        """Return the model that this module was made of, with a copy of the current weights."""
        arrays = {name: jnp.array(from_tensor(x), copy=True) for name, x in self.named_parameters()}
        return replace(self._model, params=_tree(self._model.config, arrays))

    def save_pretrained(self, folder: str | Path) -> None:
        """Write a Hugging Face folder."""
        self.to_model().save(folder)


class _Run(torch.autograd.Function):
    """Run the compiled forward pass, and its vjp in the backward pass."""

    @staticmethod
    def forward(ctx: Any, programs: Any, names: list[str], rows: Any, *tensors: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        arrays = {name: from_tensor(x) for name, x in zip(names, tensors, strict=True)}
        run, run_for_grad, ctx.backward_program = programs
        ctx.names, ctx.vjp = names, None
        if any(ctx.needs_input_grad):
            logits, ctx.vjp = run_for_grad(arrays, *rows)
            ctx.save_for_backward(*tensors)  # torch refuses a backward pass after they were changed in place
        else:
            logits = run(arrays, *rows)
        return to_tensor(jax.block_until_ready(logits))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        _ = ctx.saved_tensors
        (found,) = jax.block_until_ready(ctx.backward_program(ctx.vjp, from_tensor(grad)))
        return None, None, None, *(to_tensor(found[name]) for name in ctx.names)


@functools.lru_cache(maxsize=8)
def _programs(cfg: ModelConfig, compute: Compute) -> tuple[Any, Any, Any]:
    """Return the compiled (forward, forward that returns its vjp, backward)."""

    def run(tensors: Mapping[str, jax.Array], tokens: jax.Array, mask: jax.Array) -> jax.Array:
        model, params = cfg.within(tokens.shape[1]), _tree(cfg, tensors)
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
        with compute.products():
            hidden, _ = trunk(params, model, tokens, positions, Packed(mask))
            return unembed(params, model, hidden).astype(jnp.float32)

    def for_grad(tensors: Mapping[str, jax.Array], tokens: jax.Array, mask: jax.Array) -> Any:
        return jax.vjp(lambda tensors: run(tensors, tokens, mask), tensors)

    def backward(vjp: Any, grad: jax.Array) -> Any:
        with compute.products():
            return vjp(grad)

    return jax.jit(run), jax.jit(for_grad), jax.jit(backward)


def _tree(cfg: ModelConfig, tensors: Mapping[str, jax.Array]) -> Params:
    """Return the tree of weights of a checkpoint's tensors."""

    def leaf(one: ParamSpec) -> jax.Array:
        cut: Any = one.stored.cut
        parts = [cut(tensors[name]) for name in one.stored.names]
        return (jnp.stack(parts) if len(parts) > 1 else parts[0]).reshape(one.shape)

    return tree_map(leaf, spec(cfg))


def _register(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter) -> None:
    """Register a parameter under a dotted name, with a module for each part of it."""
    *path, last = name.split(".")
    for part in path:
        if part not in module._modules:
            module.add_module(part, torch.nn.Module())
        module = module._modules[part]  # type: ignore[assignment]
    module.register_parameter(last, parameter)
