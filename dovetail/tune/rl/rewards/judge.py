"""A judge: another model, behind any endpoint that speaks OpenAI's API, reads the completion and says a number.

A request that fails is tried again; a row whose judge stays away, or says no number, is a None with the reason.
"""

from __future__ import annotations

import asyncio
import math
import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dovetail.core.choice import not_negative, require
from dovetail.tune.rl.rewards.deadline import seconds_left
from dovetail.tune.rl.rewards.matches import compiled, last_match
from dovetail.tune.rl.rewards.scored import NoReward
from dovetail.tune.rl.rewards.text import text_of, transcript_of

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
PLACE = re.compile(r"\{([A-Za-z_]\w*)\}")
OURS = ("prompt", "completion")
PASSING = {408, 409, 425, 429}  # and all from 500 on: worth another try
LONGEST_WAIT = 20.0  # seconds between two tries


@dataclass(frozen=True)
class Judge:
    """The number that the judge says, from `lowest` to `highest`, brought to 0 to 1.

    `{prompt}` and `{completion}` in the judge's prompt, and any `{column}` of the data, stand for the row's.
    """

    url: str  # such as http://127.0.0.1:8000/v1
    model: str
    prompt: str = PROMPT
    pattern: str = r"(?i)score\W{0,5}(-?\d+(?:\.\d+)?)"  # its last match's first group is the number
    lowest: float = 0.0
    highest: float = 10.0
    key: str = "OPENAI_API_KEY"  # the environment variable that holds the endpoint's key, if it wants one
    temperature: float = 0.0
    max_tokens: int = 512
    concurrency: int = 8  # requests at a time
    retries: int = 3  # after the first try
    wait: float = 0.5  # seconds before the second try; twice as long before each further one
    request_seconds: float = 30.0

    def __post_init__(self) -> None:
        require(
            self.url.startswith(("http://", "https://")), f"url must begin with http:// or https://; got {self.url!r}"
        )
        require(
            "{completion}" in self.prompt, "prompt must hold {completion}, or the judge does not see what it judges"
        )
        compiled("pattern", self.pattern)
        require(self.highest > self.lowest, f"highest must be above lowest ({self.lowest}); got {self.highest}")
        not_negative(self, "retries", "wait", "temperature")
        for name in ("concurrency", "max_tokens", "request_seconds"):
            require(getattr(self, name) > 0, f"{name} must be above 0; got {getattr(self, name)}")

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for name in PLACE.findall(self.prompt) if name not in OURS))

    async def __call__(self, prompts: list, completions: list, **columns: list) -> list[float | NoReward]:
        import httpx

        rows = range(len(completions))
        texts = [
            self._text({"prompt": transcript_of(prompts[i]), "completion": text_of(completions[i])}, columns, i)
            for i in rows
        ]
        gate = asyncio.Semaphore(self.concurrency)
        async with httpx.AsyncClient(timeout=self.request_seconds, headers=self._headers()) as client:
            tasks = [asyncio.create_task(self._one(client, gate, text)) for text in texts]
            return await _in_time(tasks, seconds_left())

    def _text(self, ours: dict[str, str], columns: dict[str, list], row: int) -> str:
        told = {**{name: str(values[row]) for name, values in columns.items()}, **ours}
        return PLACE.sub(lambda place: told.get(place[1], place[0]), self.prompt)

    def _headers(self) -> dict[str, str]:
        key = os.environ.get(self.key) if self.key else None
        return {"authorization": f"Bearer {key}"} if key else {}

    async def _one(self, client: httpx.AsyncClient, gate: asyncio.Semaphore, text: str) -> float | NoReward:
        failed = ""
        for attempt in range(self.retries + 1):
            async with gate:
                answer = await self._ask(client, text)
            if isinstance(answer, str):
                return self._number(answer)
            failed = answer.why
            if not answer.passing:
                break
            if attempt < self.retries:
                await asyncio.sleep(min(max(self.wait * 2**attempt, answer.after), LONGEST_WAIT))
        return NoReward("judge", failed)

    async def _ask(self, client: httpx.AsyncClient, text: str) -> str | _Refusal:
        import httpx

        url = self.url.rstrip("/").removesuffix("/chat/completions") + "/chat/completions"
        body = {
            "model": self.model, "messages": [{"role": "user", "content": text}], "temperature": self.temperature,
            "max_tokens": self.max_tokens,
        }  # fmt: skip
        try:
            # httpx limits each read; a server that sends a byte now and then is limited as a whole.
            async with asyncio.timeout(self.request_seconds):
                reply = await client.post(url, json=body)
        except (TimeoutError, httpx.TimeoutException):
            return _Refusal(f"the judge did not answer within {self.request_seconds:g} s")
        except httpx.HTTPError as error:
            return _Refusal(f"the judge could not be reached: {error or type(error).__name__}")
        return _content(reply)

    def _number(self, answer: str) -> float | NoReward:
        said = last_match(self.pattern, answer)
        try:
            number = float(said) if said is not None else math.nan
        except ValueError:
            number = math.nan
        if math.isnan(number):
            return NoReward("judge", f"the judge said no number: {_short(answer)}")
        if not self.lowest <= number <= self.highest:
            return NoReward("judge", f"the judge said {said}, which is not within {self.lowest:g} to {self.highest:g}")
        return (number - self.lowest) / (self.highest - self.lowest)


@dataclass(frozen=True)
class _Refusal:
    why: str
    passing: bool = True  # another try may help
    after: float = 0.0  # seconds that the endpoint asks to wait


def _content(reply: httpx.Response) -> str | _Refusal:
    if reply.status_code != 200:
        passing = reply.status_code in PASSING or reply.status_code >= 500
        why = f"the judge answered {reply.status_code}: {_short(reply.text)}"
        return _Refusal(why, passing, _seconds(reply.headers.get("retry-after", "")))
    try:
        content = reply.json()["choices"][0]["message"]["content"]
    except (ValueError, KeyError, IndexError, TypeError):
        content = None
    if not isinstance(content, str):
        return _Refusal(f"the judge answered with what is no chat completion: {_short(reply.text)}")
    return content


def _seconds(header: str) -> float:
    return float(header) if re.fullmatch(r"\d+(\.\d+)?", header) else 0.0


def _short(text: str) -> str:
    return repr(" ".join(text.split())[:120])


async def _in_time(tasks: list[asyncio.Task], seconds: float) -> list[Any]:
    """What each found; those that the reward's time limit cuts short say so."""
    if tasks:
        await asyncio.wait(tasks, timeout=max(seconds, 0) if math.isfinite(seconds) else None)
    late = [task for task in tasks if not task.done()]
    for task in late:
        task.cancel()
    await asyncio.gather(*late, return_exceptions=True)
    return [NoReward("time", "the judge had not answered when time was up") if t in late else t.result() for t in tasks]
