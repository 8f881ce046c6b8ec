"""The process that renders the templates of requests: `python -m dovetail.serve.talk.template_process FD`, started by
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
import sys
from contextlib import suppress
from typing import IO, Any

from dovetail.core.errors import UserError
from dovetail.io.chat import ChatTemplate

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
