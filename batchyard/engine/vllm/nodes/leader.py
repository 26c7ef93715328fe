"""The leader's side: which nodes have joined, and that the engine ends with each of them.

vLLM 0.32 does not notice that a node is lost: ``/health`` stays 200, and the requests that the node
had get no answer. So the leader's vLLM is killed as soon as a node's ends, or its connection does.
What follows is that of every crash of an engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from batchyard.engine.base import StartProgress
from batchyard.engine.vllm.nodes.link import (
    DEFAULT_PORT,
    MAX_LINE_BYTES,
    Link,
    LinkLost,
    WrongKey,
    link_keys,
    linked,
)
from batchyard.engine.vllm.nodes.orders import HOST_VARIABLE, shared_words
from batchyard.engine.vllm.nodes.slurm import NodesStep, start_step
from batchyard.errors import EngineLost, EngineNotReached, EngineStartFailed
from batchyard.logs import event_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from batchyard.engine.vllm.nodes.orders import Order

log = event_logger(__name__)

_LOOK_SECONDS: Final = 0.5
_NAME_CHARACTERS: Final = 64
_LOG_CHARACTERS: Final = 500


@dataclass(eq=False, slots=True)
class _Node:
    name: str
    vllm: str | None
    link: Link
    has_order: bool = False


@dataclass(frozen=True, slots=True)
class Loss:
    """Which node has ended the engine, and why."""

    reason: str
    log: list[str] = field(default_factory=list)
    """The lines of its vLLM's log that say why."""
    error: type[EngineLost] = EngineLost
    """For the requests in flight: whether one of them may be the cause."""


