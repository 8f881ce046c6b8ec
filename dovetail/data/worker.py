"""Tokenise one part of a source: in this process, or as `python -m dovetail.data.worker FOLDER`, many at a time.

As a process it takes part numbers on stdin and answers in lines of JSON on stdout. It ends with its stdin, so that it
does not outlive whoever started it. Processes and not a pool of them: a pool would import the user's script again.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dovetail.core.errors import UserError, as_user_error
from dovetail.data.cache import part_path
from dovetail.data.encoder import Encoder, from_spec
from dovetail.data.readers import Span, read

JOB = "job.json"
BATCH_CHARACTERS, BATCH_DOCUMENTS = 1 << 20, 1024  # given to the tokenizer at a time
REPORT_SECONDS = 0.2

Report = Callable[[int, int], None]  # bytes of the source behind us, tokens written: of this part, so far


@dataclass
class Job:
    """What all parts of a source share, and the spans of each."""

    text_key: str
    dtype: str
    parts: list[list[Span]]

    @classmethod
    def load(cls, folder: Path) -> tuple[Job, Encoder]:
        found = json.loads((folder / JOB).read_text())
        encoder = from_spec(found.pop("encoder"))
        found["parts"] = [[Span(**span) for span in part] for part in found["parts"]]
        return cls(**found), encoder

    def save(self, folder: Path, encoder: Encoder) -> None:
        (folder / JOB).write_text(json.dumps(asdict(self) | {"encoder": encoder.spec()}))


def tokenise(job: Job, encoder: Encoder, folder: Path, index: int, report: Report) -> int:
    """Writes NNNNN.bin and, last of all, NNNNN.npz: a part with the latter is whole. Returns the number of tokens."""
    beside = folder / f"{index:05d}.{os.getpid()}.new"
    lengths, text_bytes, empty, tokens = [], 0, 0, 0
    with beside.open("wb") as file:
        for texts, done in _batches(job, index):
            kept = [text for text in texts if text]
            empty += len(texts) - len(kept)
            text_bytes += sum(len(text.encode()) for text in kept)
            ids = encoder.encode(kept) if kept else []
            for document in ids:
                document.astype(job.dtype).tofile(file)
            lengths += [len(document) for document in ids]
            tokens += sum(len(document) for document in ids)
            report(done, tokens)
    beside.replace(part_path(folder, index))
    with beside.open("wb") as file:
        np.savez(file, lengths=np.asarray(lengths, np.int64), text_bytes=text_bytes, empty=empty)
    beside.replace(counts_path(folder, index))
    return tokens


def counts_path(folder: Path, index: int) -> Path:
    return folder / f"{index:05d}.npz"


def _batches(job: Job, index: int) -> Iterator[tuple[list[str], int]]:
    """Documents of a part, some at a time, with the bytes of the source behind them."""
    texts, characters, before, done = [], 0, 0, 0
    for span in job.parts[index]:
        for text, position in read(span, job.text_key):
            texts.append(text)
            characters += len(text)
            done = before + position
            if characters >= BATCH_CHARACTERS or len(texts) >= BATCH_DOCUMENTS:
                yield texts, done
                texts, characters = [], 0
        before += span.size
    if texts:
        yield texts, before


# --- as a process -----------------------------------------------------------------------------------------------------


def main(folder: Path) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a ctrl-C is for whoever started this to answer
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(waiting,), daemon=True).start()
    job, encoder = Job.load(folder)
    while True:
        index = waiting.get()
        try:
            tokens = tokenise(job, encoder, folder, index, _reporter())
        except BrokenPipeError:
            return
        except (UserError, OSError) as error:
            _say({"error": str(as_user_error(error) or error)})
            return
        _say({"finished": index, "tokens": tokens})


def _listen(waiting: queue.SimpleQueue[int]) -> None:
    for line in sys.stdin:
        waiting.put(int(line))
    os._exit(0)  # what started this has ended, and must not find it at work when it starts again


def _reporter() -> Report:
    last = time.monotonic()

    def report(done: int, tokens: int) -> None:
        nonlocal last
        if time.monotonic() - last > REPORT_SECONDS:
            last = time.monotonic()
            _say({"done": done, "tokens": tokens})

    return report


def _say(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
