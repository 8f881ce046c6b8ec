"""Structured outputs through llguidance: at every step the grammar says which tokens may come next.

W = ceil(V / 32) words of a token mask, V vocabulary.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary, WeakSet

import numpy as np

from dovetail.core.errors import MissingPackageError, RequestError, UserError
from dovetail.core.json_schema import closed
from dovetail.engine.request.params import StructuredOutputsParams

if TYPE_CHECKING:
    from dovetail.io.tokenizer import Tokenizer

T = TypeVar("T")
KEPT_BYTES = 512 * 2**20  # of compiled grammars kept per tokenizer: the same schema comes with many requests
MOST_BYTES = 4 * KEPT_BYTES  # of those and the grammars of unfinished requests
STACK_BYTES = 512 * 2**20  # llguidance recurses over rules that name each other; 8 MiB are enough for 3,000 of them
# llguidance's limits, which are its defaults: given here because the error message lists them.
LIMITS = {
    "max_items_in_row": 2000,  # alternatives that are open at one place
    "initial_lexer_fuel": 1_000_000,  # of the patterns, when they are compiled
    "step_lexer_fuel": 200_000,  # of the patterns, for one token
    "step_max_items": 50_000,  # of the grammar, for one token
    "max_lexer_states": 250_000,
    "max_grammar_size": 500_000,
}
LONGEST = 256 * 1024  # characters of a grammar: the time to compile one grows with the square of its length
LONGEST_REASON = 500  # characters of llguidance's reason in an error: some repeat the grammar
PROBED = 2  # tokens that each new grammar is tried with before its request is accepted
_OVER_LIMIT = re.compile(r"max is|\blimit\b|fuel|too (big|many|large|complex)")


class Grammar:
    """Hold a compiled grammar; each sequence gets its own Matcher."""

    def __init__(self, prototype: Any, words: int, size: int = 0):
        self._prototype, self._words, self.size = prototype, words, size

    def start(self) -> Matcher:
        """Return a matcher at the beginning of the grammar."""
        return Matcher(self._prototype.deep_copy(), self._words)


class Matcher:
    """Track the position of one sequence in its grammar."""

    def __init__(self, matcher: Any, words: int):
        self._matcher, self._words = matcher, words

    def fill(self, bits: np.ndarray) -> None:
        """Set in `bits` [W] uint32 the tokens that may come next, and clear all others.

        If the grammar can only end, these are the tokenizer's EOS tokens.
        """
        if bits.dtype != np.uint32 or not bits.flags.c_contiguous or bits.size < self._words:
            raise _refused(
                f"a mask of at least {self._words} contiguous uint32 words is needed, got {bits.size} of {bits.dtype}: "
                "the model's vocabulary may be smaller than its tokenizer's"
            )
        bits[self._words :] = 0  # ids that only the model has: vocabularies are often padded
        self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, self._words * 4)
        self._check()

    def accept(self, token: int) -> None:
        """Advance by a token that `fill` allowed; raise RequestError for another one."""
        self._matcher.consume_token(token)
        self._check()

    def try_accept(self, token: int) -> bool:
        """Advance by a token if the grammar allows it; return whether it does."""
        return self._matcher.try_consume_tokens([token]) == 1

    def rollback(self, count: int) -> None:
        """Take back the last `count` tokens."""
        self._matcher.rollback(count)
        self._check()

    @property
    def is_done(self) -> bool:
        """Return whether only an EOS token can follow."""
        return self._matcher.is_stopped()

    def check_start(self) -> None:
        """Raise RequestError if the grammar allows no text, or exceeds a limit at its beginning.

        A limit that is exceeded later ends that request (see Sampler).
        """
        for _ in range(PROBED):
            allowed = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), np.uint8), bitorder="little")
            self._check("llguidance does not accept this grammar")
            self.accept(int(allowed.nonzero()[0][-1]))  # the last: of two beginnings, the longer has the higher id
            if self.is_done:
                return

    def _check(self, what: str = "cannot continue") -> None:
        if self._matcher.is_error():
            raise _refused(_reason(self._matcher.get_error(), what))


def _refused(message: str) -> RequestError:
    return RequestError(f"structured_outputs: {message}", param="structured_outputs")


def _reason(error: str, what: str) -> str:
    """Return llguidance's reason cut to a sentence, with the limits if one was exceeded."""
    reason = error.partition("<non-verbose/>")[0].strip()
    if reason.startswith("NoExtension"):
        return "no text matches this grammar; a schema that is a reference to itself, for example"
    reason = reason if len(reason) <= LONGEST_REASON else reason[:LONGEST_REASON] + " ..."
    if not _OVER_LIMIT.search(reason):
        return f"{what}: {reason}"
    limits = ", ".join(f"{name} {most:,}" for name, most in LIMITS.items())
    return (
        f"the grammar is too complex: {reason}. Use fewer choices or optional properties, simpler patterns, or smaller "
        f"bounds. The limits: {limits}."
    )


def compile(structured: StructuredOutputsParams, tokenizer: Tokenizer) -> Grammar:
    """Return the compiled grammar, from a cache by content.

    Raises:
        RequestError: With llguidance's reason, if it does not accept the grammar.
    """
    made = _compilers.get(tokenizer)
    if made is None:
        made = _compilers[tokenizer] = _Compiler(tokenizer)
    return made.compile(_source(structured))


