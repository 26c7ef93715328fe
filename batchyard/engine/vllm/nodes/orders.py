"""What the leader tells each node to run, and which options of the operator would contradict it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from batchyard.engine.vllm.vllm_options import EngineOptions

_OURS: Final = (
    *("nnodes", "n", "node-rank", "r", "headless", "master-addr"),
    *("data-parallel-address", "data-parallel-rank", "data-parallel-start-rank"),
)
"""Set by us, from who has joined."""
_UNSUITED: Final = (
    "data-parallel-external-lb",
    "data-parallel-hybrid-lb",
    "data-parallel-multi-port-external-lb",
    "enable-elastic-ep",
)
"""With these there is no single server that has all requests."""
_PARALLEL: Final = ("tensor-parallel-size", "pipeline-parallel-size", "data-parallel-size")
HOST_VARIABLE: Final = "VLLM_HOST_IP"


@dataclass(frozen=True, slots=True)
class Order:
    """One life of vLLM on all machines, the same for each of them.

    A node makes its own command of it: its Python, its folders, its rank.
    """

    weights: str
    words: tuple[str, ...]
    """Options of ``vllm serve``, those that we add included."""
    environment: Mapping[str, str]
    """The variables that the engine's block names."""
    needs_hub: bool

    def message(self, rank: int, address: str, nodes: int) -> dict[str, Any]:
        """What the node of this rank gets; ``address`` is the leader's."""
        words = [*self.words, *shared_words(nodes, address), "--node-rank", str(rank), "--headless"]
        return {**asdict(self), "words": words, "rank": rank}


def order_in(message: Mapping[str, Any]) -> Order:
    """The order of a message, with the words of the node's own rank."""
    return Order(
        str(message["weights"]),
        tuple(map(str, message["words"])),
        {str(name): str(value) for name, value in message["environment"].items()},
        bool(message["needs_hub"]),
    )


def shared_words(nodes: int, address: str) -> list[str]:
    """What every machine of the engine is told; ``nodes`` counts the leader too."""
    return ["--nnodes", str(nodes), "--master-addr", address]


def check_nodes(nodes: int, options: EngineOptions, environment: Mapping[str, str]) -> None:
    """Raise ``ValueError`` where the options contradict an engine over so many machines."""
    if nodes == 1:
        return
    if given := [f"--{name}" for name in _OURS if name in options]:
        raise ValueError(f"nodes sets {', '.join(given)} itself: leave it out of the options.")
    if given := [f"--{name}" for name in _UNSUITED if name in options]:
        raise ValueError(
            f"an engine with nodes has one API for all of them: leave {', '.join(given)} out."
        )
    if HOST_VARIABLE in environment:
        raise ValueError(
            f"{HOST_VARIABLE} differs on each node and is set for each: leave it out of the "
            "environment."
        )
    if _world_size(options) % nodes:
        raise ValueError(
            f"nodes: {nodes} needs a multiple of {nodes} ranks, but the options have "
            f"{_world_size(options)}: set {', '.join(f'--{name}' for name in _PARALLEL)} so that "
            "their product is the number of GPUs of all nodes."
        )


def _world_size(options: EngineOptions) -> int:
    size = 1
    for name in (*_PARALLEL, "prefill-context-parallel-size"):
        size *= options.number(name) or 1
    return size
