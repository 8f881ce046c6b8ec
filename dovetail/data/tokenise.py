"""Tokenise one part of a source: in this process, or as `python -m dovetail.data.tokenise FOLDER`, many at a time.

As a process it takes part numbers on stdin and answers in lines of JSON on stdout. It ends with its stdin, so that it
does not outlive whoever started it. Processes and not a pool of them: a pool would import the user's script again.

Tokenise a source once, into a cache that is found again as long as nothing changed.

Parts are written in a hidden folder beside the cache's place, which takes its name when all is there. What a killed
run had finished is kept for the next one.
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
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dovetail.core.errors import FileError, UserError, as_user_error
from dovetail.core.files import locked
from dovetail.core.reporter import Progress
from dovetail.data import cache, sources
from dovetail.data.cache import Meta, TokenStore, part_path
from dovetail.data.encoder import Encoder, from_spec, make
from dovetail.data.readers import FileSpan, read
from dovetail.data.settings import Data, Source
from dovetail.data.sources import Files
from dovetail.io.hub import home

if TYPE_CHECKING:
    from dovetail.io.tokenizer import Tokenizer


JOB = "job.json"
BATCH_CHARACTERS, BATCH_DOCUMENTS = 1 << 20, 1024  # given to the tokenizer at a time
REPORT_SECONDS = 0.2

Report = Callable[[int, int], None]  # bytes of the source behind us, tokens written: of this part, so far


@dataclass
class TokeniseJob:
    """What all parts of a source share, and the spans of each."""

    text_key: str
    dtype: str
    parts: list[list[FileSpan]]

    @classmethod
    def load(cls, folder: Path) -> tuple[TokeniseJob, Encoder]:
        found = json.loads((folder / JOB).read_text())
        encoder = from_spec(found.pop("encoder"))
        found["parts"] = [[FileSpan(**span) for span in part] for part in found["parts"]]
        return cls(**found), encoder

    def save(self, folder: Path, encoder: Encoder) -> None:
        (folder / JOB).write_text(json.dumps(asdict(self) | {"encoder": encoder.spec()}))


def tokenise(job: TokeniseJob, encoder: Encoder, folder: Path, index: int, report: Report) -> int:
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


def _batches(job: TokeniseJob, index: int) -> Iterator[tuple[list[str], int]]:
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


SMALLEST_PART, MOST_PARTS = 4 << 20, 256  # bytes of the source; a part is an open file of every reader


def prepare(
    data: Data,
    tokenizer: Tokenizer | None = None,
    directory: str | Path = "",
    progress: Progress | None = None,
    processes: int = 0,
) -> tuple[TokenStore, ...]:
    """The caches of all sources, in their order, made where they are missing or out of date.

    tokenizer: the model's own, for data.tokenizer "". directory "": data.cache, else the package's own cache.
    processes 0: as many as this process may use cores.
    """
    encoder = make(data.tokenizer, tokenizer)
    place = Path(directory or data.cache or home() / "data").expanduser()
    return tuple(prepare_source(source, encoder, place, progress, processes) for source in data.sources)


def prepare_source(
    source: Source, encoder: Encoder, directory: Path, progress: Progress | None = None, processes: int = 0
) -> TokenStore:
    files = sources.find(source)
    mark = cache.fingerprint(files, source, encoder)
    place = cache.entry(directory, files.name, mark)
    if not place.is_dir():
        directory.mkdir(parents=True, exist_ok=True)

        def waiting(holder: str) -> None:
            if progress:
                progress(f"another process ({holder}) is tokenising {files.name}; waiting for it", 0, 0)

        lock = place.with_name(f".{place.name}.lock")
        with locked(lock, waiting):
            if not place.is_dir():  # another process may have made it while this one waited
                _make(source, files, mark, encoder, place, progress, processes)
            lock.unlink(missing_ok=True)  # a process that waits for it then finds the cache made
    return TokenStore(place)


def _make(
    source: Source, files: Files, mark: str, encoder: Encoder, place: Path, progress: Progress | None, processes: int
) -> None:
    partial = place.with_name(f".{place.name}.partial")
    partial.mkdir(exist_ok=True)
    for torn in partial.glob("*.new"):
        torn.unlink()
    dtype = "uint16" if encoder.vocab_size <= 1 << 16 else "uint32"
    job = TokeniseJob(source.text_key, dtype, _parts(source, files))
    job.save(partial, encoder)
    _Run(job, encoder, partial, files.name, progress).run(processes or _cores())
    if cache.fingerprint(sources.find(source), source, encoder) != mark:
        raise UserError(f"{source.path!r} changed while it was being read; start again when nothing writes to it")
    _finish(job, encoder, partial, files.name, mark)
    partial.rename(place)


def _finish(job: TokeniseJob, encoder: Encoder, folder: Path, name: str, mark: str) -> None:
    counts = [dict(np.load(counts_path(folder, index))) for index in range(len(job.parts))]
    offsets = np.concatenate([[0], *(part["lengths"] for part in counts)]).cumsum()
    if len(offsets) == 1:
        raise UserError(f"{name} holds no text: every document in it is empty; is text_key {job.text_key!r} right?")
    np.save(folder / cache.OFFSETS, offsets)
    meta = Meta(
        name, mark, job.dtype, encoder.eos_id, encoder.vocab_size, [len(part["lengths"]) for part in counts],
        documents=len(offsets) - 1, tokens=int(offsets[-1]), text_bytes=sum(int(part["text_bytes"]) for part in counts),
        empty=sum(int(part["empty"]) for part in counts),
    )  # fmt: skip
    cache.write_meta(folder, meta)
    for index in range(len(job.parts)):
        counts_path(folder, index).unlink()
    (folder / JOB).unlink()


def _parts(source: Source, files: Files) -> list[list[FileSpan]]:
    """Spans gathered into parts of about one size. It depends on the files alone: a run that goes on where a killed one
    stopped finds the same parts, on any machine."""
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


class _Run:
    """Tokenises the parts that are missing, here or in processes, and keeps count of what each has done."""

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
        processes = min(processes, len(self._missing))
        if processes > 1:
            self._in_processes(processes)
            return
        for index in self._missing:
            report = lambda done, tokens, index=index: self._report(index, done, tokens)  # noqa: E731
            tokens = tokenise(self._job, self._encoder, self._folder, index, report)
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
        """Gives one process part after part until none is left; the first to fail stops them all."""
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
                self._fault = self._fault or error  # those that are stopped then fail too, and that is not the reason
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
            f"a process that tokenised {self._name} ended with code {child.wait()}; was it short of memory?"
        )

    def _report(self, index: int, done: int, tokens: int) -> None:
        with self._lock:
            self._done[index], self._tokens[index] = done, tokens
            if self._progress:
                total = sum(self._tokens.values())
                rate = total / max(time.monotonic() - self._begin, 1e-9)
                what = f"{self._name} {_short(total)} tokens {_short(rate)}/s"
                self._progress(what, min(sum(self._done.values()), sum(self._sizes)), max(sum(self._sizes), 1))


def _close(children: list[subprocess.Popen]) -> None:
    for child in children:
        child.wait()
        for pipe in filter(None, (child.stdin, child.stdout)):
            with contextlib.suppress(OSError):  # what is left in stdin's buffer has no reader
                pipe.close()


def _short(number: float) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return f"{number:.0f}"


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
