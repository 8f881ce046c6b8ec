"""BlockPool: the pages of the KV cache, which of them sequences hold, and which can be found again by their contents.

A page is in one of three states: held (its reference count is above 0), free (held by no sequence, nothing worth
keeping), or cached (held by no sequence, but full of known tokens and found by hash until it is taken for others).
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from hashlib import sha256
from struct import Struct

from dovetail.core.errors import UserError
from dovetail.engine.request.sequence import Sequence


def page_hash(parent: bytes, tokens: Seq[int], extra: bytes = b"") -> bytes:
    """H_i = sha256(H_{i-1}, tokens of page i, extra). A page's hash names everything before it too, because its keys
    and values depend on all of it. What holds for the whole chain (model, adapter, salt) is in the root; `extra` is
    for what belongs to one page alone (the hash of an image)."""
    return sha256(parent + _packer(len(tokens))(*tokens) + extra).digest()


@functools.cache
def _packer(count: int) -> Callable[..., bytes]:
    """`count` integers as bytes: of the ways to do it the quickest, and a decoding batch does it per page."""
    return Struct(f"{count}q").pack


class BlockPool:
    """`num_pages` pages with reference counts, a free queue and a hash table over the full ones."""

    def __init__(self, num_pages: int, page_size: int, enable_prefix_caching: bool = True, model: str = ""):
        if num_pages < 1 or page_size < 1:
            raise UserError(
                f"a pool needs at least one page of one token; got num_pages={num_pages}, page_size={page_size}"
            )
        self.num_pages, self.page_size, self.enable_prefix_caching, self.model = (
            num_pages,
            page_size,
            enable_prefix_caching,
            model,
        )
        self.refs = [0] * num_pages
        self.hash_of: list[bytes | None] = [None] * num_pages
        self.page_of: dict[bytes, int] = {}
        # Pages that hold nothing findable are taken first (a stack: the last to be freed is the warmest), then the
        # cached ones, least recently used first. OrderedDict: its popitem(last=False) is O(1), a dict's is not.
        self._free = list(range(num_pages - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._epoch = 0
        self.releases = 0  # grows with every release: a lookup that found too few pages is not repeated before
        self.hit_tokens = self.query_tokens = 0

    # Counts

    @property
    def num_free(self) -> int:
        """Pages that could be allocated now: the free and the cached."""
        return len(self._free) + len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_pages - self.num_free

    @property
    def num_cached(self) -> int:
        """Pages that no sequence holds and that can still be found by their hash."""
        return len(self._cached)

    def waste(self, unfilled_slots: int) -> float:
        """The share of the held slots that hold no token. Shared pages are full, so the caller can add up the
        unfilled slots sequence by sequence."""
        used = self.num_used  # read once: another thread may ask for it
        return min(1.0, unfilled_slots / (used * self.page_size)) if used else 0.0

    # Holding and letting go

    def allocate(self, n: int) -> list[int] | None:
        """`n` pages for one holder, all or none. Cached ones are evicted only when the free ones are used up."""
        if n > len(self._free) + len(self._cached):
            return None
        pages = [self._free.pop() if self._free else self._evict() for _ in range(n)]
        for page in pages:
            self.refs[page] = 1
        return pages

    def acquire(self, pages: Iterable[int]) -> None:
        """One more holder for pages that were found by hash."""
        for page in pages:
            if self.refs[page] == 0:
                del self._cached[page]
            self.refs[page] += 1

    def release(self, pages: Seq[int]) -> None:
        """One holder fewer for each page of a sequence, given in the sequence's order."""
        self.releases += 1
        # From the end: of two pages let go together, the one further from the root is evicted first, for without its
        # parent a page can no longer be found.
        for page in reversed(pages):
            assert self.refs[page] > 0, f"page {page} is released but no sequence holds it"
            self.refs[page] -= 1
            if self.refs[page] == 0:
                if self.hash_of[page] is None:
                    self._free.append(page)
                else:
                    self._cached[page] = None

    def _evict(self) -> int:
        page, _ = self._cached.popitem(last=False)
        self._forget(page)
        return page

    def _forget(self, page: int) -> None:
        digest = self.hash_of[page]
        if digest is not None:
            self.hash_of[page] = None
            del self.page_of[digest]

    # Finding

    def root(self, adapter: object, cache_salt: str | None, private: str | None = None) -> bytes:
        """The start of a hash chain. Two sequences share pages only from one root: same model, adapter and salt, and,
        with `private` (a request's id), only within one request."""
        return sha256(repr((self._epoch, self.model, adapter, cache_salt, private)).encode()).digest()

    def register(self, page: int, digest: bytes) -> None:
        """The page is full and holds what `digest` names. When another page holds the same, that one stays the one to
        be found, and this one is nothing worth keeping once it is let go."""
        if digest not in self.page_of and self.hash_of[page] is None:
            self.page_of[digest] = page
            self.hash_of[page] = digest

    def find_prefix(self, hashes: Iterable[bytes]) -> list[int]:
        """The pages of the longest prefix of this chain that is held or cached. Takes hold of none of them."""
        found = []
        for digest in hashes:
            page = self.page_of.get(digest)
            if page is None:
                break
            found.append(page)
        return found

    def num_idle(self, pages: Iterable[int]) -> int:
        """How many of these no sequence holds: as many fewer are free once they are acquired."""
        return sum(self.refs[page] == 0 for page in pages)

    def count_lookup(self, queried: int, hit: int) -> None:
        """For the metrics, in tokens."""
        self.query_tokens += queried
        self.hit_tokens += hit

    def reset_prefix_cache(self) -> None:
        """Nothing computed so far is found again (the weights have changed). Pages that are held stay with their
        holders; the new epoch in the root keeps what those still compute apart from what starts now."""
        self._epoch += 1
        self._free.extend(self._cached)
        self._cached.clear()
        self.page_of.clear()
        self.hash_of = [None] * self.num_pages

    # The pages of a sequence

    def hash_known(self, seq: Sequence) -> None:
        """Bring `seq.block_hashes` up to its known tokens; for lookups they run ahead of what is registered."""
        size, hashes, tokens = self.page_size, seq.block_hashes, seq.tokens
        for i in range(len(hashes), self._hashable(seq, len(tokens)) // size):
            parent = hashes[i - 1] if i else self._root_of(seq)
            hashes.append(page_hash(parent, tokens[i * size : (i + 1) * size]))

    def _hashable(self, seq: Sequence, upto: int) -> int:
        """How many tokens may be shared: without prefix caching, the prompt among the n samples of a request."""
        if self.enable_prefix_caching:
            return upto
        return min(upto, seq.prompt_len) if seq.request.params.n > 1 else 0

    def _root_of(self, seq: Sequence) -> bytes:
        request = seq.request
        return self.root(request.adapter, request.cache_salt, None if self.enable_prefix_caching else request.id)

    def find_cached(self, seq: Sequence) -> list[int]:
        """The cached pages a sequence can start from. At least one token is left to compute: it gives the logits."""
        params = seq.request.params
        if params.prompt_logprobs is not None and seq.index == 0 and len(seq.tokens) == seq.prompt_len:
            return []  # they need every row of the prompt; the other samples of the request do not compute them again
        self.hash_known(seq)
        return self.find_prefix(seq.block_hashes[: (len(seq.tokens) - 1) // self.page_size])

    def register_range(self, seq: Sequence, before: int, after: int) -> None:
        """`before` tokens of the sequence were both known and computed, now `after` are: register pages that filled."""
        first, last = before // self.page_size, self._hashable(seq, after) // self.page_size
        if first < last:
            if len(seq.block_hashes) < last:
                self.hash_known(seq)
            for i in range(first, last):
                self.register(seq.pages[i], seq.block_hashes[i])
