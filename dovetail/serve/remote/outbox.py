"""Outbox: the thread that sends the messages of the engine's process.

Neither encoding nor a slow parent delays a step. While the parent does not read, later updates of a sequence are
joined to earlier ones, so that memory is bounded by what the requests may generate.
"""

from __future__ import annotations

import os
import socket
import threading
from queue import Empty, SimpleQueue

from dovetail.engine.request.outputs import OutputDelta
from dovetail.serve.remote.wire import Delta, Deltas, DeltaTimes, FromEngine, Logprob, frame


class Outbox:
    """Send messages and the engine's updates over a socket, in order, from a thread."""

    def __init__(self, sock: socket.socket):
        self._socket = sock
        self._queue: SimpleQueue[list[OutputDelta] | FromEngine | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="outbox", daemon=True)
        self._thread.start()

    def put(self, item: list[OutputDelta] | FromEngine) -> None:
        """Queue a message, or the updates of one step."""
        self._queue.put(item)

    def close(self, seconds: float = 2.0) -> None:
        """Send what is queued, if the parent reads it within `seconds`, and end the thread."""
        self._queue.put(None)
        self._thread.join(seconds)

    def _run(self) -> None:
        try:
            while self._send(self._waiting()):
                pass
        except OSError:  # the parent has ended
            os._exit(0)

    def _waiting(self) -> list[list[OutputDelta] | FromEngine | None]:
        """Wait for an item, and return everything that is queued."""
        items = [self._queue.get()]
        try:
            while True:
                items.append(self._queue.get_nowait())
        except Empty:
            return items

    def _send(self, items: list[list[OutputDelta] | FromEngine | None]) -> bool:
        """Send the items in order; return False after the last one (None)."""
        joined: dict[tuple[str, int], OutputDelta] = {}
        for item in items:
            if isinstance(item, list):
                for update in item:
                    key = update.request_id, update.index
                    joined[key] = joined.pop(key).then(update) if key in joined else update
                continue
            self._send_updates(joined)
            if item is None:
                return False
            self._socket.sendall(frame(item))
        self._send_updates(joined)
        return True

    def _send_updates(self, joined: dict[tuple[str, int], OutputDelta]) -> None:
        if joined:
            self._socket.sendall(frame(Deltas([_delta(update) for update in joined.values()])))
            joined.clear()


def _delta(update: OutputDelta) -> Delta:
    times = update.times
    delta = Delta(
        update.request_id,
        update.index,
        update.token_ids,
        DeltaTimes(times.arrival, times.scheduled, times.first_token, times.finished),
        [Logprob(*entry) for entry in update.logprobs] if update.logprobs is not None else None,
        cached_tokens=update.num_cached_tokens,
        weights_version=update.weights_version,
    )
    if update.finished:
        delta.finished, delta.finish_reason, delta.stop_reason = True, update.finish_reason, update.stop_reason
        delta.error = update.error
    if update.prompt_logprobs is not None:
        delta.prompt_logprobs = [entry and Logprob(*entry) for entry in update.prompt_logprobs]
    return delta
