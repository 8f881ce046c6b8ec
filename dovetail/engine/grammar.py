"""Structured output through llguidance: at every step the grammar says which tokens may come next."""

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

from dovetail.core.errors import UserError
from dovetail.core.json_schema import closed
from dovetail.engine.request.params import StructuredOutputsParams

if TYPE_CHECKING:
    from dovetail.io.tokenizer import Tokenizer

T = TypeVar("T")
KEPT_BYTES = 512 * 2**20  # of compiled grammars that a tokenizer keeps: the same schema comes with many requests
MOST_BYTES = 4 * KEPT_BYTES  # of those and the grammars of requests that wait or run
STACK_BYTES = 512 * 2**20  # llguidance recurses over rules that name each other; 8 MiB end at 3,000 of them
# llguidance's limits, which are its defaults: given here because a refusal names them.
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
PROBED = 2  # tokens of each new grammar, before a request that brings it is taken
_OVER_LIMIT = re.compile(r"max is|\blimit\b|fuel|too (big|many|large|complex)")


class Grammar:
    """A compiled grammar; each sequence walks it with a Matcher of its own."""

    def __init__(self, prototype: Any, words: int, size: int = 0):
        self._prototype, self._words, self.size = prototype, words, size

    def start(self) -> Matcher:
        return Matcher(self._prototype.deep_copy(), self._words)


class Matcher:
    """Where one sequence stands in its grammar."""

    def __init__(self, matcher: Any, words: int):
        self._matcher, self._words = matcher, words

    def fill(self, bits: np.ndarray) -> None:
        """Sets in bits [W] uint32 the tokens that may come next and clears all others. Where the grammar can only end,
        those are the tokenizer's end tokens."""
        if bits.dtype != np.uint32 or not bits.flags.c_contiguous or bits.size < self._words:
            raise UserError(
                f"expected at least {self._words} contiguous uint32 words, one bit a token of this tokenizer; "
                f"got {bits.size} of {bits.dtype}: is the model's vocabulary smaller than its tokenizer's?"
            )
        bits[self._words :] = 0  # ids that only the model has: vocabularies are often padded
        self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, self._words * 4)
        self._check()

    def accept(self, token: int) -> None:
        """Goes on by a token that `fill` allowed; ValueError for another, or past the end."""
        self._matcher.consume_token(token)
        self._check()

    @property
    def is_done(self) -> bool:
        """Whether nothing but an end token can follow."""
        return self._matcher.is_stopped()

    def check_start(self) -> None:
        """Raise a ValueError if the grammar allows no text, or is over a limit at its beginning. A limit that is met
        further on ends that request (see Sampler)."""
        for _ in range(PROBED):
            allowed = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), np.uint8), bitorder="little")
            self._check("llguidance does not take this grammar")
            self.accept(int(allowed.nonzero()[0][-1]))  # the last: of two beginnings, the longer has the higher id
            if self.is_done:
                return

    def _check(self, what: str = "cannot go on") -> None:
        if self._matcher.is_error():
            raise UserError(f"structured output: {_reason(self._matcher.get_error(), what)}")


def _reason(error: str, what: str) -> str:
    """llguidance's reason, cut to a sentence, with the limits if one was met."""
    reason = error.partition("<non-verbose/>")[0].strip()
    if reason.startswith("NoExtension"):
        return "no text fits this grammar; a schema that is a reference to itself, say"
    reason = reason if len(reason) <= LONGEST_REASON else reason[:LONGEST_REASON] + " ..."
    if not _OVER_LIMIT.search(reason):
        return f"{what}: {reason}"
    limits = ", ".join(f"{name} {most:,}" for name, most in LIMITS.items())
    return (
        f"the grammar is too complex: {reason}. Use fewer choices or optional properties, simpler patterns, or smaller "
        f"bounds. The limits: {limits}."
    )


def compile(structured: StructuredOutputsParams, tokenizer: Tokenizer) -> Grammar:
    """The grammar, from a cache by content; ValueError with llguidance's own words for one that it does not take."""
    made = _compilers.get(tokenizer)
    if made is None:
        made = _compilers[tokenizer] = _Compiler(tokenizer)
    return made.compile(_source(structured))


