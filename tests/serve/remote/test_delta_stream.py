"""DeltaStream: a request's deltas between the engine's process and a slower reader."""

from __future__ import annotations

import asyncio

from dovetail.serve.remote.child import MAX_TOKENS, DeltaStream
from dovetail.serve.remote.wire import Delta, DeltaTimes, Logprob


def delta(tokens: list[int], index: int = 0, **more) -> Delta:
    logprobs = [Logprob(token, -0.5, 1, ()) for token in tokens]
    return Delta("r", index, tokens, DeltaTimes(0.0), logprobs, cached_tokens=3, **more)


def test_a_backlog_is_read_in_parts_between_other_tasks():
    async def main():
        stream, turns, parts = DeltaStream(2), 0, []
        for start in range(0, 1000, 10):
            stream.put(delta([*range(start, start + 10)]))
        stream.put(delta([], finished=True, finish_reason="stop"))
        stream.put(delta([7], index=1, finished=True, finish_reason="length", prompt_logprobs=[None]))

        async def other():
            nonlocal turns
            while stream._waiting:
                turns += 1
                await asyncio.sleep(0)

        beside = asyncio.create_task(other())
        while (part := await stream.get()) is not None:
            parts.append(part)
        await beside
        return turns, parts

    turns, parts = asyncio.run(main())
    assert all(len(part.tokens) <= MAX_TOKENS and len(part.logprobs) == len(part.tokens) for part in parts)
    assert turns >= 1000 // MAX_TOKENS, "the reader held the event loop"
    *first, last = (part for part in parts if part.index == 0)
    assert [token for part in (*first, last) for token in part.tokens] == [*range(1000)]
    assert not any(part.finished or part.finish_reason for part in first)
    assert (last.finished, last.finish_reason) == (True, "stop")
    assert parts[-1].prompt_logprobs == [None], "the request's last delta stays last"