class Nodes:
    """The other machines of one engine; ``count`` may be 0. They connect to ``port``.

    One life of the engine is ``gather``, ``lead`` and ``close``; then it can begin again. Nodes
    beyond ``count`` may join: they wait, and take the place of another one in the next life.
    """

    def __init__(
        self, count: int = 0, *, port: int = DEFAULT_PORT, secret_keys: Sequence[str] = ()
    ) -> None:
        self._count = count
        self._port = port
        self._keys = link_keys(secret_keys) if count else None
        self.loss: Loss | None = None
        """Why this life has ended, if a node is the cause."""
        self._joined: list[_Node] = []
        self._change = asyncio.Event()
        self._on_loss: Callable[[], None] | None = None
        self._server: asyncio.Server | None = None
        self._serving: set[asyncio.Task[None]] = set()
        self._step: NodesStep | None = None

    @property
    def words(self) -> list[str]:
        """The options of the leader's vLLM, once the nodes have joined."""
        return shared_words(self._count + 1, self._address) if self._count else []

    @property
    def environment(self) -> dict[str, str]:
        """The variables of the leader's vLLM, once the nodes have joined."""
        return {HOST_VARIABLE: self._address} if self._count else {}

    @property
    def _address(self) -> str:
        """The address of this machine that the nodes reach; vLLM's connections use it too."""
        return self._joined[0].link.own_address if self._joined else ""

    async def gather(
        self,
        vllm: str | None,
        seconds: float,
        on_progress: Callable[[StartProgress], None],
    ) -> None:
        """Return when all nodes have joined, with the leader's version of vLLM.

        Raises :class:`~batchyard.errors.EngineStartFailed` if they have not in that time, and if
        this machine cannot listen or start them.
        """
        if not self._count:
            return
        try:
            self._server = await asyncio.start_server(
                self._admit, port=self._port, limit=MAX_LINE_BYTES
            )
            self._step = start_step(self._count, self._port, os.environ)
        except OSError as error:
            raise EngineStartFailed(
                f"the nodes of the engine cannot join on port {self._port} of this machine: {error}"
            ) from error
        deadline = time.monotonic() + seconds
        seen = -1
        while len(self._joined) < self._count:
            if seen != len(self._joined):
                seen = len(self._joined)
                on_progress(self._progress())
            if time.monotonic() > deadline:
                raise EngineStartFailed(
                    f"{seen} of {self._count} nodes joined the engine in {seconds:.0f} s: run "
                    f"`batchyard engine-node` on the others, with this machine and port "
                    f"{self._port}."
                )
            if self._step is not None:
                self._step.check()
            self._change.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_SECONDS):
                    await self._change.wait()
        self._check_versions(vllm)

    def lead(self, order: Order, on_loss: Callable[[], None]) -> None:
        """Let the nodes run it; ``on_loss`` is called once, when the first of them is lost.

        Nothing may be awaited between ``gather`` and this: a node might leave meanwhile.
        """
        if not self._count:
            return
        self._on_loss = on_loss
        # By name, so that each finds in its caches what it has compiled for its rank.
        chosen = sorted(self._joined[: self._count], key=lambda each: each.name)
        address = self._address
        for rank, node in enumerate(chosen, start=1):
            node.has_order = True
            node.link.send(order.message(rank, address, self._count + 1))

    def leave(self) -> None:
        """Leave the nodes: they end their vLLM, and join again when the port opens again."""
        self._on_loss = None
        if self._server is None:
            return
        self._server.close()
        self._server = None
        for task in self._serving:
            task.cancel()

    async def close(self) -> None:
        """Leave the nodes, if this has not happened; return when nothing of this life is left."""
        self.leave()
        if self._serving:
            await asyncio.wait(self._serving)
        if self._step is not None:
            step, self._step = self._step, None
            await step.stop()
        self.loss = None

    def _progress(self) -> StartProgress:
        joined = len(self._joined)
        return StartProgress(
            f"waiting for nodes: {joined} of {self._count} joined", joined / self._count
        )

    def _check_versions(self, vllm: str | None) -> None:
        for node in self._joined:
            if None not in {vllm, node.vllm} and node.vllm != vllm:
                raise EngineStartFailed(
                    f"the node {node.name} has vLLM {node.vllm}, and this machine has {vllm}: "
                    "install the same version on all."
                )

    def _admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._server is None:
            writer.close()
            return
        # Our own task: asyncio's streams log an error when one of theirs is cancelled.
        task = asyncio.create_task(self._serve(reader, writer), name="node")
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert self._keys is not None  # noqa: S101 - it listens
        try:
            async with linked(reader, writer, self._keys) as link:
                await self._keep(_node_of(link, await _hello(link)))
        except WrongKey as error:
            address = writer.get_extra_info("peername")[0]
            log.warning("engine.node_refused", str(error), address=address)
        except LinkLost:
            pass  # it has not joined

    async def _keep(self, node: _Node) -> None:
        """The node belongs to the engine while this runs."""
        log.info("engine.node_joined", node=node.name, vllm=node.vllm or "unknown")
        self._joined.append(node)
        self._change.set()
        loss = Loss(f"the node {node.name} is lost")
        try:
            loss = _ending(node, await node.link.receive())
        except LinkLost as error:
            reason = f"the node {node.name} is lost: {error}"
            loss = Loss(reason, error=EngineNotReached)
        finally:
            self._joined.remove(node)
            self._change.set()
            if node.has_order:
                self._lose(loss)

    def _lose(self, loss: Loss) -> None:
        if self._on_loss is None:
            return
        self.loss = loss
        log.warning("engine.node_lost", loss.reason)
        for line in loss.log:
            log.warning("engine.log", line)
        on_loss, self._on_loss = self._on_loss, None
        on_loss()


async def _hello(link: Link) -> dict[str, Any]:
    try:
        return await link.receive()
    except WrongKey:
        link.refuse()
        raise


def _node_of(link: Link, hello: dict[str, Any]) -> _Node:
    vllm = hello.get("vllm")
    name = str(hello.get("name"))[:_NAME_CHARACTERS]
    return _Node(name, None if vllm is None else str(vllm), link)


def _ending(node: _Node, message: dict[str, Any]) -> Loss:
    lines = [str(line)[:_LOG_CHARACTERS] for line in message.get("log", [])]
    if (reason := message.get("cannot")) is not None:
        return Loss(f"the node {node.name} cannot run the engine: {reason}", lines)
    how = f"its vLLM ended with exit code {message.get('ended')}"
    return Loss(f"the node {node.name} is lost: {how}", lines)
