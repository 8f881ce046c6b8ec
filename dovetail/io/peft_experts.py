"""Adapters of experts as PEFT keeps them for transformers 5, which holds all experts of a layer in two parameters.

One is gate and up joined, the other is down. PEFT has one pair of matrices per parameter:

    lora_A [E R, in]: the ranks of one expert after another's
    lora_B [out, R E]: the experts of one rank after another's

Ours of gate and up are written as one pair with their ranks side by side, or with shared ranks if they are equal, as in
a pair that PEFT made: that is split by rows, and each part has all its ranks. If both parameters of a module are
adapted, PEFT wraps it twice, gate and up first: theirs are under `base_layer`.

E experts, R ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from dovetail.core.errors import CheckpointError
from dovetail.io.peft_config import AdapterConfig
from dovetail.models.config import ModelConfig
from dovetail.models.registry import family_of
from dovetail.models.spec import spec

Pair = dict[str, np.ndarray]  # lora_a [E, R, in], lora_b [E, out, R]
Flat = dict[str, Pair]  # by the path of our weight


@dataclass(frozen=True)
class Stack:
    """Describe one parameter of a layer's experts."""

    module: str  # model.layers.0.mlp.experts
    parameter: str  # gate_up_proj
    rows: dict[str, slice]  # the path of our weight -> where its rows are among the parameter's
    shape: tuple[int, int, int]  # E, out, in; whether a checkpoint holds it transposed makes no difference here

    @property
    def name(self) -> str:
        """Return the parameter's name."""
        return f"{self.module}.{self.parameter}"


def current_name(name: str) -> str:
    """Return transformers 5's name of a tensor: Mixtral's checkpoints have an older one."""
    return name.replace(".block_sparse_moe.", ".mlp.")


def stacks_of(cfg: ModelConfig) -> list[Stack]:
    """Return the experts' parameters in the order in which PEFT wraps them.

    All our families have the same two names.
    """
    found, interleaved = [], family_of(cfg).experts == "interleaved"
    for i, layer in enumerate(spec(cfg)["layers"]):
        if "moe" not in layer:
            continue
        experts, path = layer["moe"]["experts"], f"layers.{i}.moe.experts"
        E, F, D = experts["gate"].shape
        gate, up = (slice(0, None, 2), slice(1, None, 2)) if interleaved else (slice(0, F), slice(F, 2 * F))
        module = current_name(experts["gate"].stored.names[0]).partition(".experts.")[0] + ".experts"
        found.append(Stack(module, "gate_up_proj", {f"{path}.gate": gate, f"{path}.up": up}, (E, 2 * F, D)))
        found.append(Stack(module, "down_proj", {f"{path}.down": slice(None)}, (E, D, F)))
    return found


# --- writing ----------------------------------------------------------------------------------------------------------


def stacked_tensors(stacks: list[Stack], flat: Flat) -> tuple[Pair, dict[str, int]]:
    """Return PEFT's tensors by name, and the rank of each adapted parameter by name."""
    adapted = [stack for stack in stacks if any(path in flat for path in stack.rows)]
    shared = all(_one_down([flat[path] for path in stack.rows if path in flat]) for stack in adapted)
    tensors, ranks = {}, {}
    for stack, prefix in itertools.chain.from_iterable(map(_wrapped, _by_module(adapted))):
        down, up = _joined(stack, flat, shared)
        E, rank, n = down.shape
        tensors[f"{prefix}.lora_A.weight"] = down.reshape(E * rank, n)
        tensors[f"{prefix}.lora_B.weight"] = up.transpose(1, 2, 0).reshape(up.shape[1], rank * E)
        ranks[stack.name] = rank
    return tensors, ranks


