"""RequestTemplates: chat templates that requests bring, rendered in a process with limits (talk.template_process).

The process that renders the templates of requests: `python -m dovetail.serve.talk.request_templates FD`, started by
talk.request_templates with an inherited socket.

A template is a program of the client's. It is sandboxed as every template is (io.sandbox), and here it is also killed
with this process when it takes more than CPU_SECONDS, and fails when it takes more than MEMORY.
"""

from __future__ import annotations

import json
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO, Any

from dovetail.core.errors import UserError
from dovetail.io.chat import ChatTemplate

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
            command = [sys.executable, "-m", "dovetail.serve.talk.request_templates", str(theirs.fileno())]
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


CPU_SECONDS = 2.0  # of one rendering
MEMORY = 256 * 2**20  # bytes, beyond what the process has at its start
TEXT = 16 * 2**20  # characters of a prompt; the model's context is less
LENGTH = struct.Struct("<I")


def main(fd: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when this process ends, by closing the socket
    _limit_memory()
    with socket.socket(fileno=fd) as sock, sock.makefile("rb") as wire:
        while (asked := read(wire)) is not None:
            signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)  # its signal ends the process
            answer = _answer(asked)
            signal.setitimer(signal.ITIMER_PROF, 0)
            sock.sendall(packed(answer))


def read(wire: IO[bytes]) -> Any:
    """Return the next message; None at the end."""
    size = wire.read(LENGTH.size)
    if len(size) < LENGTH.size:
        return None
    payload = wire.read(LENGTH.unpack(size)[0])
    return json.loads(payload)


def packed(message: Any) -> bytes:
    payload = json.dumps(message).encode()
    return LENGTH.pack(len(payload)) + payload


def _answer(asked: dict[str, Any]) -> dict[str, str]:
    try:
        template = ChatTemplate(asked["source"], asked["special_tokens"])
        text = template.render(asked["messages"], asked["tools"], **asked["options"])
        if len(text) > TEXT:
            raise UserError(f"chat template: it wrote {len(text):,} characters, and at most {TEXT:,} are taken")
        return {"text": text}
    except ValueError as error:
        return {"error": str(error)[:2000]}
    except MemoryError:
        return {"error": "chat template: it takes too much memory"}


def _limit_memory() -> None:
    with suppress(OSError, ValueError):  # not every system has this limit
        with open("/proc/self/statm") as file:
            size = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))


if __name__ == "__main__":
    main(int(sys.argv[1]))