def masks(
    structured: StructuredOutputsParams, tokenizer: Tokenizer, output: Iterable[int], vocab: int, eos_ids: Iterable[int]
) -> Iterator[np.ndarray]:
    """The bits [W] uint32 that were set when each token of an output was sampled, as the sampler had them: where the
    grammar cannot go on, those of the end tokens."""
    matcher, end = compile(structured, tokenizer).start(), np.zeros(-(-vocab // 32), np.uint32)
    for token in eos_ids:
        end[token // 32] |= np.uint32(1 << token % 32)
    for token in output:
        yield _filled(matcher, end)
        with suppress(ValueError):  # what cannot go on has ended there
            matcher.accept(token)


def _filled(matcher: Matcher, end: np.ndarray) -> np.ndarray:
    bits = np.zeros_like(end)
    try:
        matcher.fill(bits)
    except ValueError:
        return end
    return bits if bits.any() else end


class _Compiler:
    """llguidance's view of one tokenizer (about a second to build) and the grammars compiled for it."""

    def __init__(self, tokenizer: Tokenizer):
        if not tokenizer.eos_ids:
            raise UserError("structured output needs a token that ends it, and this tokenizer names no EOS token")
        llguidance = _llguidance()
        try:
            self._tokenizer = llguidance.LLTokenizer(tokenizer.backend.to_str(), eos_token=list(tokenizer.eos_ids))
        except Exception as error:  # it raises what its Rust side gives
            raise UserError(f"llguidance cannot read this model's tokenizer: {error}") from error
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
            self._kept[key] = found  # last: the first is the one unused for longest
            self._drop_until(KEPT_BYTES)
        return found

    def _drop_until(self, most: int) -> None:
        while sum(each.size for each in self._kept.values()) > most:
            self._kept.pop(next(iter(self._kept)))

    def _make_room(self, size: int) -> None:
        with self._lock:
            self._drop_until(max(KEPT_BYTES - size, 0))
            if sum(each.size for each in self._live) + size > MOST_BYTES:
                raise UserError(
                    f"structured output: the grammars of requests under way take all of the {MOST_BYTES >> 20:,} MiB "
                    "that are set aside for grammars; try again when some of them have ended"
                )

    def _new(self, source: str) -> Grammar:
        if len(source) > LONGEST:
            raise UserError(
                f"structured output: the grammar has {len(source):,} characters; at most {LONGEST:,} are taken"
            )
        self._make_room(size := _size_of(source))
        llguidance = _llguidance()
        # Verbose errors repeat the grammar and the text so far, which belong to the user, and are megabytes long.
        limits = llguidance.LLParserLimits(**LIMITS, verbose_errors=False)
        make = lambda: llguidance.LLMatcher(self._tokenizer, source, log_level=0, limits=limits)  # noqa: E731
        grammar = Grammar(_on_a_large_stack(make), self._words, size)
        grammar.start().check_start()
        return grammar


def _size_of(source: str) -> int:
    """Estimate the bytes of a compiled grammar by its length and its literals: llguidance does not report them.
    Measured: 8 MB for 1,500 literals in 14 kB, 46 MB for 5,000, 274 MB for 15,000; 3 to 14 MB for schemas of 60 to 190
    kB, which are overestimated."""
    literals = len({*re.split('["/]', source)})
    return 120 * len(source) + 4000 * literals + literals**2


def _on_a_large_stack(make: Callable[[], T]) -> T:
    """Call `make` on a thread with a stack of STACK_BYTES, of which only what is used takes memory. Where a stack ends,
    the process ends: no error could be caught."""
    done: Future[T] = Future()

    def work() -> None:
        try:
            done.set_result(make())
        except BaseException as error:
            done.set_exception(error)

    with _stack_lock:  # the size is that of all threads that are started meanwhile
        before = threading.stack_size(STACK_BYTES)
        try:
            threading.Thread(target=work, name="grammar", daemon=True).start()
        finally:
            threading.stack_size(before)
    return done.result()


_stack_lock = threading.Lock()
_compilers: WeakKeyDictionary[Tokenizer, _Compiler] = WeakKeyDictionary()


def _source(structured: StructuredOutputsParams) -> str:
    """What is asked, in llguidance's own form."""
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
    """The schema's text, closed. Keys stay in their order: it is the order in which they will be written."""
    if isinstance(schema, str) and schema != "object":
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise UserError(f"structured output: json is not a JSON schema, nor 'object': {error}") from None
    if isinstance(schema, Mapping):
        schema = dict(schema)
    try:
        return json.dumps({"type": "object"} if schema in ("object", {}) else closed(schema))
    except ValueError as error:
        raise UserError(f"structured output: {error}") from None
    except (TypeError, RecursionError) as error:
        raise UserError(f"structured output: json is not a JSON schema: {error}") from None


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError:
        raise UserError("structured output needs the package llguidance: pip install llguidance") from None
    return llguidance
