"""Rewards by other models: a judge behind an OpenAI endpoint, and a reward model in this process."""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from dovetail.core.choice import not_negative, require
from dovetail.core.errors import RecipeError, UserError
from dovetail.core.recipe import read
from dovetail.core.training import TorchModel
from dovetail.tune.rl.rewards.completion import NoReward, last_match, require_pattern, text_of, transcript_of
from dovetail.tune.rl.rewards.worker import seconds_left

if TYPE_CHECKING:
    import httpx

PROMPT = """Judge how good an answer is to what was asked: whether it is right, complete and to the point.

What was asked:
{prompt}

The answer:
{completion}

Say in a sentence or two what is good and what is wrong. Then end with one line of the form
Score: N
where N is a whole number from 0 (useless) to 10 (could not be better)."""
FIELD = re.compile(r"\{([A-Za-z_]\w*)\}")
OWN_FIELDS = ("prompt", "completion")
RETRIED = {408, 409, 425, 429}  # status codes, and all from 500 on
MAX_WAIT = 20.0  # seconds between two attempts
Document = str | list[dict[str, Any]]


@dataclass(frozen=True)
class JudgeReward:
    """Have a model behind an OpenAI endpoint rate the completion, and scale its rating to 0 to 1.

    A failed request is repeated. A row whose judge does not answer, or gives no number, has a NoReward.

    Attributes:
        url: The endpoint, such as http://127.0.0.1:8000/v1.
        model: The judge's name there.
        prompt: The judge's prompt; {prompt}, {completion} and any {column} of the data stand for the row's values.
        pattern: The first group of its last match in the judge's answer is the rating.
        lowest: The rating that gives 0.
        highest: The rating that gives 1.
        key: The environment variable with the endpoint's API key, if it needs one.
        temperature: Of the judge's sampling.
        max_tokens: Of the judge's answer.
        concurrency: Requests in flight.
        retries: Attempts after the first.
        wait: Seconds before the second attempt; doubled before each further one.
        request_seconds: Time limit of a request.
    """

    url: str
    model: str
    prompt: str = PROMPT
    pattern: str = r"(?i)score\W{0,5}(-?\d+(?:\.\d+)?)"
    lowest: float = 0.0
    highest: float = 10.0
    key: str = "OPENAI_API_KEY"
    temperature: float = 0.0
    max_tokens: int = 512
    concurrency: int = 8
    retries: int = 3
    wait: float = 0.5
    request_seconds: float = 30.0

    def __post_init__(self) -> None:
        is_http = self.url.startswith(("http://", "https://"))
        require(is_http, f"url must begin with http:// or https://; got {self.url!r}", param="url")
        has_completion = "{completion}" in self.prompt
        require(has_completion, "prompt must contain {completion}, the text to judge", param="prompt")
        require_pattern("pattern", self.pattern)
        is_range = self.highest > self.lowest
        require(is_range, f"highest must be above lowest={self.lowest}; got {self.highest}", param="highest")
        not_negative(self, "retries", "wait", "temperature")
        for name in ("concurrency", "max_tokens", "request_seconds"):
            require(getattr(self, name) > 0, f"{name} must be above 0; got {getattr(self, name)}", param=name)

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that the prompt names."""
        return tuple(dict.fromkeys(name for name in FIELD.findall(self.prompt) if name not in OWN_FIELDS))

    async def __call__(self, prompts: list, completions: list, **columns: list) -> list[float | NoReward]:
        """Return the reward of each completion."""
        import httpx

        texts = [
            self._filled({"prompt": transcript_of(prompts[i]), "completion": text_of(completions[i])}, columns, i)
            for i in range(len(completions))
        ]
        gate = asyncio.Semaphore(self.concurrency)
        async with httpx.AsyncClient(timeout=self.request_seconds, headers=self._headers()) as client:
            tasks = [asyncio.create_task(self._score(client, gate, text)) for text in texts]
            return await _in_time(tasks, seconds_left())

    def _filled(self, own: dict[str, str], columns: dict[str, list], row: int) -> str:
        """Return the judge's prompt for one row."""
        values = {**{name: str(column[row]) for name, column in columns.items()}, **own}
        return FIELD.sub(lambda field: values.get(field[1], field[0]), self.prompt)

    def _headers(self) -> dict[str, str]:
        key = os.environ.get(self.key) if self.key else None
        return {"authorization": f"Bearer {key}"} if key else {}

    async def _score(self, client: httpx.AsyncClient, gate: asyncio.Semaphore, text: str) -> float | NoReward:
        failed = ""
        for attempt in range(self.retries + 1):
            async with gate:
                answer = await self._ask(client, text)
            if isinstance(answer, str):
                return self._rating(answer)
            failed = answer.reason
            if not answer.may_pass:
                break
            if attempt < self.retries:
                await asyncio.sleep(min(max(self.wait * 2**attempt, answer.after), MAX_WAIT))
        return NoReward("judge", failed)

    async def _ask(self, client: httpx.AsyncClient, text: str) -> str | _Failure:
        import httpx

        url = self.url.rstrip("/").removesuffix("/chat/completions") + "/chat/completions"
        body = {
            "model": self.model, "messages": [{"role": "user", "content": text}], "temperature": self.temperature,
            "max_tokens": self.max_tokens,
        }  # fmt: skip
        try:
            # httpx limits each read only: a server that sends a byte now and then would never time out.
            async with asyncio.timeout(self.request_seconds):
                reply = await client.post(url, json=body)
        except (TimeoutError, httpx.TimeoutException):
            return _Failure(f"the judge did not answer within {self.request_seconds:g} s")
        except httpx.HTTPError as error:
            return _Failure(f"the judge could not be reached: {error or type(error).__name__}")
        return _content(reply)

    def _rating(self, answer: str) -> float | NoReward:
        rating = last_match(self.pattern, answer)
        try:
            number = float(rating) if rating is not None else math.nan
        except ValueError:
            number = math.nan
        if math.isnan(number):
            return NoReward("judge", f"the judge gave no number: {_short(answer)}")
        if not self.lowest <= number <= self.highest:
            return NoReward("judge", f"the judge gave {rating}, expected {self.lowest:g} to {self.highest:g}")
        return (number - self.lowest) / (self.highest - self.lowest)