def _joined(stack: Stack, flat: Flat, shared: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return (down [E, R, in], up [E, out, R]) of the whole parameter; `up` is zero where nothing is adapted."""
    own = {path: flat[path] for path in stack.rows if path in flat}
    downs = [pair["lora_a"] for pair in own.values()]
    down = downs[0] if shared else np.concatenate(downs, axis=1)
    up, at = np.zeros((*stack.shape[:2], down.shape[1]), down.dtype), 0
    for path, pair in own.items():
        rank = pair["lora_b"].shape[-1]
        up[:, stack.rows[path], at : at + rank] = pair["lora_b"]
        at += 0 if shared else rank
    return down, up


def _one_down(pairs: list[Pair]) -> bool:
    return all(np.array_equal(pair["lora_a"], pairs[0]["lora_a"]) for pair in pairs)


# --- reading ----------------------------------------------------------------------------------------------------------


def take_stacked(stacks: list[Stack], found: dict[str, np.ndarray], config: AdapterConfig) -> Flat:
    """Take the adapters of experts out of the tensors."""
    flat: Flat = {}
    for own in _by_module(stack for stack in stacks if config.is_parameter(stack.name)):
        # a model that PEFT has had before has its parameters in another order; no two have the same shape
        straight, turned = list(_wrapped(own)), list(_wrapped(own[::-1]))
        for stack, prefix in turned if _fits(turned, found) else straight:
            names = [f"{prefix}.lora_{which}.weight" for which in "AB"]
            for name in names:
                if name not in found:
                    raise CheckpointError(f"{config.folder}: {name!r} is missing; the adapter was not written whole")
            down, up = _unstacked(stack, config, *(found.pop(name) for name in names))
            flat |= _parts(stack, down, up, config.lora.r)
    return flat


def _fits(wrapped: list[tuple[Stack, str]], found: dict[str, np.ndarray]) -> bool:
    names = [(stack.shape, f"{prefix}.lora_A.weight", f"{prefix}.lora_B.weight") for stack, prefix in wrapped]
    return all(
        down in found and up in found and (found[up].shape[0], found[down].shape[1]) == shape[1:]
        for shape, down, up in names
    )


def _unstacked(stack: Stack, config: AdapterConfig, down: np.ndarray, up: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (down [E, R, in], up [E, out, R]) from PEFT's two matrices."""
    E, rows, columns = stack.shape
    if down.shape[1] != columns or up.shape[0] != rows or down.shape[0] % E or up.shape[1] % E:
        raise CheckpointError(
            f"{config.folder} is an adapter for another model: {stack.name} has {list(down.shape)} and "
            f"{list(up.shape)} there, and {E} experts of {rows} x {columns} here"
        )
    down, up = down.reshape(E, -1, columns), up.reshape(rows, -1, E).transpose(2, 0, 1)
    return down, up * up.dtype.type(config.gain(stack.name, down.shape[1], up.shape[2]))


def _parts(stack: Stack, down: np.ndarray, up: np.ndarray, rank: int) -> Flat:
    """Return the pairs of our weights.

    A part of zeros beside another that is not zero was not adapted and is left out.
    """
    ups = [np.ascontiguousarray(up[:, rows]) for rows in stack.rows.values()]
    parts = {
        path: {"lora_a": down[:, ranks], "lora_b": own[..., ranks]}
        for path, own, ranks in zip(stack.rows, ups, own_ranks(ups, rank), strict=True)
    }
    return {path: pair for path, pair in parts.items() if pair["lora_b"].any()} or parts


# --- names ------------------------------------------------------------------------------------------------------------


def _by_module(stacks: Iterable[Stack]) -> Iterable[list[Stack]]:
    modules: dict[str, list[Stack]] = {}
    for stack in stacks:
        modules.setdefault(stack.module, []).append(stack)
    return modules.values()


def _wrapped(stacks: list[Stack]) -> Iterable[tuple[Stack, str]]:
    """Yield the parameters of one module, each with the prefix of its tensors' names.

    The last one wrapped is the outermost.
    """
    for depth, stack in enumerate(reversed(stacks)):
        yield stack, stack.module + ".base_layer" * depth


def own_ranks(ups: list[np.ndarray], rank: int) -> list[slice]:
    """Return the ranks that each of several weights needs, given their parts of `lora_B` [.., R].

    In a pair that we wrote, with `rank` ranks of each weight side by side, they are its own, and the others are zero;
    in a pair that PEFT made they are shared.
    """
    own = [slice(i * rank, (i + 1) * rank) for i in range(len(ups))]
    apart = ups[0].shape[-1] == rank * len(ups)
    if apart and not any(np.delete(up, ranks, axis=-1).any() for up, ranks in zip(ups, own, strict=True)):
        return own
    return [slice(None)] * len(ups)
