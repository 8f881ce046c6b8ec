"""BlockPool: the pages of the KV cache, which sequences hold them, and which can be found by their contents.

A page is held (its reference count is above 0), free (no sequence holds it and its contents are not needed), or cached
(no sequence holds it, but it is full of known tokens and can be found by hash until it is allocated again).
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from hashlib import sha256
from struct import Struct

from dovetail.engine.request.sequence import Sequence
from dovetail.io.images.item import ImageSpan


def page_hash(parent: bytes, tokens: Seq[int], images: bytes = b"") -> bytes:
    """Return H_i = sha256(H_{i-1}, tokens of page i, images of page i).

    A page's hash covers everything before it, because its keys and values depend on all of it. What applies to the
    whole chain (adapter, salt) is in the root. `images` is the result of `image_keys`.
    """
    return sha256(parent + _packer(len(tokens))(*tokens) + images).digest()


def image_keys(spans: Iterable[ImageSpan], start: int, end: int) -> bytes:
    """Return the keys of the items with image tokens from position `start` to `end`, each with its first position.

    Image tokens of all images are equal; what they stand for is in the key.
    """
    found = [span for span in spans if span.start < end and span.end > start]
    return b"".join(_packer(2)(span.start - start, len(span.item.key)) + span.item.key for span in found)


@functools.cache
def _packer(count: int) -> Callable[..., bytes]:
    """Return a function that packs `count` integers into bytes: the fastest way, used once per page."""
    return Struct(f"{count}q").pack


class BlockPool:
    """`num_pages` pages with reference counts, a free list and a hash table of the full ones."""

    def __init__(self, num_pages: int, page_size: int, enable_prefix_caching: bool = True):
        assert num_pages > 0 and page_size > 0, (num_pages, page_size)
        self.num_pages, self.page_size, self.enable_prefix_caching = num_pages, page_size, enable_prefix_caching
        self.refs = [0] * num_pages
        self.hash_of: list[bytes | None] = [None] * num_pages
        self.page_of: dict[bytes, int] = {}
        # Free pages are taken first (a stack: the last one freed is the warmest), then the cached ones, least recently
        # used first. OrderedDict, because its popitem(last=False) is O(1) and a dict's is not.
        self._free = list(range(num_pages - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._epoch = 0
        self.releases = 0  # grows with every release: a lookup that found too few pages is not repeated before that
        self.hit_tokens = self.query_tokens = 0

    # --- counts -------------------------------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        """Return the pages that could be allocated now: the free and the cached."""
        return len(self._free) + len(self._cached)

    @property
    def num_used(self) -> int:
        """Return the pages that sequences hold."""
        return self.num_pages - self.num_free

    @property
    def num_cached(self) -> int:
        """Return the pages that no sequence holds and that can be found by hash."""
        return len(self._cached)

    def waste(self, unfilled_slots: int) -> float:
        """Return the share of held token slots without a token.

        Shared pages are full, so the caller can sum `unfilled_slots` over sequences.
        """
        used = self.num_used  # read once: another thread may call this
        return min(1.0, unfilled_slots / (used * self.page_size)) if used else 0.0

    # --- holding and releasing ----------------------------------------------------------------------------------------

    def allocate(self, n: int) -> list[int] | None:
        """Return `n` pages for one holder, or None if there are fewer; cached pages are evicted last."""
        if n > len(self._free) + len(self._cached):
            return None
        pages = [self._free.pop() if self._free else self._evict() for _ in range(n)]
        for page in pages:
            self.refs[page] = 1
        return pages

    def acquire(self, pages: Iterable[int]) -> None:
        """Add a holder to pages that were found by hash."""
        for page in pages:
            if self.refs[page] == 0:
                del self._cached[page]
            self.refs[page] += 1

    def release(self, pages: Seq[int]) -> None:
        """Remove a holder from the pages of a sequence, given in the sequence's order."""
        self.releases += 1
        # From the end: of two pages released together, the one further from the root is evicted first, because without
        # its parent a page cannot be found.
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
        digest = self.hash_of[page]
        if digest is not None:
            self.hash_of[page] = None
            del self.page_of[digest]
        return page

    # --- finding by hash ----------------------------------------------------------------------------------------------

    def root(self, adapter: object, cache_salt: str | None, private: str | None = None) -> bytes:
        """Return the start of a hash chain.

        Two sequences share pages only with the same root: same weights, adapter and salt, and with `private` (a
        request's id) only within one request.
        """
        return sha256(repr((self._epoch, adapter, cache_salt, private)).encode()).digest()

    def register(self, page: int, digest: bytes) -> None:
        """Make a full page findable by `digest`, unless another page with the same contents already is."""
        if digest not in self.page_of and self.hash_of[page] is None:
            self.page_of[digest] = page
            self.hash_of[page] = digest

    def find_prefix(self, hashes: Iterable[bytes]) -> list[int]:
        """Return the pages of the longest prefix of this chain that is held or cached, without holding them."""
        found = []
        for digest in hashes:
            page = self.page_of.get(digest)
            if page is None:
                break
            found.append(page)
        return found

    def num_idle(self, pages: Iterable[int]) -> int:
        """Return how many of these pages no sequence holds; acquiring them leaves that many fewer free."""
        return sum(self.refs[page] == 0 for page in pages)

    def count_lookup(self, queried: int, hit: int) -> None:
        """Add a lookup to the metrics, in tokens."""
        self.query_tokens += queried
        self.hit_tokens += hit

    def reset_prefix_cache(self) -> None:
        """Make everything computed so far unfindable, because the weights have changed.

        Held pages stay with their holders; the new epoch in the root separates what those still compute from what
        starts now.
        """
        self._epoch += 1
        self._free.extend(self._cached)
        self._cached.clear()
        self.page_of.clear()
        self.hash_of = [None] * self.num_pages

    # --- the pages of a sequence --------------------------------------------------------------------------------------

    def hash_known(self, seq: Sequence) -> None:
        """Extend `seq.block_hashes` to its known tokens; for lookups they run ahead of what is registered."""
        size, hashes, tokens = self.page_size, seq.block_hashes, seq.tokens
        for i in range(len(hashes), self._hashable(seq, len(tokens)) // size):
            parent, start, end = hashes[i - 1] if i else self._root_of(seq), i * size, (i + 1) * size
            images = image_keys(seq.request.spans, start, end) if start < seq.images_end else b""
            hashes.append(page_hash(parent, tokens[start:end], images))

    def _hashable(self, seq: Sequence, upto: int) -> int:
        """Return how many tokens may be shared: without prefix caching, the prompt among the n of a request."""
        if self.enable_prefix_caching:
            return upto
        return min(upto, seq.prompt_len) if seq.request.params.n > 1 else 0

    def _root_of(self, seq: Sequence) -> bytes:
        request = seq.request
        return self.root(request.adapter, request.cache_salt, None if self.enable_prefix_caching else request.id)

    def find_cached(self, seq: Sequence) -> list[int]:
        """Return the cached pages that a sequence can start from; at least one token is left to compute the logits."""
        params = seq.request.params
        if params.prompt_logprobs is not None and seq.index == 0 and len(seq.tokens) == seq.prompt_len:
            return []  # they need every row of the prompt; the request's other sequences do not compute them again
        self.hash_known(seq)
        return self.find_prefix(seq.block_hashes[: (len(seq.tokens) - 1) // self.page_size])

    def register_range(self, seq: Sequence, before: int, after: int) -> None:
        """Register the pages that filled when the known and computed tokens grew from `before` to `after`."""
        first, last = before // self.page_size, self._hashable(seq, after) // self.page_size
        if first < last:
            if len(seq.block_hashes) < last:
                self.hash_known(seq)
            for i in range(first, last):
                self.register(seq.pages[i], seq.block_hashes[i])
