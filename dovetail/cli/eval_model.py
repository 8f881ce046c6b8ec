"""The engine as a judge of text: log-probabilities and completions, for our own tasks and for lm-eval's."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple

from dovetail.core.errors import UserError

AT_ONCE = 2048  # prompts handed to the engine together: their log-probabilities are kept until all are done
MAX_NEW = 256  # tokens of an answer, where a task does not say


class Score(NamedTuple):
    logprob: float
    greedy: bool  # whether each token was the most probable one


class Bytes:
    """A tokenizer for models of raw UTF-8 bytes: ids 0 to 255, and 256 between documents."""

    bos_id, eos_id = None, 256

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])


class Judge:
    """`tokenizer`: the model's own, if None."""

    def __init__(self, llm: Any, tokenizer: Any = None):
        self.llm, self.tokenizer = llm, tokenizer or llm.tokenizer
        if self.tokenizer is None:
            raise UserError(
                "the model has no tokenizer, so text cannot be judged: give --tokenizer bytes if it reads raw bytes"
            )
        self.longest = llm.engine.scheduler.config.max_model_len - 1  # the engine samples a token after every prompt
        self._bos = self._before_text()
        self._known = self._padded_to()

    def _padded_to(self) -> tuple[int, ...] | None:
        """The ids that have a text, where a model has more of them: one that is hardly trained samples the others too,
        and the engine cannot write them."""
        own = self.llm.tokenizer
        if own is None or own.vocab_size >= self.llm.config.vocab:
            return None
        return tuple(own.backend.get_vocab().values())

    def _before_text(self) -> list[int]:
        """[BOS], where the tokenizer puts it. Seen on a text: BOS and EOS may be one token."""
        bare, framed = (self.tokenizer.encode("a", add_special=special) for special in (False, True))
        bos = self.tokenizer.bos_id
        return [bos] if bos is not None and framed[: len(bare) + 1] == [bos, *bare] else []

    def encode(self, text: str) -> list[int]:
        """With BOS in front where the tokenizer puts one (once: a chat template writes its own), and no EOS behind."""
        ids = self.tokenizer.encode(text, add_special=False)
        return ids if ids[:1] == self._bos else self._bos + ids

    def document(self, text: str) -> list[int]:
        """As a text stands in training: the end token is one of those to predict."""
        ids, end = self.encode(text), self.tokenizer.eos_id
        return ids if end is None or ids[-1:] == [end] else [*ids, end]

    @property
    def prefix(self) -> int:
        """What stands before a text that has nothing before it."""
        config = self.llm.config
        for token in (self.tokenizer.bos_id, self.tokenizer.eos_id, config.bos_id, *config.eos_ids):
            if token is not None:
                return token
        raise UserError("the model names neither a BOS nor an EOS token, so a text's first token cannot be scored")

    def pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Both as ids. They are tokenized together and cut where the context ends; spaces between them belong to the
        continuation, for so it was when the model was trained."""
        if not context:
            ids = self.tokenizer.encode(continuation, add_special=False)
            return ([self.prefix], ids) if ids[:1] != [self.prefix] else (ids[:1], ids[1:])
        spaces = len(context) - len(context.rstrip())
        if spaces:
            context, continuation = context[:-spaces], context[-spaces:] + continuation
        whole, first = self.encode(context + continuation), self.encode(context)
        return whole[: len(first)], whole[len(first) :]

    def score(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Score]:
        """Of each continuation after its context. A context that is too long loses its beginning."""
        return [
            Score(math.fsum(e.logprob for e in entries), all(e.rank == 1 for e in entries))
            for entries in self.entries(pairs)
        ]

    def entries(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Sequence[Any]]:
        """A TokenLogprob for each token of each continuation."""
        for _, continuation in pairs:
            if len(continuation) >= self.longest:
                raise UserError(
                    f"a continuation of {len(continuation):,} tokens cannot be scored: with a token before it at most "
                    f"{self.longest:,} fit; raise --max-model-len or split it"
                )
        whole = [[*context, *continuation][-self.longest :] for context, continuation in pairs]
        found = self._prompt_logprobs(whole)
        return [each[len(each) - len(after) :] for (_, after), each in zip(pairs, found, strict=True)]

    def windows(self, ids: Sequence[int]) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
        """(context, continuation) pairs in which each token but the first is scored once. Full windows follow each
        other, and the last one reaches back as far as it can."""
        done = 1
        while done < len(ids):
            end = min(len(ids), done + self.longest - 1)
            begin = max(0, end - self.longest)
            yield ids[begin:done], ids[done:end]
            done = end

    def rolling(self, texts: Sequence[str]) -> list[float]:
        """The log-probability of each whole text, from its first token on."""
        pairs = [(i, pair) for i, text in enumerate(texts) for pair in self.windows(self._prefixed(text))]
        totals = [0.0] * len(texts)
        for (i, _), score in zip(pairs, self.score([pair for _, pair in pairs]), strict=True):
            totals[i] += score.logprob
        return totals

    def _prefixed(self, text: str) -> list[int]:
        ids = self.tokenizer.encode(text, add_special=False)
        return ids if ids[:1] == [self.prefix] else [self.prefix, *ids]

    def complete(self, asked: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
        """The answer to each (text, lm-eval's generation arguments)."""
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
    """(SamplingParams, stop strings) of lm-eval's generation arguments. What cannot be honoured is refused."""
    from dovetail.engine.request.params import SamplingParams

    rest = dict(options)
    until = rest.pop("until", None) or []
    until = [until] if isinstance(until, str) else [stop for stop in until if stop]
    named = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
    longest = next((rest[name] for name in named if rest.get(name) is not None), MAX_NEW)
    sample, temperature = rest.pop("do_sample", None), float(rest.pop("temperature", None) or 0.0)
    if sample and not temperature:
        temperature = 1.0  # sampling was asked for without a temperature
    if int(rest.pop("num_beams", 1)) != 1:
        raise UserError(f"num_beams={options['num_beams']}: the engine samples one token at a time; leave it at 1")
    kept = {name: rest.pop(name) for name in ("top_p", "top_k", "min_p", "repetition_penalty", "seed") if name in rest}
    unknown = sorted(set(rest) - set(named))
    if unknown:
        raise UserError(
            f"the task asks for {', '.join(unknown)} in its generation_kwargs, which the engine does not know"
        )
    params = SamplingParams(
        max_tokens=int(longest), temperature=temperature if sample is not False else 0.0,
        stop=tuple(until) if engine_stops else (), allowed_token_ids=allowed, **kept,
    )  # fmt: skip
    return params, until


def _until(text: str, stops: Sequence[str]) -> str:
    return text[: min((at for stop in stops if (at := text.find(stop)) >= 0), default=len(text))]


def lm_eval_model(judge: Judge, name: str) -> Any:
    """The judge, as lm-eval asks a model."""
    LM: Any = import_module("lm_eval.api.model").LM  # an extra: type checkers may not find it

    class DovetailLM(LM):
        tokenizer_name = name

        def loglikelihood(self, requests) -> list[tuple[float, bool]]:
            return [
                (score.logprob, score.greedy)
                for score in judge.score([judge.pair(*request.args) for request in requests])
            ]

        def loglikelihood_rolling(self, requests) -> list[float]:
            return judge.rolling([request.args[0] for request in requests])

        def generate_until(self, requests) -> list[str]:
            return judge.complete([request.args for request in requests])

        def apply_chat_template(self, chat_history, add_generation_prompt=True) -> str:
            prefill = dict(continue_final_message=True) if not add_generation_prompt else {}
            return judge.tokenizer.apply_chat(chat_history, add_generation_prompt=add_generation_prompt, **prefill)

        def chat_template(self, chat_template: bool | str = False) -> str:
            return judge.tokenizer.chat().source if chat_template else ""

    return DovetailLM()