def masks(
    structured: StructuredOutputsParams, tokenizer: Tokenizer, output: Iterable[int], vocab: int, eos_ids: Iterable[int]
) -> Iterator[np.ndarray]:
    """Yield the mask [W] uint32 that the sampler used for each token of an output.

    Where the grammar cannot continue, that is the mask of the EOS tokens.
    """
    matcher, end = compile(structured, tokenizer).start(), np.zeros(-(-vocab // 32), np.uint32)
    for token in eos_ids:
        end[token // 32] |= np.uint32(1 << token % 32)
    for token in output:
        yield _filled(matcher, end)
        with suppress(UserError):  # the output ended where the grammar could not continue
            matcher.accept(token)


def _filled(matcher: Matcher, end: np.ndarray) -> np.ndarray:
    bits = np.zeros_like(end)
    try:
        matcher.fill(bits)
    except UserError:
        return end
    return bits if bits.any() else end


class _Compiler:
    """llguidance's view of one tokenizer (about a second to build) and the grammars compiled for it."""

    def __init__(self, tokenizer: Tokenizer):
        if not tokenizer.eos_ids:
            raise _refused("the tokenizer must have an EOS token, and has none")
        llguidance = _llguidance()
        try:
            self._tokenizer = llguidance.LLTokenizer(tokenizer.backend.to_str(), eos_token=list(tokenizer.eos_ids))
        except Exception as error:  # whatever its Rust side raises
            raise _refused(f"llguidance cannot read this model's tokenizer: {error}") from error
        self._words = -(-self._tokenizer.vocab_size // 32)
        self._kept: dict[bytes, Grammar] = {}  # by a hash of the source
        self._live: WeakSet[Grammar] = WeakSet()  # those, and the ones that only requests still hold
        self._lock = threading.Lock()  # requests are checked on other threads than the engine's

    def compile(self, source: str) -> Grammar:
        key = hashlib.sha256(source.encode()).digest()
        found = self._kept.get(key) or self._new(source)
        with self._lock:
            self._live.add(found)
            self._kept.pop(key, None)
            self._kept[key] = found  # at the end: the first is the least recently used
            self._drop_until(KEPT_BYTES)
        return found

    def _drop_until(self, most: int) -> None:
        while sum(each.size for each in self._kept.values()) > most:
            self._kept.pop(next(iter(self._kept)))

    def _make_room(self, size: int) -> None:
        with self._lock:
            self._drop_until(max(KEPT_BYTES - size, 0))
            if sum(each.size for each in self._live) + size > MOST_BYTES:
                raise _refused(
                    f"the grammars of unfinished requests take all of the {MOST_BYTES >> 20:,} MiB for grammars: try "
                    "again when some of them have ended"
                )

    def _new(self, source: str) -> Grammar:
        if len(source) > LONGEST:
            raise _refused(f"a grammar must have at most {LONGEST:,} characters, got {len(source):,}")
        self._make_room(size := _size_of(source))
        llguidance = _llguidance()
        # Verbose errors repeat the grammar and the text so far, which belong to the user, and are megabytes long.
        limits = llguidance.LLParserLimits(**LIMITS, verbose_errors=False)
        make = lambda: llguidance.LLMatcher(self._tokenizer, source, log_level=0, limits=limits)  # noqa: E731
        grammar = Grammar(_on_a_large_stack(make), self._words, size)
        grammar.start().check_start()
        return grammar


def _size_of(source: str) -> int:
    """Estimate the bytes of a compiled grammar from its length and its literals, since llguidance does not report them.

    Measured: 8 MB for 1,500 literals in 14 kB, 46 MB for 5,000, 274 MB for 15,000; 3 to 14 MB for schemas of 60 to 190
    kB, which are overestimated.
    """
    literals = len({*re.split('["/]', source)})
    return 120 * len(source) + 4000 * literals + literals**2


def _on_a_large_stack(make: Callable[[], T]) -> T:
    """Call `make` on a thread with a stack of STACK_BYTES, of which only the used part takes memory.

    A stack overflow ends the process without an exception.
    """
    done: Future[T] = Future()

    def work() -> None:
        try:
            done.set_result(make())
        except BaseException as error:
            done.set_exception(error)

    with _stack_lock:  # the size applies to all threads that are started meanwhile
        before = threading.stack_size(STACK_BYTES)
        try:
            threading.Thread(target=work, name="grammar", daemon=True).start()
        finally:
            threading.stack_size(before)
    return done.result()


_stack_lock = threading.Lock()
_compilers: WeakKeyDictionary[Tokenizer, _Compiler] = WeakKeyDictionary()


def _source(structured: StructuredOutputsParams) -> str:
    """Return the grammar in llguidance's own format."""
    matcher = _llguidance().LLMatcher
    if structured.json is not None:
        return matcher.grammar_from_json_schema(_schema(structured.json))
    if structured.regex is not None:
        return matcher.grammar_from_regex(structured.regex)
    if structured.choice is not None:
        # a JSON string is a Lark string
        return matcher.grammar_from_lark("start: " + " | ".join(json.dumps(text) for text in structured.choice))
    assert structured.grammar is not None
    return matcher.grammar_from_lark(structured.grammar)


def _schema(schema: Any) -> str:
    """Return the schema's text, closed. Keys keep their order: it is the order in which they are generated."""
    if isinstance(schema, str) and schema != "object":
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise _refused(f"`json` must be a JSON schema or 'object': {error}") from None
    if isinstance(schema, Mapping):
        schema = dict(schema)
    try:
        return json.dumps({"type": "object"} if schema in ("object", {}) else closed(schema))
    except UserError as error:
        raise _refused(str(error)) from None
    except (ValueError, TypeError, RecursionError) as error:  # from json.dumps
        raise _refused(f"`json` must be a JSON schema: {error}") from None


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError:
        raise MissingPackageError(
            "structured_outputs needs the package llguidance: pip install llguidance", param="structured_outputs"
        ) from None
    return llguidance
