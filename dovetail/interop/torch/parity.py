"""`parity`: compare a torch module with an implementation in jax, layer by layer, and name the first that differs.

B rows, T tokens, D model dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from dovetail.core.errors import UserError
from dovetail.core.types import Packed, Params
from dovetail.interop.loaded import LoadedModel
from dovetail.models.decoder import embed, tapped, unembed

if TYPE_CHECKING:
    import torch

EMBEDDING, FINAL_NORM, LOGITS = "embedding", "final norm", "logits"


@dataclass(frozen=True)
class LayerParity:
    """Compare the outputs of one layer.

    Attributes:
        name: The layer's path in the torch module, or "embedding", "final norm" or "logits".
        shapes: Of torch's output and ours.
        dtypes: Of torch's output and ours.
        difference: The largest absolute difference; NaN if the shapes differ.
        scale: The largest absolute value of torch's output.
        at: The index of the largest difference.
        tolerance: The largest difference, as a share of `scale` or of 1, that counts as equal.
    """

    name: str
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    dtypes: tuple[str, str]
    difference: float
    scale: float
    at: tuple[int, ...]
    tolerance: float

    @property
    def differs(self) -> bool:
        """Return whether the difference exceeds the tolerance, or is NaN."""
        return not self.difference <= self.tolerance * max(1.0, self.scale)

    def __str__(self) -> str:
        shapes, dtypes = (" and ".join(dict.fromkeys(map(str, pair))) for pair in (self.shapes, self.dtypes))
        where = f" at {list(self.at)}" if self.differs and self.at else ""
        equal = "differs" if self.differs else "equal"
        return f"{self.name}: {equal}, {shapes} {dtypes}, largest difference {self.difference:.2e}{where}"


@dataclass(frozen=True)
class ParityReport:
    """Hold the comparison of every layer, in the order in which they run."""

    layers: tuple[LayerParity, ...]

    @property
    def first(self) -> LayerParity | None:
        """Return the first layer that differs; None if all are equal."""
        return next((layer for layer in self.layers if layer.differs), None)

    def __str__(self) -> str:
        end = f"the first layer that differs is {self.first.name}" if self.first else "all layers are equal"
        return "\n".join([*map(str, self.layers), end])


def parity(
    module: torch.nn.Module,
    ours: LoadedModel | Callable[[Any], Mapping[str, Any]],
    inputs: Any,
    tolerance: float = 1e-4,
) -> ParityReport:
    """Run a torch module and our implementation on the same inputs, and compare them layer by layer.

    Args:
        module: The module, run by torch itself. With a loaded model it is a causal language model of Hugging Face.
        ours: What `dt.load` returned; or a function of `inputs` that returns arrays by the paths of the submodules
            whose outputs they should equal, in the order in which those run.
        inputs: Token ids, one sequence or rows of one length; or the one argument of a module.
        tolerance: The largest difference, as a share of the largest value of a layer's output (or of 1), that counts as
            equal. 1e-4 is for f32; bf16 needs about 2e-2.

    Returns:
        The report; `print` it, or read `report.first`.
    """
    if callable(ours):
        found = ours(inputs)
        pairs = [(name, theirs, found[name]) for name, theirs in _outputs(module, list(found), inputs).items()]
    else:
        pairs = _of_language_models(module, ours, np.atleast_2d(np.asarray(inputs, np.int32)))
    return ParityReport(tuple(_compare(*each, tolerance) for each in pairs))


def _of_language_models(module: Any, ours: LoadedModel, tokens: np.ndarray) -> list[tuple[str, Any, Any]]:
    """Return (name, torch's output, ours) of the embedding, the layers, the final norm and the logits."""
    import torch

    count = len(ours.config.layers)
    with torch.no_grad():
        theirs = module.eval()(torch.tensor(tokens, dtype=torch.long), output_hidden_states=True, use_cache=False)
    states = theirs.hidden_states
    if len(states) != count + 1:
        raise UserError(f"the torch module has {len(states) - 1} layers, and ours has {count}", param="module")
    path = _layers_path(module, count)
    # transformers returns the output of the last layer after the final norm only
    names = [EMBEDDING, *(f"{path}.{i}" for i in range(count - 1)), FINAL_NORM]
    first, (hidden, seen, logits) = _our_states(ours, tokens)
    parts = jnp.split(seen, count - 1, axis=-1) if seen is not None else []
    return [*zip(names, states, [first, *parts, hidden], strict=True), (LOGITS, theirs.logits, logits)]


def _our_states(ours: LoadedModel, tokens: np.ndarray) -> tuple[jax.Array, tuple[Any, ...]]:
    """Return the embeddings [B, T, D], and (final hidden states, outputs of layers side by side, logits)."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    cfg, taps = ours.config.within(tokens.shape[1]), tuple(range(len(ours.config.layers) - 1))

    @jax.jit
    def run(params: Params) -> tuple[Any, ...]:
        with ours.compute.products():
            ctx = Packed(jnp.ones(tokens.shape, jnp.int32))
            hidden, _, seen = tapped(params, cfg, jnp.asarray(tokens), positions, ctx, taps=taps)
            return embed(params, cfg, jnp.asarray(tokens)), (hidden, seen, unembed(params, cfg, hidden))

    return run(ours.params)  # type: ignore[return-value]


def _layers_path(module: torch.nn.Module, count: int) -> str:
    """Return the path of the list of decoder layers."""
    import torch

    lists = [p for p, m in module.named_modules() if isinstance(m, torch.nn.ModuleList) and len(m) == count]
    return min(lists, key=lambda path: path.count(".")) if lists else "layers"


def _outputs(module: torch.nn.Module, names: list[str], inputs: Any) -> dict[str, Any]:
    """Return the outputs of submodules by their paths, in the order in which they run."""
    import torch

    known, found = dict(module.named_modules()), {}
    if missing := [name for name in names if name not in known]:
        raise UserError(f"the torch module has no submodule {missing[0]!r}", param="ours")

    def keep(name: str) -> Any:
        return lambda _, __, output: found.setdefault(name, output[0] if isinstance(output, tuple) else output)

    hooks = [known[name].register_forward_hook(keep(name)) for name in names]
    try:
        with torch.no_grad():
            module.eval()(torch.as_tensor(np.asarray(inputs)))
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _compare(name: str, theirs: Any, ours: Any, tolerance: float) -> LayerParity:
    shapes = tuple(theirs.shape), tuple(ours.shape)
    dtypes = str(theirs.dtype).removeprefix("torch."), str(ours.dtype)
    want, got = theirs.detach().double().numpy(), np.asarray(ours, np.float64)
    if shapes[0] != shapes[1]:
        return LayerParity(name, shapes, dtypes, float("nan"), float(np.abs(want).max()), (), tolerance)
    gap = np.abs(want - got)
    at = tuple(int(i) for i in np.unravel_index(np.argmax(gap), gap.shape))
    return LayerParity(name, shapes, dtypes, float(gap[at]), float(np.abs(want).max()), at, tolerance)
