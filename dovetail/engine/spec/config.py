"""SpeculativeConfig: the value of `speculative_config`, with vLLM's keys."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from dovetail.core.errors import UnsupportedError, UserError
from dovetail.core.option import check_name, check_options, default_of, option, options_of

Method = Literal["ngram", "suffix", "draft_model", "eagle3", "mtp", "dflash", "dspark"]
WITHOUT_WEIGHTS = ("ngram", "suffix")
NOT_SUPPORTED = ("eagle", "medusa", "mlp_speculator", "custom_class")  # vLLM's others


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """Configure speculative decoding.

    Raises:
        UserError: A key is unknown, out of its range or not read by the method; `param` names it.
    """

    method: str | None = option(
        None,
        "How draft tokens are proposed. Default: ngram, or with a model what its config.json says.",
        choices=get_args(Method),
    )
    model: str | None = option(
        None, "The draft model: a folder, hub id or catalogue name. mtp: by default the target's own checkpoint."
    )
    num_speculative_tokens: int | None = option(
        None, "Most draft tokens per sequence and step. Default: 7, or what the draft model was trained for.",
        least=1, most=63,
    )  # fmt: skip
    prompt_lookup_min: int = option(2, "ngram: least tokens of a match.", least=1)
    prompt_lookup_max: int = option(5, "ngram: most tokens of a match.", least=1)
    suffix_decoding_max_tree_depth: int = option(24, "suffix: most tokens of a match.", least=2)
    suffix_decoding_max_cached_requests: int = option(10_000, "suffix: past outputs to draft from.", least=0)
    suffix_decoding_max_spec_factor: float = option(1.0, "suffix: draft tokens per matched token.", least=0, above=True)
    suffix_decoding_min_token_prob: float = option(0.1, "suffix: least probability of a draft token.", least=0, most=1)

    def __post_init__(self):
        if self.method is None and self.model is None:
            object.__setattr__(self, "method", "ngram")
        check_options(self)
        self._check_read()
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise _refused(
                "prompt_lookup_min",
                f"must be at most prompt_lookup_max, got {self.prompt_lookup_min} and {self.prompt_lookup_max}",
            )

    @classmethod
    def of(cls, given: Any) -> SpeculativeConfig | None:
        """Return the config from a dict or its JSON text; None for None.

        Raises:
            UserError: It is neither, or a key is not valid; `param` is `speculative_config` or the key below it.
        """
        if given is None or isinstance(given, cls):
            return given
        if isinstance(given, str):
            try:
                given = json.loads(given)
            except ValueError as error:
                raise _refused("", f"must be a JSON object such as {EXAMPLE}: {error}") from None
        if not isinstance(given, Mapping):
            raise _refused("", f"must be a JSON object such as {EXAMPLE}, got {given!r}")
        if given.get("method") in NOT_SUPPORTED:
            raise UnsupportedError(
                f"`speculative_config.method` must be one of {', '.join(get_args(Method))}, got {given['method']!r}",
                param="speculative_config.method",
            )
        for name in given:
            check_name(name, options_of(cls), {}, "speculative_config")
        return cls(**given)

    def _check_read(self) -> None:
        """Refuse keys that are set and that the method does not read, and a missing model."""
        for prefix, method in (("prompt_lookup_", "ngram"), ("suffix_decoding_", "suffix")):
            for name, value in vars(self).items():
                if name.startswith(prefix) and self.method != method and value != default_of(type(self), name):
                    raise _refused(name, f"is read by method={method} only, got method={self.method}: leave it out")
        if self.model and self.method in WITHOUT_WEIGHTS:
            raise _refused("model", f"is not read by method={self.method}, got {self.model!r}: leave one of them out")
        if not self.model and self.method not in (*WITHOUT_WEIGHTS, "mtp"):
            raise _refused("model", f"must name the draft model of method={self.method}, got none")

    @property
    def has_weights(self) -> bool:
        """Return whether draft tokens come from a draft model."""
        return self.method not in WITHOUT_WEIGHTS

    def choices(self, most: int) -> tuple[int, ...]:
        """Return the numbers of draft tokens that verify steps are compiled for: half of the most, and the most.

        Args:
            most: The draft tokens per step if `num_speculative_tokens` does not say.
        """
        most = self.num_speculative_tokens or most
        return (most // 2, most) if most >= 4 else (most,)


DRAFT_TOKENS = 7  # most draft tokens per step if the config does not say
EXAMPLE = '\'{"method": "ngram", "num_speculative_tokens": 7}\''


def _refused(name: str, message: str) -> UserError:
    param = f"speculative_config.{name}".removesuffix(".")
    return UserError(f"`{param}` {message}", param=param)
