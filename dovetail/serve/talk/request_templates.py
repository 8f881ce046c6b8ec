"""RequestTemplates: chat templates that requests bring, rendered in a process with limits on time and memory.

The process is this module: `python -m dovetail.serve.talk.request_templates FD`. A template is a program of the client.
It is sandboxed like every template (io.sandbox). In addition the process is killed when one rendering takes more than
CPU_SECONDS, and a rendering fails when it takes more than MEMORY.
"""

from __future__ import annotations

import json
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from dovetail.core.errors import RequestError, UserError
from dovetail.io.chat import ChatTemplate
from dovetail.serve.remote.wire import framed, read_frame, start_process

SECONDS = 30.0  # for an answer, including the start of the process on a busy machine
CPU_SECONDS = 2.0  # of one rendering
MEMORY = 256 * 2**20  # bytes, beyond what the process has at its start
MAX_TEXT = 16 * 2**20  # characters of a prompt; the model's context is less


class RequestTemplates:
    """Render templates one at a time, from any thread. The process is started for the first template."""

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
        """Return the prompt's text, as ChatTemplate.render does.

        Raises:
            RequestError: The template fails or exceeds a limit.
        """
        asked = dict(source=source, special_tokens=special_tokens, messages=messages, tools=tools, options=options)
        with self._lock:
            try:
                answer = self._ask(json.dumps(asked).encode())
            except BaseException:
                self._end()
                raise
            if answer is None:
                self._end()
                raise RequestError(
                    f"the chat template took more than {CPU_SECONDS:g} s of processor time or {MEMORY >> 20} MiB of "
                    "memory",
                    param="chat_template",
                )
        if "error" in answer:
            raise RequestError(answer["error"], param="chat_template")
        return answer["text"]

    def _ask(self, message: bytes) -> dict[str, str] | None:
        """Return the process's answer, or None if it has ended or does not answer."""
        if self._process is None or self._process.poll() is not None:
            self._end()
            self._start()
        assert self._socket is not None
        with suppress(OSError), self._socket.makefile("rb") as wire:
            self._socket.sendall(framed(message))
            answer = read_frame(wire)
            return None if answer is None else json.loads(answer)
        return None

    def _start(self) -> None:
        command = sys.executable, "-m", "dovetail.serve.talk.request_templates"
        self._process, self._socket = start_process(*command)
        self._socket.settimeout(SECONDS)

    def _end(self) -> None:
        if self._socket is not None:
            self._socket.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._socket = self._process = None

    def close(self) -> None:
        """End the process, and with it a rendering in progress."""
        process = self._process  # killed without the lock, which that rendering holds
        if process is not None:
            process.kill()
        with self._lock:
            self._end()


# --- the process ------------------------------------------------------------------------------------------------------


def main(fd: int) -> None:
    """Render the templates that arrive on the socket `fd` until it is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process by closing the socket
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # a parent that was profiled may ignore it, and children inherit that
    _limit_memory()
    with socket.socket(fileno=fd) as sock, sock.makefile("rb") as wire:
        while (asked := read_frame(wire)) is not None:
            signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)  # its signal ends the process
            answer = _answer(json.loads(asked))
            signal.setitimer(signal.ITIMER_PROF, 0)
            sock.sendall(framed(json.dumps(answer).encode()))


def _answer(asked: dict[str, Any]) -> dict[str, str]:
    try:
        template = ChatTemplate(asked["source"], asked["special_tokens"])
        text = template.render(asked["messages"], asked["tools"], **asked["options"])
    except UserError as error:
        return {"error": str(error)[:2000]}
    except MemoryError:
        return {"error": "chat template: it needs too much memory"}
    if len(text) > MAX_TEXT:
        return {"error": f"chat template: its text must have at most {MAX_TEXT:,} characters, got {len(text):,}"}
    return {"text": text}


def _limit_memory() -> None:
    with suppress(OSError, ValueError):  # not every system has this limit
        with open("/proc/self/statm") as file:
            size = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))


if __name__ == "__main__":
    main(int(sys.argv[1]))
