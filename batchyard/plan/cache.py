"""What an engine's prefix cache will make of an order of requests. Pure; no tokenizer.

The model is vLLM's: a pool of blocks, of which full ones are known by everything before them; a
request pins the blocks it uses; freed blocks are taken again least recently used first, those of
one request from its end; a prompt's last token is always computed. Prompts are known by their
length and by what they share with the one before them in sorted order, which is all it takes to
say which blocks of any two are the same.
"""

from __future__ import annotations

import heapq
from array import array
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy.typing as npt

_STEP_WORTH_TOKENS = 256
"""What a step costs besides its tokens: it reads all weights, in the time that a GPU of today
computes so many tokens."""


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The engine's ``--num-gpu-blocks``, ``--block-size`` and limits of one step."""

    blocks: int
    block_tokens: int = 16
    sequences: int = 256
    step_tokens: int = 4096


@dataclass(frozen=True, slots=True)
class Reuse:
    """Prompt tokens in all, and how many of them came from the cache."""

    prompt_tokens: int
    cached_tokens: int

    @property
    def hit_rate(self) -> float:
        """The cached part of the prompt tokens, from 0 to 1."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


class PrefixTree:
    """Which full blocks the prompts share.

    A node is a run of blocks that no prompt leaves in the middle. ``parent`` and ``blocks`` have
    an entry for each node, ``leaf`` one for each prompt: the node that its last full block is in.
    -1 is nothing.
    """

    def __init__(self) -> None:
        self.parent = array("i")
        self.blocks = array("i")
        self.leaf = array("i")

    def path(self, prompt: int) -> list[int]:
        """The nodes of a prompt, its end first."""
        path, node = [], self.leaf[prompt]
        while node >= 0:
            path.append(node)
            node = self.parent[node]
        return path

    def add_node(self, parent: int, blocks: int) -> int:
        """Append a node of ``blocks`` blocks below ``parent`` (-1: the root); its number."""
        self.parent.append(parent)
        self.blocks.append(blocks)
        return len(self.parent) - 1


def prefix_tree(
    prompt_tokens: npt.NDArray[np.int64], shared_tokens: npt.NDArray[np.int64], block_tokens: int
) -> PrefixTree:
    """The tree of prompts in sorted order, in O(n).

    Both arrays have a number for each prompt; ``shared_tokens`` are those it shares with the one
    before.
    """
    # A prompt's last token is always computed, and a block is found whole or not at all.
    ends = ((np.maximum(prompt_tokens, 1) - 1) // block_tokens).tolist()
    shares = (shared_tokens // block_tokens).tolist()
    tree = PrefixTree()
    parent, blocks = tree.parent, tree.blocks
    spine: list[int] = []  # the nodes of the prompt before, from the root
    depths: list[int] = []  # how many blocks a prompt has up to the end of each
    for end, shared in zip(ends, shares, strict=True):
        common = min(shared, end, depths[-1] if depths else 0)
        child = -1
        while spine and depths[-1] > common:
            child, depth = spine.pop(), depths.pop()
        above = depths[-1] if depths else 0
        if child >= 0 and above < common:
            # The prompt before goes on where this one leaves it: its node is split.
            upper = tree.add_node(parent[child], common - above)
            parent[child], blocks[child] = upper, depth - common
            spine.append(upper)
            depths.append(common)
        if end > common:
            spine.append(tree.add_node(spine[-1] if spine else -1, end - common))
            depths.append(end)
        tree.leaf.append(spine[-1] if spine else -1)
    return tree


def ceiling(tree: PrefixTree, prompt_tokens: npt.NDArray[np.int64], block_tokens: int) -> Reuse:
    """What a cache would give that never has to forget. ``prompt_tokens`` as in the tree."""
    full = int(((np.maximum(prompt_tokens, 1) - 1) // block_tokens).sum())
    distinct = int(np.frombuffer(tree.blocks, dtype=np.int32).sum()) if tree.blocks else 0
    return Reuse(int(prompt_tokens.sum()), (full - distinct) * block_tokens)


def simulate(
    tree: PrefixTree,
    order: Iterable[int],
    prompt_tokens: Sequence[int],
    output_tokens: Sequence[int],
    shape: CacheShape,
) -> SimulatedEngine:
    """One engine that has served the prompts in this order. About 4 µs a request."""
    engine = SimulatedEngine(tree, shape)
    for prompt in order:
        engine.run(prompt, prompt_tokens[prompt], output_tokens[prompt])
    return engine


class SimulatedEngine:
    """One engine, first come, first served. ``steps``: what it has taken so far, not rounded.

    In a step each running sequence gains a token, and prompts are read with what is left of the
    step's tokens. Memory: what is in the cache.
    """

    def __init__(self, tree: PrefixTree, shape: CacheShape) -> None:
        self._tree = tree
        self._shape = shape
        self._blank = shape.blocks
        """Free blocks that hold nothing; they are taken first."""
        self._warm = 0
        """Free blocks that hold something: those of ``_free``."""
        self._cached: dict[int, int] = {}
        """Node → how many of its blocks are cached, from its beginning."""
        self._users: dict[int, int] = {}
        """Node → running requests that pin it."""
        self._free: OrderedDict[int, int] = OrderedDict()
        """Nodes that are not pinned, and (below -1) answers; how many blocks each, oldest first."""
        self._answers = -1
        self._running: list[tuple[float, int, int, int, int]] = []
        """Heap: end in steps, number, prompt, blocks held besides nodes, blocks still to come."""
        self._count = 0
        self._now = 0.0
        self._read = 0.0
        """The step in which everything admitted so far has been read."""
        self.steps = 0.0
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._output_tokens = 0

    @property
    def reuse(self) -> Reuse:
        """How much of the prompts so far came from the cache."""
        return Reuse(self._prompt_tokens, self._cached_tokens)

    @property
    def cost(self) -> float:
        """The time that it takes, as a number of tokens to compute: good only for ratios."""
        computed = self._prompt_tokens - self._cached_tokens + self._output_tokens
        return computed + self.steps * _STEP_WORTH_TOKENS

    def run(self, prompt: int, prompt_tokens: int, output_tokens: int) -> int:
        """Admit a request as soon as there is room; how many of its prompt's tokens are cached.

        A prompt has at least one token.
        """
        size = self._shape.block_tokens
        path = self._tree.path(prompt)
        nodes_blocks = sum(self._tree.blocks[node] for node in path)
        # An answer grows while it is written: half of it is there on average.
        whole = -(-(prompt_tokens + output_tokens) // size)
        at_first = -(-(prompt_tokens + output_tokens // 2) // size)
        if at_first > self._shape.blocks:
            # Nothing can run it; it must not empty the cache for the others.
            self._prompt_tokens += prompt_tokens
            return 0
        self._wait_for_sequence()
        hits, pinned = self._find(path)
        while self._running and self._blank + self._warm - pinned < at_first - hits:
            self._end_one()
            hits, pinned = self._find(path)
        self._pin(path)
        self._take(at_first - hits)
        computed = prompt_tokens - hits * size
        room = max(1, self._shape.step_tokens - len(self._running))
        self._read = max(self._read, self._now) + computed / room
        self._count += 1
        end = self._read + output_tokens
        self.steps = max(self.steps, end)
        held = (end, self._count, prompt, at_first - nodes_blocks, whole - at_first)
        heapq.heappush(self._running, held)
        self._prompt_tokens += prompt_tokens
        self._cached_tokens += hits * size
        self._output_tokens += output_tokens
        return hits * size

    def _wait_for_sequence(self) -> None:
        # A prompt is admitted when the step has tokens for it, and those before are read.
        self._now = max(self._now, self._read - 1)
        while self._running and (
            self._running[0][0] <= self._now or len(self._running) >= self._shape.sequences
        ):
            self._end_one()

    def _find(self, path: list[int]) -> tuple[int, int]:
        """Blocks of the path that are cached from its beginning, and how many of them are free."""
        hits = free = 0
        for node in reversed(path):
            cached = self._cached.get(node, 0)
            hits += cached
            if node in self._free:
                free += cached
            if cached < self._tree.blocks[node]:
                break
        return hits, free

    def _pin(self, path: list[int]) -> None:
        for node in path:
            if node in self._free:
                self._warm -= self._free.pop(node)
            self._users[node] = self._users.get(node, 0) + 1
            self._cached[node] = self._tree.blocks[node]

    def _take(self, count: int) -> None:
        """Take free blocks: blank ones, then those that were used longest ago."""
        blank = min(count, self._blank)
        self._blank -= blank
        count -= blank
        while count > 0 and self._free:
            key = next(iter(self._free))
            has = self._free[key]
            taken = min(has, count)
            count -= taken
            self._warm -= taken
            left = has - taken
            if left:
                self._free[key] = left
            else:
                del self._free[key]
            if key >= 0:
                if left:
                    self._cached[key] = left
                else:
                    del self._cached[key]

    def _end_one(self) -> None:
        end, _, prompt, held, to_come = heapq.heappop(self._running)
        self._now = max(self._now, end)
        growth = min(to_come, self._blank + self._warm)
        self._take(growth)
        held += growth
        # The last block is not full: no prompt can find it, so it is taken first.
        self._blank += 1
        if held > 1:
            self._answers -= 1
            self._free[self._answers] = held - 1
            self._warm += held - 1
        for node in self._tree.path(prompt):
            self._users[node] -= 1
            if not self._users[node]:
                del self._users[node]
                self._free[node] = self._cached[node]
                self._warm += self._cached[node]
