"""Score texts with a torch module: a reward model of reinforcement learning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dovetail.core.errors import RecipeError
from dovetail.core.training import TorchModel
from dovetail.interop.torch.function import from_module
from dovetail.interop.torch.recipe import accepted, build_module, logits_of

SHORTEST = 16  # tokens; longer rows are padded to a power of two, so that few shapes are compiled


class TorchScorer:
    """Give one number to each text, by a module that maps tokens [B, T] to scores.

    The module returns one score per row, as transformers' models for sequence classification do, or one per token, of
    which the last token's counts. Rows are padded on the right; a module that takes `attention_mask` is given one.

    Args:
        model: The function that builds the module.
        tokenizer: An io.tokenizer.Tokenizer.
    """

    def __init__(self, model: TorchModel, tokenizer: Any):
        module = build_module(model)
        self.tokenizer = tokenizer
        self._params, self._apply = from_module(module)
        self._takes, self._pad = accepted(module), _padding(module)
        self._run = jax.jit(self._scores)

    def score(self, texts: Sequence[str | Sequence[Mapping[str, Any]]]) -> np.ndarray:
        """Return the scores [texts] f32 of texts or conversations."""
        rows = [self._encode(text) for text in texts]
        count, longest = 1 << (len(rows) - 1).bit_length(), max(SHORTEST, *map(len, rows))
        tokens = np.full((count, 1 << (longest - 1).bit_length()), self._pad, np.int32)
        lengths = np.ones(count, np.int32)
        for i, row in enumerate(rows):
            tokens[i, : len(row)], lengths[i] = row, max(1, len(row))
        return np.asarray(self._run(self._params, self._apply.buffers, tokens, lengths))[: len(rows)]

    def _encode(self, text: str | Sequence[Mapping[str, Any]]) -> list[int]:
        if isinstance(text, str):
            return self.tokenizer.encode(text)
        return self.tokenizer.encode_chat(text, add_generation_prompt=False)

    def _scores(self, params: Any, buffers: Any, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
        mask = (jnp.arange(tokens.shape[1]) < lengths[:, None]).astype(jnp.int32)
        given: dict[str, Any] = {"attention_mask": mask} if "attention_mask" in self._takes else {}
        found = logits_of(self._apply.with_buffers(params, buffers, tokens, **given)[0]).astype(jnp.float32)
        found = found[..., 0] if found.ndim > 1 and found.shape[-1] == 1 else found
        if found.shape == tokens.shape:
            found = jnp.take_along_axis(found, lengths[:, None] - 1, axis=1)[:, 0]
        if found.shape != lengths.shape:
            raise RecipeError(
                f"a reward model must return one score per row or per token, got shape {found.shape} for tokens of "
                f"shape {tokens.shape}",
                param="model.torch",
            )
        return found


def _padding(module: Any) -> int:
    """Return the token of padding; a Hugging Face classifier finds the last token of a row by it."""
    config = getattr(module, "config", None)
    pad = getattr(config, "pad_token_id", None)
    if pad is None and type(module).__name__.endswith("ForSequenceClassification"):
        raise RecipeError(
            "the reward model's config has no pad_token_id, by which its class finds the last token of a row: set "
            "module.config.pad_token_id in the function that builds it",
            param="model.torch",
        )
    return pad or 0
