"""Outbox: what the engine's process has to say, on a thread of its own: neither a slow parent nor the making of
messages holds up a step. While the parent does not read, later updates of a sequence join the earlier, so what waits is
bounded by what the requests may generate."""

from __future__ import annotations

import os
import socket
import threading
from queue import Empty, SimpleQueue

from dovetail.engine.sequence import Sequence, Update
from dovetail.serve.messages import Delta, Deltas, FromEngine, Logprob, Times, frame


class Outbox:
    def __init__(self, sock: socket.socket):
        self._socket = sock
        self._queue: SimpleQueue[list[Update] | FromEngine | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="outbox", daemon=True)
        self._thread.start()

    def put(self, item: list[Update] | FromEngine) -> None:
        self._queue.put(item)

    def close(self, seconds: float = 2.0) -> None:
        """Send what is there, if the parent takes it in that time."""
        self._queue.put(None)
        self._thread.join(seconds)

    def _run(self) -> None:
        try:
            while self._send(self._waiting()):
                pass
        except OSError:  # the parent is gone
            os._exit(0)

    def _waiting(self) -> list[list[Update] | FromEngine | None]:
        """All that is there; at least one."""
        items = [self._queue.get()]
        try:
            while True:
                items.append(self._queue.get_nowait())
        except Empty:
            return items

    def _send(self, items: list[list[Update] | FromEngine | None]) -> bool:
        """In order; False after the last item there will be."""
        joined: dict[tuple[str, int], Update] = {}
        for item in items:
            if isinstance(item, list):
                for update in item:
                    key = update.id, update.index
                    joined[key] = joined.pop(key).then(update) if key in joined else update
                continue
            self._send_updates(joined)
            if item is None:
                return False
            self._socket.sendall(frame(item))
        self._send_updates(joined)
        return True

    def _send_updates(self, joined: dict[tuple[str, int], Update]) -> None:
        if joined:
            self._socket.sendall(frame(Deltas([_delta(update) for update in joined.values()])))
            joined.clear()


def _delta(update: Update) -> Delta:
    """The engine may be a step further by now: of what is not finished only times and counts are read."""
    seq, output = update.seq, update.output
    times = seq.times
    delta = Delta(
        update.id,
        update.index,
        update.tokens,
        Times(times.arrival, times.scheduled, times.first_token, times.finished),
        [Logprob(*entry) for entry in update.logprobs] if update.logprobs is not None else None,
        cached_tokens=seq.cached_tokens,
        weights_version=seq.versions[-1][1] if seq.versions else 0,
    )
    if update.finished:
        _finish(delta, seq)
    if output is not None and output.prompt_logprobs is not None:
        delta.prompt_logprobs = [entry and Logprob(*entry) for entry in output.prompt_logprobs]
    return delta


def _finish(delta: Delta, seq: Sequence) -> None:
    delta.finished, delta.finish_reason, delta.stop_reason = True, seq.finish_reason, seq.stop_reason
    delta.error = seq.extra.get("error")
