"""Train a torch module with an optax optimizer, in one compiled step: `train_step`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dovetail.core.compute import compute_of
from dovetail.core.mesh import TRAIN, Placement, make_mesh, state_shardings
from dovetail.core.spec import abstract
from dovetail.interop.torch.function import ModuleFunction
from dovetail.interop.torch.recipe import specs_of
from dovetail.interop.torch.state import from_tensor, load_arrays
from dovetail.models.external import gathered
from dovetail.ops.dispatch import compile_options

if TYPE_CHECKING:
    import torch

MANY = 1 << 16  # tokens of a step, for the compiler's options: the number is not known before the first batch
INNER = "module."  # the names of the trained module's tensors in a _LossModule


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TorchState:
    """Hold what a training carries from step to step; a pytree for checkpoints."""

    params: dict[str, jax.Array]  # trained weights in f32, by their names in `state_dict`
    buffers: dict[str, jax.Array]  # buffers and frozen weights; running statistics change
    opt: Any
    step: jax.Array  # [] int32: number of updates


def train_step(
    module: torch.nn.Module,
    loss: Callable[[Any, Any], Any],
    optimizer: optax.GradientTransformation,
    *,
    mesh: Mesh | Mapping[str, int] | None = None,
    compute: str = "f32",
    seed: int = 0,
) -> TorchStep:
    """Return a compiled training step of a torch module.

        step = train_step(module, lambda module, batch: F.cross_entropy(module(batch["x"]), batch["y"]),
                          optax.adamw(1e-3), mesh={"data": 2, "fsdp": 4}, compute="bf16")
        state = step.init()
        for batch in batches:
            state, metrics = step(state, batch)
        step.load_into(module, state)

    Args:
        module: The module. A module in train mode draws dropout from `seed` and the step's number.
        loss: Returns the loss of a batch as a scalar tensor, in torch's functions: (module, batch) -> loss.
        optimizer: Updates the weights.
        mesh: Devices along the axes `data` and `fsdp`; rows are split over both, weights and optimizer state over
            `fsdp`. None: one device.
        compute: bf16, f32 or tf32: the type of weights and inputs in the computation. Weights are kept in f32.
        seed: Seed of dropout.

    Raises:
        UserError: The mesh does not fit the devices.
    """
    return TorchStep(module, loss, optimizer, _placement(mesh), compute, seed)


class TorchStep:
    """Run training steps of a torch module; see `train_step`."""

    def __init__(
        self,
        module: torch.nn.Module,
        loss: Callable[[Any, Any], Any],
        optimizer: optax.GradientTransformation,
        placement: Placement,
        compute: str,
        seed: int,
    ):
        self.module, self.optimizer, self.placement = module, optimizer, placement
        self.compute, self.seed, self.trains = compute_of(compute), seed, module.training
        self._specs = specs_of(module)
        self._apply = ModuleFunction(_loss_module(module, loss))
        self._jitted = jax.jit(
            self._step,
            donate_argnums=0,
            out_shardings=(self.shardings, None),
            compiler_options=compile_options(placement.platform, MANY),
        )

    @functools.cached_property
    def shardings(self) -> TorchState:
        """Return the shardings of the state."""
        specs = self._specs
        params = self.placement.shardings(specs)
        whole = NamedSharding(self.placement.mesh, PartitionSpec())
        opt = state_shardings(self.optimizer, abstract(specs, jnp.float32), params)
        buffers: Any = {_outer(name): whole for name in self._apply.buffers}
        return TorchState(params, buffers, opt, cast(Any, whole))

    def init(self) -> TorchState:
        """Return the state that training starts from, with the module's current weights."""
        at = self.shardings
        params = {
            name: jax.device_put(x.astype(jnp.float32), at.params[name])
            for name, x in _stripped(self._apply.arrays(trainable=True)).items()
        }
        buffers = _stripped(self._apply.arrays(trainable=False))
        placed = jax.tree.map(lambda x: jax.device_put(x, at.step), buffers)
        opt = jax.jit(self.optimizer.init, out_shardings=at.opt)(params)
        return TorchState(params, placed, opt, jax.device_put(jnp.zeros((), jnp.int32), at.step))

    def __call__(self, state: TorchState, batch: Any) -> tuple[TorchState, dict[str, jax.Array]]:
        """Return the state after an update, and {loss, grad_norm}. The given state's memory is used again.

        Args:
            state: As from `init`.
            batch: A tree of arrays or torch tensors whose first dim is the rows.
        """
        return self._jitted(state, self.put(batch))

    def put(self, batch: Any) -> Any:
        """Return a batch on the devices, its rows split over them."""

        def one(x: Any) -> jax.Array:
            x = from_tensor(x)
            return jax.device_put(x, self.placement.sharding(("batch", *(None,) * (x.ndim - 1))[: x.ndim], x.shape))

        return jax.tree.map(one, batch)

    def lower(self, state: Any, batch: Any) -> jax.stages.Lowered:
        """Lower the step for a state and a batch, concrete or abstract."""
        return self._jitted.lower(state, batch)

    def load_into(self, module: torch.nn.Module, state: TorchState) -> None:
        """Copy the weights and buffers of a state into a module of the same architecture."""
        load_arrays(module, {**state.buffers, **state.params})

    def _step(self, state: TorchState, batch: Any) -> tuple[TorchState, dict[str, jax.Array]]:
        rng = jax.random.fold_in(jax.random.key(self.seed), state.step) if self.trains else None

        def loss(params: dict[str, jax.Array]) -> tuple[jax.Array, dict[str, jax.Array]]:
            own, given = gathered(self._cast(params), self._specs, self.placement), self._cast(batch)
            found, after = self._apply.with_buffers(_inner(own), _inner(state.buffers), given, rng=rng)
            return found.astype(jnp.float32), _stripped(after)

        with self.compute.products(self.placement.platform):
            (value, buffers), grads = jax.value_and_grad(loss, has_aux=True)(state.params)
        updates, opt = self.optimizer.update(grads, state.opt, state.params)
        params: Any = optax.apply_updates(state.params, updates)
        new = TorchState(params, buffers, opt, state.step + 1)
        return new, {"loss": value, "grad_norm": optax.tree.norm(grads)}

    def _cast(self, tree: Any) -> Any:
        return jax.tree.map(
            lambda x: x.astype(self.compute.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree
        )


def _loss_module(module: torch.nn.Module, loss: Callable[[Any, Any], Any]) -> torch.nn.Module:
    """Return a module whose forward pass is the loss of `module`, so that one call runs both."""
    import torch

    class LossOfModule(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = module

        def forward(self, batch: Any) -> Any:
            return loss(self.module, batch)

    return LossOfModule()


def _outer(name: str) -> str:
    return name.removeprefix(INNER)


def _stripped(arrays: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    return {_outer(name): x for name, x in arrays.items()}


def _inner(arrays: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    return {INNER + name: x for name, x in arrays.items()}


def _placement(mesh: Mesh | Mapping[str, int] | None) -> Placement:
    if mesh is None:
        mesh = make_mesh({}, jax.devices()[:1])
    return Placement(mesh if isinstance(mesh, Mesh) else make_mesh(dict(mesh)), TRAIN)
