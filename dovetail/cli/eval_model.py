"""Score text with the engine: log-probabilities and completions for `dovetail eval` and lm-eval."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple

from dovetail.core.errors import UserError

AT_ONCE = 2048  # prompts per call, whose log-probabilities are held until all are done
MAX_NEW = 256  # default tokens of a completion


class Score(NamedTuple):
    """Hold the score of a continuation."""

    logprob: float
    greedy: bool  # whether every token was the most probable one


class Bytes:
    """Tokenize into raw UTF-8 bytes: ids 0 to 255, and 256 between documents."""

    bos_id, eos_id = None, 256

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Return the bytes as ids."""
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of the ids."""
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Return the byte of an id."""
        return bytes([token_id])


class EvalModel:
    """Score and complete texts with an LLM; `tokenizer` defaults to the model's."""

    def __init__(self, llm: Any, tokenizer: Any = None):
        self.llm, self.tokenizer = llm, tokenizer or llm.tokenizer
        if self.tokenizer is None:
            raise UserError(
                "the model has no tokenizer: set --tokenizer bytes if it reads raw bytes", param="--tokenizer"
            )
        self.longest = llm.engine.scheduler.config.max_model_len - 1  # the engine samples one token after every prompt
        self._bos = self._before_text()
        self._known = self._padded_to()

    def _padded_to(self) -> tuple[int, ...] | None:
        """Return the ids of the tokenizer if the model has more.

        A model with little training samples the other ids too, which have no text.
        """
        own = self.llm.tokenizer
        if own is None or own.vocab_size >= self.llm.config.vocab:
            return None
        return tuple(own.backend.get_vocab().values())

    def _before_text(self) -> list[int]:
        """Return [BOS] if the tokenizer adds it, found by encoding a text: BOS and EOS may be the same token."""
        bare, framed = (self.tokenizer.encode("a", add_special=special) for special in (False, True))
        bos = self.tokenizer.bos_id
        return [bos] if bos is not None and framed[: len(bare) + 1] == [bos, *bare] else []

    def encode(self, text: str) -> list[int]:
        """Encode with one BOS if the tokenizer adds it (a chat template may have written it), and without EOS."""
        ids = self.tokenizer.encode(text, add_special=False)
        return ids if ids[:1] == self._bos else self._bos + ids

    def document(self, text: str) -> list[int]:
        """Encode as in training, with the end token, which is predicted too."""
        ids, end = self.encode(text), self.tokenizer.eos_id
        return ids if end is None or ids[-1:] == [end] else [*ids, end]

    @property
    def prefix(self) -> int:
        """Return the token to put before a text without context."""
        config = self.llm.config
        for token in (self.tokenizer.bos_id, self.tokenizer.eos_id, config.bos_id, *config.eos_ids):
            if token is not None:
                return token
        raise UserError("the model has neither a BOS nor an EOS token, so the first token of a text cannot be scored")

    def pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Encode context and continuation together and split them where the context ends.

        Spaces between them belong to the continuation, as in training.
        """
        if not context:
            ids = self.tokenizer.encode(continuation, add_special=False)
            return ([self.prefix], ids) if ids[:1] != [self.prefix] else (ids[:1], ids[1:])
        spaces = len(context) - len(context.rstrip())
        if spaces:
            context, continuation = context[:-spaces], context[-spaces:] + continuation
        whole, first = self.encode(context + continuation), self.encode(context)
        return whole[: len(first)], whole[len(first) :]

    def score(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Score]:
        """Return the score of each continuation; a context that is too long is cut at its beginning."""
        return [
            Score(math.fsum(e.logprob for e in entries), all(e.rank == 1 for e in entries))
            for entries in self.entries(pairs)
        ]

    def entries(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Sequence[Any]]:
        """Return a TokenLogprob for each token of each continuation."""
        for _, continuation in pairs:
            if len(continuation) >= self.longest:
                raise UserError(
                    f"a continuation must be below {self.longest:,} tokens, got {len(continuation):,}: raise "
                    "--max-model-len or split it",
                    param="--max-model-len",
                )
        whole = [[*context, *continuation][-self.longest :] for context, continuation in pairs]
        found = self._prompt_logprobs(whole)
        return [each[len(each) - len(after) :] for (_, after), each in zip(pairs, found, strict=True)]

    def windows(self, ids: Sequence[int]) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
        """Yield (context, continuation) pairs that score each token but the first once.

        Full windows follow each other, and the last one reaches back as far as it can.
        """
        done = 1
        while done < len(ids):
            end = min(len(ids), done + self.longest - 1)
            begin = max(0, end - self.longest)
            yield ids[begin:done], ids[done:end]
            done = end

    def rolling(self, texts: Sequence[str]) -> list[float]:
        """Return the log-probability of each whole text, including its first token."""
        pairs = [(i, pair) for i, text in enumerate(texts) for pair in self.windows(self._prefixed(text))]
        totals = [0.0] * len(texts)
        for (i, _), score in zip(pairs, self.score([pair for _, pair in pairs]), strict=True):
            totals[i] += score.logprob
        return totals

    def _prefixed(self, text: str) -> list[int]:
        ids = self.tokenizer.encode(text, add_special=False)
        return ids if ids[:1] == [self.prefix] else [self.prefix, *ids]

    def complete(self, asked: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
        """Return the completion of each (text, generation arguments of lm-eval)."""
        prompts, params, stops = [], [], []
        for text, options in asked:
            each, until = sampling(options, self.llm.tokenizer is not None, self._known)
            stops.append(until)
            params.append(each)
            prompts.append(self.encode(text)[-max(1, self.longest + 1 - each.max_tokens) :])
        found = []
        for start in range(0, len(prompts), AT_ONCE):
            part = slice(start, start + AT_ONCE)
            found += self.llm.generate(prompts[part], params[part])
        return [_until(self.tokenizer.decode(out.outputs[0].token_ids), s) for out, s in zip(found, stops, strict=True)]

    def _prompt_logprobs(self, prompts: Sequence[Sequence[int]]) -> list[tuple]:
        from dovetail.engine.request.params import SamplingParams

        params = SamplingParams(
            temperature=0, max_tokens=1, prompt_logprobs=0, ignore_eos=True, allowed_token_ids=self._known
        )
        found = []
        for start in range(0, len(prompts), AT_ONCE):
            found += [out.prompt_logprobs for out in self.llm.generate(prompts[start : start + AT_ONCE], params)]
        return found


def sampling(
    options: Mapping[str, Any], engine_stops: bool = True, allowed: tuple[int, ...] | None = None
) -> tuple[Any, list[str]]:
    """Return (SamplingParams, stop strings) for lm-eval's generation arguments; refuse unsupported ones."""
    from dovetail.engine.request.params import SamplingParams

    rest = dict(options)
    until = rest.pop("until", None) or []
    until = [until] if isinstance(until, str) else [stop for stop in until if stop]
    named = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
    longest = next((rest[name] for name in named if rest.get(name) is not None), MAX_NEW)
    sample, temperature = rest.pop("do_sample", None), float(rest.pop("temperature", None) or 0.0)
    if sample and not temperature:
        temperature = 1.0  # do_sample without a temperature
    if int(rest.pop("num_beams", 1)) != 1:
        raise UserError(
            f"num_beams must be 1, because the engine has no beam search, got {options['num_beams']}", param="num_beams"
        )
    kept = {name: rest.pop(name) for name in ("top_p", "top_k", "min_p", "repetition_penalty", "seed") if name in rest}
    unknown = sorted(set(rest) - set(named))
    if unknown:
        raise UserError(f"the task's generation_kwargs have {', '.join(unknown)}, which the engine does not support")
    params = SamplingParams(
        max_tokens=int(longest), temperature=temperature if sample is not False else 0.0,
        stop=tuple(until) if engine_stops else (), allowed_token_ids=allowed, **kept,
    )  # fmt: skip
    return params, until


def _until(text: str, stops: Sequence[str]) -> str:
    return text[: min((at for stop in stops if (at := text.find(stop)) >= 0), default=len(text))]


def lm_eval_model(model: EvalModel, name: str) -> Any:
    """Return `model` as a model of lm-eval."""
    LM: Any = import_module("lm_eval.api.model").LM  # an optional package, unknown to type checkers

    class DovetailLM(LM):
        tokenizer_name = name

        def loglikelihood(self, requests) -> list[tuple[float, bool]]:
            return [
                (score.logprob, score.greedy)
                for score in model.score([model.pair(*request.args) for request in requests])
            ]

        def loglikelihood_rolling(self, requests) -> list[float]:
            return model.rolling([request.args[0] for request in requests])

        def generate_until(self, requests) -> list[str]:
            return model.complete([request.args for request in requests])

        def apply_chat_template(self, chat_history, add_generation_prompt=True) -> str:
            prefill = dict(continue_final_message=True) if not add_generation_prompt else {}
            return model.tokenizer.apply_chat(chat_history, add_generation_prompt=add_generation_prompt, **prefill)

        def chat_template(self, chat_template: bool | str = False) -> str:
            return model.tokenizer.chat().source if chat_template else ""

    return DovetailLM()
