"""RequestTemplates: chat templates that requests bring, rendered in a process with limits (talk.template_process)."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from dovetail.core.errors import UserError
from dovetail.serve.talk.template_process import CPU_SECONDS, MEMORY, packed, read

SECONDS = 30.0  # in which an answer comes, its process started and the machine busy


class RequestTemplates:
    """Used from threads, one rendering at a time. The process is started for the first template."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen | None = None
        self._socket: socket.socket | None = None

    def render(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        **options: Any,
    ) -> str:
        """The prompt's text, as ChatTemplate.render gives it; ValueError where that fails or exceeds a limit."""
        asked = dict(source=source, special_tokens=special_tokens, messages=messages, tools=tools, options=options)
        with self._lock:
            try:
                answer = self._ask(packed(asked))
            except BaseException:
                self._end()
                raise
            if answer is None:
                self._end()
                raise UserError(
                    f"the chat template was ended: rendering it took more than {CPU_SECONDS:g} s of processor time or "
                    f"{MEMORY >> 20} MiB of memory"
                )
        if "error" in answer:
            raise UserError(answer["error"])
        return answer["text"]

    def _ask(self, message: bytes) -> dict[str, str] | None:
        """The answer; None where the process has ended, or does not answer."""
        if self._process is None or self._process.poll() is not None:
            self._end()
            self._start()
        assert self._socket is not None
        with suppress(OSError), self._socket.makefile("rb") as wire:
            self._socket.sendall(message)
            return read(wire)
        return None

    def _start(self) -> None:
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(SECONDS)
        with theirs:
            command = [sys.executable, "-m", "dovetail.serve.talk.template_process", str(theirs.fileno())]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)

    def _end(self) -> None:
        if self._socket is not None:
            self._socket.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._socket = self._process = None

    def close(self) -> None:
        """End the process; a rendering that is under way ends with it."""
        process = self._process  # killed without the lock: that rendering holds it until then
        if process is not None:
            process.kill()
        with self._lock:
            self._end()