@dataclass(frozen=True)
class _Failure:
    reason: str
    may_pass: bool = True  # whether another attempt may help
    after: float = 0.0  # seconds that the endpoint asks to wait


def _content(reply: httpx.Response) -> str | _Failure:
    if reply.status_code != 200:
        may_pass = reply.status_code in RETRIED or reply.status_code >= 500
        reason = f"the judge answered {reply.status_code}: {_short(reply.text)}"
        return _Failure(reason, may_pass, _seconds(reply.headers.get("retry-after", "")))
    try:
        content = reply.json()["choices"][0]["message"]["content"]
    except (ValueError, KeyError, IndexError, TypeError):
        content = None
    if not isinstance(content, str):
        return _Failure(f"the judge did not answer with a chat completion: {_short(reply.text)}")
    return content


def _seconds(header: str) -> float:
    return float(header) if re.fullmatch(r"\d+(\.\d+)?", header) else 0.0


def _short(text: str) -> str:
    return repr(" ".join(text.split())[:120])


async def _in_time(tasks: list[asyncio.Task], seconds: float) -> list[Any]:
    """Return the result of each task; a NoReward for those that are not done within the time limit."""
    if tasks:
        await asyncio.wait(tasks, timeout=max(seconds, 0) if math.isfinite(seconds) else None)
    late = [task for task in tasks if not task.done()]
    for task in late:
        task.cancel()
    await asyncio.gather(*late, return_exceptions=True)
    timeout = NoReward("time", "the judge did not answer before the time limit of the reward")
    return [timeout if task in late else task.result() for task in tasks]


# --- a reward model ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelReward:
    """Give the score of a reward model, which runs in this process.

    A prompt of messages makes a conversation with its completion. A prompt of text is followed by the completion and
    `suffix`. All rows go to the model in one call.

    Attributes:
        model: An `LLM` of a reward model or any object with `score(texts)`; or a name or folder, which is loaded; or
            {torch: package.module:function, tokenizer: ...} for a torch module.
        suffix: Text after the completion, where the model has learnt to read its score there.
        options: Arguments of dovetail.LLM for a model that is loaded here.
    """

    model: Any
    suffix: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)

    columns: ClassVar[tuple[str, ...]] = ()
    in_process: ClassVar[bool] = True
    _name: ClassVar[str] = ""  # of a model that was loaded here

    @property
    def identity(self) -> Any:
        """Values to fingerprint (see user_code): a model that was loaded counts by its name."""
        return [self._name or type(self.model).__name__, self.suffix, dict(self.options)]

    def __post_init__(self) -> None:
        object.__setattr__(self, "_name", _name_of(self.model))
        if isinstance(self.model, Mapping):
            object.__setattr__(self, "model", torch_scorer(read(TorchModel, self.model, "model")))
        if isinstance(self.model, str):
            from dovetail.engine.llm import LLM

            try:
                object.__setattr__(self, "model", LLM(self.model, **self.options))
            except UserError as error:
                raise RecipeError(f"model {self.model!r} cannot be loaded: {error}", param="model") from error
        else:
            kind = type(self.model).__name__
            require(hasattr(self.model, "score"), f"model must have score(texts); got a {kind}", param="model")
            require(
                not self.options,
                f"options require a model given by its name; got {dict(self.options)}",
                param="options",
            )

    def __call__(self, prompts: list, completions: list) -> list[float]:
        """Return the reward of each completion."""
        documents = [self._document(p, c) for p, c in zip(prompts, completions, strict=True)]
        scores: dict[int, float] = {}
        for kind in (str, list):  # a call of `score` takes texts or conversations
            rows = [i for i, document in enumerate(documents) if isinstance(document, kind)]
            if rows:
                scored = self.model.score([documents[i] for i in rows])
                scores |= {i: float(score) for i, score in zip(rows, scored, strict=True)}
        return [scores[i] for i in range(len(documents))]

    def _document(self, prompt: Any, completion: Any) -> Document:
        if isinstance(prompt, str):
            return prompt + text_of(completion) + self.suffix
        answer = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion
        return [*prompt, *answer]


def _name_of(model: Any) -> str:
    """Return what stands for a model that is loaded here in a fingerprint; empty for an object."""
    if isinstance(model, Mapping):
        return json.dumps(dict(model), sort_keys=True, default=str)
    return model if isinstance(model, str) else ""


def torch_scorer(model: TorchModel) -> Any:
    """Return an object that scores texts with a torch module.

    Raises:
        RecipeError: The module cannot be built, or has no tokenizer.
    """
    from dovetail.data.encoder import find_tokenizer
    from dovetail.interop.torch.scorer import TorchScorer

    tokenizer = find_tokenizer(model.tokenizer) if model.tokenizer else None
    require(
        tokenizer is not None,
        f"model.tokenizer must name the tokenizer of the torch module, got {model.tokenizer!r}: a folder, a name or a "
        "hub id",
        param="model.tokenizer",
    )
    return TorchScorer(model, tokenizer)
