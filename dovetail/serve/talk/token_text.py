"""Log-probabilities as clients read them: tokens by their text, in the shapes of the two OpenAI routes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from dovetail.io.tokenizer import Tokenizer
from dovetail.serve.remote.wire import Logprob

LEAST = -9999.0  # JSON has no -inf; OpenAI sends this


class TokenText:
    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._known: dict[int, tuple[str, list[int]]] = {}

    def of(self, token: int) -> str:
        return self._of(token)[0]

    def _of(self, token: int) -> tuple[str, list[int]]:
        found = self._known.get(token)
        if found is None:
            try:
                data = self._tokenizer.token_bytes(token)
            except ValueError:  # an id that the tokenizer does not know: model vocabularies are often padded
                data = b""
            found = self._known[token] = (data.decode("utf-8", "replace"), list(data))
        return found

    def chat(self, logprobs: Iterable[Logprob]) -> list[dict[str, Any]]:
        return [
            {**self._entry(l.token, l.logprob), "top_logprobs": [self._entry(*top) for top in l.top]} for l in logprobs
        ]

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text, data = self._of(token)
        return {"token": text, "logprob": max(logprob, LEAST), "bytes": data}

    def completion(self, tokens: Sequence[int], logprobs: Sequence[Logprob | None], offset: int) -> dict[str, Any]:
        """As OpenAI does it, the top log-probabilities always include the token itself."""
        texts, offsets = [self.of(token) for token in tokens], []
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [l and max(l.logprob, LEAST) for l in logprobs],
            "top_logprobs": [l and self._top(l) for l in logprobs],
            "text_offset": offsets,
        }

    def _top(self, entry: Logprob) -> dict[str, float]:
        top = {self.of(token): max(logprob, LEAST) for token, logprob in reversed(entry.top)}
        return {self.of(entry.token): max(entry.logprob, LEAST)} | dict(reversed(top.items()))

    def prompt(self, logprobs: Sequence[Logprob | None] | None) -> list[dict[str, Any] | None] | None:
        """As vLLM writes prompt_logprobs: by token id."""
        if logprobs is None:
            return None
        return [None if each is None else self._by_id(each) for each in logprobs]

    def _by_id(self, entry: Logprob) -> dict[str, Any]:
        ranked = {token: (logprob, rank) for rank, (token, logprob) in enumerate(entry.top, 1)}
        ranked[entry.token] = (entry.logprob, entry.rank)
        return {
            str(token): {"logprob": max(logprob, LEAST), "rank": rank, "decoded_token": self.of(token)}
            for token, (logprob, rank) in ranked.items()
        }
