"""Tokenise the documents of pretraining once, into a cache that is found again as long as nothing changed.

A source is divided into parts, which are tokenised in this process or in several (`python -m dovetail.data.tokenise
FOLDER`). Parts that a killed run had finished are kept for the next run. A process takes part numbers on stdin, reports
as lines of JSON on stdout, and ends with its stdin, so that it does not outlive its parent. These are processes and not
a multiprocessing pool because a pool would import the user's script again.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dovetail.core.errors import FileError, UserError, as_user_error
from dovetail.core.reporter import Progress
from dovetail.core.units import format_count
from dovetail.data import sources
from dovetail.data.cache import CacheMeta, TokenStore, cached, part_path, token_dtype
from dovetail.data.encoder import Encoder, from_spec, identity, make
from dovetail.data.readers import FileSpan, documents
from dovetail.data.settings import Data, Source
from dovetail.data.sources import Files

if TYPE_CHECKING:
    from dovetail.io.tokenizer import Tokenizer

SMALLEST_PART, MOST_PARTS = 4 << 20, 256  # bytes of the source; every reader opens one file per part
BATCH_CHARACTERS, BATCH_DOCUMENTS = 1 << 20, 1024  # given to the tokenizer at a time
REPORT_SECONDS = 0.2
JOB = "job.json"

Report = Callable[[int, int], None]  # of one part: (bytes of the source done, tokens written)


def prepare(
    data: Data,
    tokenizer: Tokenizer | None = None,
    directory: str | Path = "",
    progress: Progress | None = None,
    processes: int = 0,
) -> tuple[TokenStore, ...]:
    """Return the token caches of all sources, in their order; those that are missing or out of date are made.

    Args:
        data: The settings.
        tokenizer: The model's own, for an empty `data.tokenizer`.
        directory: The folder of the caches; default: `data.cache`.
        progress: Called with (what, done, total).
        processes: How many to use; 0: one per core.
    """
    encoder = make(data.tokenizer, tokenizer)
    return tuple(_open(source, encoder, directory or data.cache, progress, processes) for source in data.sources)


def _open(
    source: Source, encoder: Encoder, directory: str | Path, progress: Progress | None, processes: int
) -> TokenStore:
    def write(folder: Path, files: Files, mark: str) -> None:
        for torn in folder.glob("*.new"):
            torn.unlink()
        job = TokeniseJob(source.text_key, token_dtype(encoder.vocab_size), _parts(source, files))
        job.save(folder, encoder)
        _Run(job, encoder, folder, files.name, progress).run(processes or _cores())
        _finish(job, encoder, folder, files.name, mark)

    return TokenStore(cached(source, [source.text_key, identity(encoder)], directory, write, progress))


def _parts(source: Source, files: Files) -> list[list[FileSpan]]:
    """Gather spans into parts of about one size.

    They depend on the files alone: a run that continues after a killed one finds the same parts on any machine.
    """
    total = sum(path.stat().st_size for path in files.paths)
    largest = max(SMALLEST_PART, -(-total // MOST_PARTS))
    parts: list[list[FileSpan]] = [[]]
    size = 0
    for span in sources.split(files, source, largest):
        if size and size + span.size > largest * 1.5:
            parts.append([])
            size = 0
        parts[-1].append(span)
        size += span.size
    return parts


def _finish(job: TokeniseJob, encoder: Encoder, folder: Path, name: str, mark: str) -> None:
    counts = [dict(np.load(counts_path(folder, index))) for index in range(len(job.parts))]
    offsets = np.concatenate([[0], *(part["lengths"] for part in counts)]).cumsum()
    if len(offsets) == 1:
        raise UserError(
            f"{name} holds no text: every document in it is empty; check text_key, which is {job.text_key!r}",
            param="text_key",
        )
    CacheMeta(
        name, mark, job.dtype, encoder.eos_id, encoder.vocab_size, [len(part["lengths"]) for part in counts],
        documents=len(offsets) - 1, tokens=int(offsets[-1]), text_bytes=sum(int(part["text_bytes"]) for part in counts),
        empty=sum(int(part["empty"]) for part in counts),
    ).write(folder, offsets)  # fmt: skip
    for index in range(len(job.parts)):
        counts_path(folder, index).unlink()
    (folder / JOB).unlink()


# --- one part ---------------------------------------------------------------------------------------------------------


@dataclass
class TokeniseJob:
    """Hold what all parts of a source share, and the spans of each part."""

    text_key: str
    dtype: str
    parts: list[list[FileSpan]]

    @classmethod
    def load(cls, folder: Path) -> tuple[TokeniseJob, Encoder]:
        """Read what `save` wrote."""
        found = json.loads((folder / JOB).read_text())
        encoder = from_spec(found.pop("encoder"))
        found["parts"] = [[FileSpan(**span) for span in part] for part in found["parts"]]
        return cls(**found), encoder

    def save(self, folder: Path, encoder: Encoder) -> None:
        """Write the job for the worker processes."""
        (folder / JOB).write_text(json.dumps(asdict(self) | {"encoder": encoder.spec()}))


def tokenise(job: TokeniseJob, encoder: Encoder, folder: Path, index: int, report: Report) -> int:
    """Write the tokens of a part (NNNNN.bin), then its counts (NNNNN.npz), and return the number of tokens.

    A part with counts is complete.
    """
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
    """Return the file of the counts of a part, which exists when the part is complete."""
    return folder / f"{index:05d}.npz"


def _batches(job: TokeniseJob, index: int) -> Iterator[tuple[list[str], int]]:
    """Yield some documents of a part at a time, with the bytes of the source up to their end."""
    texts, characters, before, done = [], 0, 0, 0
    for span in job.parts[index]:
        for text, position in documents(span, job.text_key):
            texts.append(text)
            characters += len(text)
            done = before + position
            if characters >= BATCH_CHARACTERS or len(texts) >= BATCH_DOCUMENTS:
                yield texts, done
                texts, characters = [], 0
        before += span.size
    if texts:
        yield texts, before


# --- all parts --------------------------------------------------------------------------------------------------------


class _Run:
    """Tokenise the missing parts, here or in processes, and report the progress of all of them."""

    def __init__(self, job: TokeniseJob, encoder: Encoder, folder: Path, name: str, progress: Progress | None):
        self._job, self._encoder, self._folder, self._name, self._progress = job, encoder, folder, name, progress
        self._sizes = [sum(span.size for span in part) for part in job.parts]
        whole = [counts_path(folder, index).exists() for index in range(len(job.parts))]
        self._missing = [index for index, there in enumerate(whole) if not there]
        self._done = {index: size for index, size in enumerate(self._sizes) if whole[index]}
        self._tokens: dict[int, int] = {}
        self._begin = time.monotonic()
        self._lock = threading.Lock()
        self._fault: Exception | None = None

    def run(self, processes: int) -> None:
        """Tokenise the missing parts."""
        processes = min(processes, len(self._missing))
        if processes > 1:
            self._in_processes(processes)
            return
        for index in self._missing:
            tokens = tokenise(self._job, self._encoder, self._folder, index, partial(self._report, index))
            self._report(index, self._sizes[index], tokens)

    def _in_processes(self, count: int) -> None:
        waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
        for index in self._missing:
            waiting.put(index)
        children = [self._start() for _ in range(count)]
        pool = ThreadPoolExecutor(count)
        try:
            wait([pool.submit(self._feed, child, waiting, children) for child in children])
        finally:  # also when ctrl-C ends the wait
            for child in children:
                child.kill()
            pool.shutdown()
            _close(children)
        if self._fault:
            raise self._fault

    def _start(self) -> subprocess.Popen:
        # One thread each: the tokenizers library would otherwise use every core in every process.
        env = os.environ | {"TOKENIZERS_PARALLELISM": "false"}
        command = [sys.executable, "-m", "dovetail.data.tokenise", str(self._folder)]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)

    def _feed(self, child: subprocess.Popen, waiting: queue.SimpleQueue[int], children: list[subprocess.Popen]) -> None:
        """Give one process part after part until none is left; the first failure stops all processes."""
        assert child.stdin and child.stdout
        try:
            while True:
                index = waiting.get_nowait()
                child.stdin.write(f"{index}\n")
                child.stdin.flush()
                self._follow(child, index)
        except queue.Empty:
            pass
        except Exception as error:
            with self._lock:
                self._fault = self._fault or error  # the processes that are stopped fail too: keep the first error
            with contextlib.suppress(queue.Empty):
                while True:
                    waiting.get_nowait()
            for other in children:
                other.kill()

    def _follow(self, child: subprocess.Popen, index: int) -> None:
        assert child.stdout
        for line in child.stdout:
            message = json.loads(line)
            if "error" in message:
                raise UserError(message["error"])
            if "finished" in message:
                self._report(index, self._sizes[index], message["tokens"])
                return
            self._report(index, message["done"], message["tokens"])
        raise FileError(
            f"a process that tokenised {self._name} ended with code {child.wait()}; check whether memory ran out"
        )

    def _report(self, index: int, done: int, tokens: int) -> None:
        with self._lock:
            self._done[index], self._tokens[index] = done, tokens
            if self._progress:
                total = sum(self._tokens.values())
                rate = total / max(time.monotonic() - self._begin, 1e-9)
                what = f"{self._name} {format_count(total)} tokens {format_count(rate)}/s"
                self._progress(what, min(sum(self._done.values()), sum(self._sizes)), max(sum(self._sizes), 1))


def _close(children: list[subprocess.Popen]) -> None:
    for child in children:
        child.wait()
        for pipe in filter(None, (child.stdin, child.stdout)):
            with contextlib.suppress(OSError):  # what is left in stdin's buffer has no reader
                pipe.close()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# --- as a process -----------------------------------------------------------------------------------------------------


def main(folder: Path) -> None:
    """Tokenise the parts whose numbers come on stdin, until stdin ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles ctrl-C
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(waiting,), daemon=True).start()
    job, encoder = TokeniseJob.load(folder)
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
    os._exit(0)  # the parent has ended; a new one must not find this process still writing


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
