"""SuffixDrafter: propose what most often followed the last tokens, in this request and in past outputs.

Suffix decoding (arXiv 2411.04975): a trie of all substrings of bounded depth, with counts. The longer the match, the
longer the draft. The n sequences of a request share one trie, so that samples of one prompt draft for each other.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from dovetail.engine.request.sequence import Sequence


class Node:
    """Hold how often a substring occurred, and the tokens that followed it."""

    __slots__ = ("children", "count")

    def __init__(self):
        self.count = 0
        self.children: dict[int, Node] = {}


class SuffixTrie:
    """Count every substring of up to `depth` tokens of the streams that are added."""

    def __init__(self, depth: int):
        self.root, self.depth = Node(), depth

    def extend(self, ends: list[Node], token: int) -> list[Node]:
        """Add a token to a stream.

        Args:
            ends: The nodes of the stream's last tokens, shortest substring first; empty for a new stream.
            token: The token.

        Returns:
            The nodes after it.
        """
        after = []
        for node in (self.root, *ends[: self.depth - 1]):
            child = node.children.get(token)
            if child is None:
                child = node.children[token] = Node()
            child.count += 1
            after.append(child)
        self.root.count += 1
        return after

    def follow(self, ends: list[Node], token: int) -> list[Node]:
        """Return the nodes after `token` without adding it; substrings that did not occur are left out."""
        found = (node.children.get(token) for node in (self.root, *ends[: self.depth - 1]))
        return [node for node in found if node is not None]

    def remove(self, tokens: list[int]) -> None:
        """Take back a stream of tokens."""
        for start in range(len(tokens)):
            node = self.root
            node.count -= 1
            for token in tokens[start : start + self.depth]:
                child = node.children[token]
                child.count -= 1
                if not child.count:
                    del node.children[token]
                    break
                node = child


def likeliest(node: Node, most: int, least: float) -> tuple[list[int], float]:
    """Return the most frequent continuation of up to `most` tokens, and its expected number of accepted tokens.

    It ends where its probability, by the counts, falls below `least`.
    """
    path, total, share = [], 0.0, 1.0
    while len(path) < most and node.children:
        token, child = max(node.children.items(), key=lambda each: each[1].count)
        share *= child.count / sum(each.count for each in node.children.values())  # the newest end has no next token
        if share < least:
            break
        path.append(token)
        total += share
        node = child
    return path, total


@dataclass
class _Stream:
    """Hold the matches of one sequence."""

    own: SuffixTrie  # of its request
    done: int = 0  # tokens that are in the trie
    ends: list[Node] = field(default_factory=list)  # of its last tokens, in the request's trie
    past: list[Node] = field(default_factory=list)  # and in the trie of past outputs


class SuffixDrafter:
    """Draft from the request's own tokens and from the outputs of past requests.

    Args:
        depth: Most tokens of a substring.
        cached: Most past outputs.
        factor: Most draft tokens per token of the match.
        least: Least probability of a draft token, by the counts.
    """

    runs_ahead = False

    def __init__(self, depth: int = 24, cached: int = 10_000, factor: float = 1.0, least: float = 0.1):
        self._depth, self._cached, self._factor, self._least = depth, cached, factor, least
        self._past, self._outputs = SuffixTrie(depth), deque[list[int]]()
        self._fresh = 0  # past outputs since the last `refresh`
        self._requests: dict[str, tuple[SuffixTrie, set[int]]] = {}  # trie, and the sequences that use it

    def propose(self, seq: Sequence, most: int) -> tuple[int, ...]:
        """Return the continuation with the most expected accepted tokens, of any match of the last tokens."""
        stream = self._stream(seq)
        best, score = [], 0.0
        for ends in (stream.ends, stream.past):
            for match in range(len(ends), 0, -1):
                longest = min(most, int(match * self._factor))
                if score >= longest:
                    break  # a shorter match has no better draft
                path, expected = likeliest(ends[match - 1], longest, self._least)
                if expected > score:
                    best, score = path, expected
        return tuple(best)

    def _stream(self, seq: Sequence) -> _Stream:
        """Return the sequence's matches, extended to its newest token."""
        stream = seq.draft_state
        if not isinstance(stream, _Stream):
            trie, users = self._requests.setdefault(seq.request.id, (SuffixTrie(self._depth), set()))
            users.add(seq.index)
            stream = seq.draft_state = _Stream(trie)
        for token in seq.tokens[stream.done :]:
            stream.ends = stream.own.extend(stream.ends, token)
            stream.past = self._past.follow(stream.past, token)
        stream.done = len(seq.tokens)
        return stream

    def finish(self, seq: Sequence) -> None:
        """Add the sequence's output to the past ones, of which the oldest is dropped when there are too many."""
        seq.draft_state = None
        if seq.request.id in self._requests:
            users = self._requests[seq.request.id][1]
            users.discard(seq.index)
            if not users:
                del self._requests[seq.request.id]
        if self._cached and seq.output:
            ends: list[Node] = []
            for token in seq.output:
                ends = self._past.extend(ends, token)
            self._outputs.append(seq.output)
            self._fresh = min(self._fresh + 1, self._cached)
            self._keep(self._cached)

    def refresh(self) -> None:
        """Drop the past outputs from before the last refresh: the model that sampled them has changed since."""
        self._keep(self._fresh)
        self._fresh = 0

    def _keep(self, count: int) -> None:
        """Drop all but the newest past outputs."""
        while len(self._outputs) > count:
            self._past.remove(self._outputs.popleft())
