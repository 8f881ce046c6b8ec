"""The page pool: counts, eviction order, prefix lookup."""

import pytest

from dovetail.engine.request.params import SamplingParams
from dovetail.engine.request.sequence import Request, Sequence
from dovetail.engine.schedule.blocks import BlockPool, page_hash


def chain(pool: BlockPool, tokens: list[int], **root) -> list[bytes]:
    hashes, parent = [], pool.root(root.get("adapter"), root.get("cache_salt"), root.get("private"))
    for i in range(0, len(tokens) // pool.page_size * pool.page_size, pool.page_size):
        parent = page_hash(parent, tokens[i : i + pool.page_size])
        hashes.append(parent)
    return hashes


def fill(pool: BlockPool, tokens: list[int]) -> list[int]:
    hashes = chain(pool, tokens)
    pages = pool.allocate(len(hashes))
    assert pages is not None
    for page, digest in zip(pages, hashes, strict=True):
        pool.register(page, digest)
    return pages


def test_allocate_is_all_or_none():
    pool = BlockPool(4, 2)
    assert pool.allocate(5) is None and pool.num_free == 4
    pages = pool.allocate(4)
    assert pages is not None and sorted(pages) == [0, 1, 2, 3]
    assert pool.allocate(1) is None and pool.allocate(0) == [] and pool.num_used == 4
    pool.release(pages)
    assert pool.num_free == 4 and pool.num_cached == 0


def test_a_released_page_is_found_until_it_is_evicted():
    pool = BlockPool(3, 2)
    pages = fill(pool, [1, 2, 3, 4])
    pool.release(pages)
    assert (pool.num_used, pool.num_cached, pool.num_free) == (0, 2, 3)
    assert pool.find_prefix(chain(pool, [1, 2, 3, 4, 5, 6])) == pages
    pool.acquire(pages)
    assert (pool.num_used, pool.num_cached) == (2, 0) and [pool.refs[p] for p in pages] == [1, 1]
    pool.release(pages)
    pool.allocate(3)
    assert pool.find_prefix(chain(pool, [1, 2])) == [] and not pool.page_of


def test_unhashed_pages_go_first_then_the_least_recently_used_and_of_a_chain_its_end():
    pool = BlockPool(6, 1)
    old, new = fill(pool, [1, 2]), fill(pool, [3, 4])
    plain = pool.allocate(2)
    assert plain is not None
    pool.release(old)
    pool.release(new)
    pool.release(plain)
    pool.acquire(old)  # a hit makes it the newest
    pool.release(old)
    taken = [pool.allocate(1) or [] for _ in range(6)]
    assert {page for pages in taken[:2] for page in pages} == set(plain)
    assert [page for pages in taken[2:] for page in pages] == [new[1], new[0], old[1], old[0]]


def test_shared_pages_are_counted_and_over_release_is_caught():
    pool = BlockPool(2, 2)
    pages = fill(pool, [1, 2])
    pool.acquire(pages)
    pool.release(pages)
    assert pool.num_used == 1
    pool.release(pages)
    assert pool.num_used == 0
    with pytest.raises(AssertionError, match="no sequence holds it"):
        pool.release(pages)


def test_the_first_of_two_equal_pages_is_the_one_found():
    pool = BlockPool(4, 2)
    first, second = fill(pool, [1, 2]), fill(pool, [1, 2])
    assert pool.find_prefix(chain(pool, [1, 2])) == first
    pool.release(second)
    assert pool.num_cached == 0, "a duplicate is not worth keeping"
    pool.release(first)
    assert pool.find_prefix(chain(pool, [1, 2])) == first


def test_a_page_hash_covers_the_whole_prefix():
    pool = BlockPool(4, 2)
    assert chain(pool, [1, 2, 3, 4])[1] != chain(pool, [9, 9, 3, 4])[1]
    roots = [
        pool.root(None, None), pool.root("lora", None), pool.root(None, "lora"), pool.root(None, None, "r"),
    ]  # fmt: skip
    assert len(set(roots)) == len(roots)


def test_reset_forgets_cached_and_held_pages():
    pool = BlockPool(4, 2)
    before = chain(pool, [1, 2, 3, 4])
    held, let_go = fill(pool, [1, 2]), fill(pool, [5, 6])
    pool.release(let_go)
    pool.reset_prefix_cache()
    assert pool.num_cached == 0 and pool.num_used == 1 and pool.num_free == 3
    assert pool.find_prefix(before) == [] and chain(pool, [1, 2])[0] != before[0]
    pool.release(held)
    assert pool.num_free == 4 and pool.num_cached == 0


@pytest.mark.parametrize(("caching", "n", "pages"), [(True, 1, 3), (False, 1, 0), (False, 2, 2)])
def test_which_pages_of_a_sequence_are_hashed(caching, n, pages):
    """Without caching only the prompt, and only for the samples of one request."""
    pool = BlockPool(8, 2, enable_prefix_caching=caching)
    seq = Sequence(Request("a", (1, 2, 3, 4), SamplingParams(n=n)))
    seq.tokens += [5, 6, 7]
    pool.hash_known(seq)
    assert len(seq.block_hashes) == pages
    twin = Sequence(Request("b", (1, 2, 3, 4), SamplingParams(n=n)))
    pool.hash_known(twin)
    assert (twin.block_hashes == seq.block_hashes[:2] and bool(pages)) == caching


def test_prompt_logprobs_need_every_row_of_the_prompt():
    pool = BlockPool(8, 2)
    fill(pool, [1, 2, 3, 4])
    seqs = [Sequence(Request("a", (1, 2, 3, 4, 5), SamplingParams(n=2, prompt_logprobs=0)), i) for i in (0, 1)]
    assert [len(pool.find_cached(seq)) for seq in seqs] == [0, 2]
    seqs[0].tokens.append(6)  # it has given a token, so the prompt was scored before it was preempted
    assert len(pool.find_cached(seqs[0])) == 2


def test_one_token_is_left_to_compute():
    pool = BlockPool(8, 2)
    fill(pool, [1, 2, 3, 4])
    assert len(pool.find_cached(Sequence(Request("a", (1, 2, 3, 4), SamplingParams())))) == 1


def test_the_waste_metric():
    pool = BlockPool(8, 4)
    assert pool.waste(0) == 0.0
    pool.allocate(2)
    assert pool.waste(2) == 0.25
