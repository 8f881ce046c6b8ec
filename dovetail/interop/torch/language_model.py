"""TorchLanguageModel: a causal language model of Hugging Face that Dovetail does not implement, run on jax devices."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dovetail.core.compute import Compute, compute_of
from dovetail.core.errors import CheckpointError, MissingPackageError, UnsupportedError
from dovetail.core.units import format_bytes, format_count
from dovetail.interop.torch.environment import INSTALL, environment
from dovetail.interop.torch.function import from_module
from dovetail.interop.torch.static_cache import Cache, StaticCacheSteps
from dovetail.models.config import ModelConfig
from dovetail.ops.sample import SampleInputs, sample

LEAST = 16  # tokens of the smallest step with a prompt
MOST = 512  # and of the largest: a longer prompt takes several steps


class TorchLanguageModel:
    """Hold a model and its compiled functions: logits, log-probabilities, embeddings and generation.

    Attributes:
        params: The weights, by their names in the checkpoint.
        config: What is known of the architecture: sizes, end tokens, and the config.json. It has no layers.
        compute: The dtype and the precision of products.
        tokenizer: The model's, if it has one.
        steps: The model as pure functions, for an engine.
    """

    def __init__(self, module: Any, compute: Compute, tokenizer: Any = None, source: str = ""):
        self.params, self._apply = from_module(module)
        self.compute, self.tokenizer, self.source = compute, tokenizer, source
        self.config = config_of(module.config)
        self.steps = StaticCacheSteps(self._apply, self.config.max_len, compute)
        self._hidden = jax.jit(self.steps.hidden)

    def logits(self, token_ids: Sequence[int]) -> np.ndarray:
        """Return the logits [T, vocab] f32 of one sequence."""
        tokens = np.zeros((1, _size(len(token_ids))), np.int32)
        tokens[0, : len(token_ids)] = token_ids
        return np.asarray(self.steps.run_logits(self.params, tokens)[0, : len(token_ids)], np.float32)

    def logprobs(self, token_ids: Sequence[int]) -> np.ndarray:
        """Return the log-probability [T - 1] f32 of each token but the first, given those before it."""
        scores = jax.nn.log_softmax(self.logits(token_ids)[:-1])
        return np.asarray(jnp.take_along_axis(scores, np.asarray(token_ids)[1:, None], axis=1)[:, 0])

    def embed(self, token_ids: Sequence[int], pooling: str = "mean") -> np.ndarray:
        """Return the final hidden states of one sequence as a vector of length 1: their "mean", or the "last"."""
        tokens = np.zeros((1, _size(len(token_ids))), np.int32)
        tokens[0, : len(token_ids)] = token_ids
        hidden = np.asarray(self._hidden(self.params, tokens)[0, : len(token_ids)], np.float32)
        pooled = hidden[-1] if pooling == "last" else hidden.mean(0)
        return pooled / max(float(np.linalg.norm(pooled)), 1e-12)

    def generate(
        self,
        token_ids: Sequence[int],
        max_new_tokens: int,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
    ) -> Iterator[int]:
        """Yield the tokens after a prompt, up to an end token, which is yielded too.

        A token depends on the prompt, the seed and its position, as with an engine: `dt.LLM` with the same seed draws
        the same tokens.

        Args:
            token_ids: The prompt.
            max_new_tokens: The most tokens to yield.
            temperature: 0 takes the most probable token.
            top_k: Draw from this many most probable tokens; 0 for all.
            top_p: Draw from the most probable tokens that together reach this probability.
            seed: The seed of the draws.
        """
        if not token_ids:
            raise UnsupportedError("`token_ids` must have a token, got none", param="token_ids")
        length = _size(len(token_ids) + max_new_tokens)
        cache = self.steps.new_cache(self.params, length, self.steps.choose(self.params, LEAST, length))
        drawn = dict(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
        token, done = None, 0
        while done < len(token_ids):
            chunk = token_ids[done : done + MOST]
            tokens = np.zeros((1, _size(len(chunk), MOST)), np.int32)
            tokens[0, : len(chunk)] = chunk
            token, cache = self._draw(cache, tokens, done, len(chunk), drawn)
            done += len(chunk)
        for count in range(max_new_tokens):
            assert token is not None
            yield (found := int(token[0]))
            if found in self.config.eos_ids or count + 1 == max_new_tokens:
                return
            token, cache = self._draw(cache, token[None], done + count, 1, drawn)

    def _draw(
        self, cache: Cache, tokens: Any, start: int, count: int, drawn: dict[str, Any]
    ) -> tuple[jax.Array, Cache]:
        """Return the token [1] after the first `count` of these tokens, and the cache."""
        logits, cache = self.steps.run_step(self.params, cache, tokens, np.int32(start), kind=self.steps.kind)
        return _sample(logits, np.int32(count - 1), _inputs(self.config.vocab, start + count, **drawn)), cache

    def summary(self) -> list[tuple[str, str]]:
        """Return rows that describe the model, for a table."""
        count = sum(array.size for array in self.params.values())
        size = sum(array.nbytes for array in self.params.values())
        return [
            ("family", f"{self.config.to_hf().get('model_type')}, a PyTorch module run by torchax"),
            ("parameters", format_count(count)),
            ("weights", f"{format_bytes(size)} in {self.compute.dtype.name}"),
            ("dtype here", f"{self.compute.name}: {self.compute.describe()}"),
            ("served", "one sequence at a time"),
            ("context", f"{self.config.max_len:,} tokens"),
            ("vocabulary", f"{self.config.vocab:,} tokens"),
            ("from", self.source),
        ]


@jax.jit
def _sample(logits: jax.Array, at: jax.Array, inputs: SampleInputs) -> jax.Array:
    return sample(logits[:, at], inputs, jnp.zeros((1, logits.shape[-1]), jnp.int32), 1)[0]


def load_torch(path: Path, dtype: Any = None, tokenizer: Any = None, source: str = "") -> TorchLanguageModel:
    """Load a Hugging Face folder with transformers, and run it on jax devices.

    Args:
        path: The folder.
        dtype: See `dt.load`.
        tokenizer: The model's, if it has one.
        source: What the user called the model.

    Raises:
        MissingPackageError: torch, torchax or transformers is not installed.
        CheckpointError: transformers cannot read the folder.
    """
    environment()
    try:
        import torch
        import transformers
    except ImportError as error:
        raise MissingPackageError(f'`backend="torch"` needs transformers: {INSTALL} ({error})') from error
    own = torch.float32 if dtype is None and jax.default_backend() == "cpu" else "auto"
    asked = own if dtype is None else getattr(torch, compute_of(dtype).dtype.name)
    try:
        module = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=asked, local_files_only=True)
    except (ValueError, OSError, KeyError) as error:
        raise CheckpointError(
            f"{source or path}: transformers cannot load it as a causal language model: {error}"
        ) from error
    module.requires_grad_(True)  # all weights are parameters of the function
    found = compute_of(str(module.dtype).removeprefix("torch.") if dtype is None else dtype)
    return TorchLanguageModel(module.eval(), found, tokenizer, source or str(path))


def config_of(hf: Any) -> ModelConfig:
    """Return a ModelConfig without layers: sizes and special tokens of a Hugging Face config."""
    text = hf.get_text_config()
    end = text.eos_token_id
    ends = tuple(end) if isinstance(end, list | tuple) else () if end is None else (end,)
    names = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
    max_len = next((int(size) for name in names if (size := getattr(text, name, None))), 2048)
    source = json.dumps(hf.to_dict(), sort_keys=True, default=str)
    return ModelConfig(
        "torch",
        text.vocab_size,
        text.hidden_size,
        (),
        max_len,
        0.0,
        bos_id=text.bos_token_id,
        eos_ids=ends,
        source=source,
    )


def _size(count: int, most: int | None = None) -> int:
    """Return the smallest compiled size that holds `count` tokens."""
    size = max(LEAST, 1 << max(count - 1, 0).bit_length())
    return size if most is None else min(size, most)


def _inputs(vocab: int, position: int, temperature: float, top_k: int, top_p: float, seed: int) -> SampleInputs:
    """Return the sampling parameters of one row, without penalties, bias or mask."""
    seed %= 2**64
    numbers: dict[str, Any] = dict(
        temperature=np.float32(temperature), seed_hi=np.uint32(seed >> 32), seed_lo=np.uint32(seed & 0xFFFFFFFF),
        position=np.int32(position), top_k=np.int32(top_k), top_p=np.float32(top_p), min_p=np.float32(0),
        slot=np.int32(1), presence=np.float32(0), frequency=np.float32(0), repetition=np.float32(1),
        mask_until=np.int32(0), top_logprobs=np.int32(-1),
    )  # fmt: skip
    wide: dict[str, Any] = dict(
        bias_ids=np.full((1, 1), -1, np.int32), bias=np.zeros((1, 1), np.float32),
        mask=np.full((1, -(-vocab // 32)), 0xFFFFFFFF, np.uint32),
    )  # fmt: skip
    return SampleInputs(**{name: value[None] for name, value in numbers.items()}, **wide)
