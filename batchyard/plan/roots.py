"""Which batches begin alike: a sample of the prefix tree that each plan walks. Pure.

A *node* of the tree is a prompt's beginning of 512 bytes, of 724, of 1,024, and so on. It is known
by a keyed hash, so that nothing that is kept tells of a prompt, and equal beginnings are seen only
where the keys are the same: within one cache. Of each tree the nodes with the least hashes are
kept. They are the same sample of any two trees, so they have in common what the trees have.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from typing import Final, NamedTuple

MOST_NODES: Final = 128
_DEPTHS: Final = tuple(int(512 * math.sqrt(2) ** level) for level in range(15))
"""Bytes. What is shared beyond the deepest one that a prompt reaches is not seen."""
_DIGEST_BYTES: Final = 7
_BYTES_PER_TOKEN: Final = 4
_WORTH_SHARING: Final = 0.4
"""Of k batches that share at least half of their work, the average one ends sooner if all run side
by side, whatever k is: one after the other they would take 1, 2 … k times as long as one. Not all
that is shared is seen: of the last node on, it is unknown how far."""


_SPANS: Final = {depth: depth - above for above, depth in pairwise((0, *_DEPTHS))}


class Node(NamedTuple):
    """A beginning that prompts have: its hash, its length, and the first of them in the order."""

    digest: int
    depth: int
    rank: int

    @property
    def span(self) -> int:
        """The bytes from the node above to this one."""
        return _SPANS[self.depth]


@dataclass(frozen=True, slots=True)
class Roots:
    """A sample of one plan's tree. ``trunk_tokens`` are those of all its nodes, each read once;
    ``work_tokens`` what the whole plan computes, answers included."""

    nodes: tuple[Node, ...] = ()
    trunk_tokens: int = 0
    work_tokens: int = 0

    def part_in(self, other: Roots) -> float:
        """Which part of these nodes the other tree has too, by their length; an estimate."""
        limit = min(self._limit, other._limit)
        sample = [node for node in self.nodes if node.digest <= limit]
        others = {node.digest for node in other.nodes}
        common = sum(node.span for node in sample if node.digest in others)
        return common / max(1, sum(node.span for node in sample))

    def is_worth_joining(self, other: Roots) -> bool:
        """Whether most of this plan's work is done once for both if they run side by side."""
        shared = self.part_in(other) * self.trunk_tokens
        return shared > 0 and shared >= _WORTH_SHARING * self.work_tokens

    def place_beside(self, other: Roots, rank: int) -> int | None:
        """Where this plan is when the other one is at ``rank``; None: they have nothing in common.

        That is at the last node that both have before it, or else at the first one after.
        """
        own = {node.digest: node.rank for node in self.nodes}
        pairs = sorted((node.rank, own[node.digest]) for node in other.nodes if node.digest in own)
        if not pairs:
            return None
        return pairs[max(0, bisect_right(pairs, (rank, math.inf)) - 1)][1]

    @property
    def _limit(self) -> float:
        """Up to which hash all nodes of the tree are here."""
        return math.inf if len(self.nodes) < MOST_NODES else self.nodes[-1].digest


NO_ROOTS: Final = Roots()
"""The roots of a plan whose order is not that of prefixes, or whose prompts are all short."""


class RootSampler:
    """Takes the keys of :func:`batchyard.lines.prompt.prompt_key` in their order."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._heap: list[tuple[int, int, int]] = []
        """The greatest hash first: negative digest, depth, rank."""
        self._trunk_bytes = 0

    def add(self, key: bytes, shared_bytes: int, rank: int) -> None:
        """Take the next key, of whose prompt so many bytes are those of the one before."""
        start = key.find(b"\0") + 1
        size = len(key) - start
        # Of most prompts every node is one of the prompt before.
        reached = bisect_right(_DEPTHS, size)
        if not reached or _DEPTHS[reached - 1] <= shared_bytes:
            return
        digest = blake2b(key[:start], digest_size=_DIGEST_BYTES, key=self._secret)
        read = 0
        for depth in _DEPTHS[:reached]:
            digest.update(key[start + read : start + depth])
            read = depth
            if depth > shared_bytes:
                self._keep(Node(int.from_bytes(digest.digest()), depth, rank))

    def finish(self, work_tokens: int) -> Roots:
        """The sample, of a plan with so much work."""
        nodes = sorted(Node(-digest, depth, rank) for digest, depth, rank in self._heap)
        return Roots(tuple(nodes), self._trunk_bytes // _BYTES_PER_TOKEN, work_tokens)

    def _keep(self, node: Node) -> None:
        self._trunk_bytes += node.span
        entry = (-node.digest, node.depth, node.rank)
        if len(self._heap) < MOST_NODES:
            heapq.heappush(self._heap, entry)
        elif entry > self._heap[0]:
            heapq.heapreplace(self._heap, entry)
