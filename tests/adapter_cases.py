"""Random adapters of the reference models, and logits of Dovetail and PEFT."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import torch

from dovetail.core.spec import init
from dovetail.core.types import Packed
from dovetail.models.decoder import forward, unembed
from dovetail.models.lora import lora_spec

TOKENS = [5, 17, 3, 44, 9, 2, 31]


def logits(params, cfg) -> np.ndarray:
    return np.asarray(_logits(params, cfg))[0]


@functools.partial(jax.jit, static_argnames="cfg")
def _logits(params, cfg):
    tokens = jnp.asarray([TOKENS], jnp.int32)
    positions = jnp.arange(len(TOKENS))[None]
    return unembed(params, cfg, forward(params, cfg, tokens, positions, Packed(jnp.ones_like(tokens)))[0])


def theirs(model) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor([TOKENS])).logits[0].numpy()


def random_adapters(cfg, lora):
    """Random ones that do something: PEFT's start is no change at all."""
    tree = init(lora_spec(cfg, lora), jax.random.key(1), jnp.float32)
    keys = iter(jax.random.split(jax.random.key(2), 1000))

    def one(path, x):
        name = path[-1].key
        if name == "lora_b":
            return jax.random.normal(next(keys), x.shape) * 0.3
        return jax.random.uniform(next(keys), x.shape, minval=0.5, maxval=1.5) if name == "magnitude" else x

    return jax.tree_util.tree_map_with_path(one, tree)


def shake(wrapped) -> None:
    """The same for PEFT's own."""
    torch.manual_seed(1)
    with torch.no_grad():
        for key, tensor in wrapped.named_parameters():
            if "lora_B" in key:
                tensor.copy_(torch.randn_like(tensor) * 0.3)
