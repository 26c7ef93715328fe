"""Processes of the product without Prefect, for tests to kill::

    python -m tests.faults.actor control '{"settings": {…}, "hurry": {…}}'
    python -m tests.faults.actor runner '{… "model": "m", "engine": {…}}'
    python -m tests.faults.actor nursery

A control takes batches through their lives and reconciles; a runner serves one model with a stub
engine. The nursery forks either of them, so that a process which is to live for half a second
need not spend a second on imports: a line ``role parts`` on its standard input is answered with
``started PID``, and the end of a child is told as ``ended PID STATUS``. ``signal PID NUMBER``
reaches its own living children alone.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import selectors
import signal
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchyard.control.reconcile import Watch, reconcile
from batchyard.control.run_batches import BatchRunner
from batchyard.engine.remote.remote import RemoteEngine
from batchyard.engine.stub.stub import StubEngine
from batchyard.errors import StoreError
from batchyard.services.leases.held_batches import HeldBatches
from batchyard.services.services import open_services
from batchyard.settings import read_settings
from tests.hurry import hurried
from tests.lifecycle import run_chunks, take_to_its_end

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from batchyard.engine.base import Engine, EngineAnswer, EngineRequest
    from batchyard.services.services import Services

_RECONCILE_SECONDS = 1.0
logger = logging.getLogger(__name__)


class _KillingEngine(StubEngine):
    """Kills its own process at each request whose body has ``kills`` in it."""

    def __init__(self, kills: str | None, model: str, **options: Any) -> None:
        super().__init__(model, **options)
        self._kills = kills.encode() if kills else None

    async def answer(self, request: EngineRequest, *, timeout_seconds: float) -> EngineAnswer:
        if self._kills is not None and self._kills in request.body:
            os.kill(os.getpid(), signal.SIGKILL)
        return await super().answer(request, timeout_seconds=timeout_seconds)


async def control(services: Services) -> None:
    """Take batches through their lives until told to drain."""
    async with HeldBatches(services.store, services.settings) as held:
        services = replace(services, held=held)

        async def take(batch_id: str) -> None:
            await take_to_its_end(services, batch_id)

        reconciler = asyncio.create_task(_reconcile_regularly(services))
        try:
            await BatchRunner(services, held, take).serve()
        finally:
            reconciler.cancel()
            await asyncio.wait([reconciler])


async def runner(services: Services, model: str) -> None:
    """Serve the model's chunks until told to drain."""
    await run_chunks(services, model)


async def _reconcile_regularly(services: Services) -> None:
    watch = Watch(every_seconds=_RECONCILE_SECONDS)
    while True:
        try:
            await reconcile(services, watch)
        except StoreError as error:
            logger.warning("not reconciled: %s", error)
        await asyncio.sleep(_RECONCILE_SECONDS)


async def _serve(role: str, parts: dict[str, Any]) -> None:
    async def engine_for(model: str) -> Engine:
        engine = parts["engine"]
        if server := engine.get("server"):
            return RemoteEngine(server, model, max_num_seqs=engine["max_num_seqs"])
        log_path = engine.get("log_path")
        return _KillingEngine(
            engine.get("kills"),
            model,
            max_num_seqs=engine["max_num_seqs"],
            latency=engine["latency"],
            keep_log=False,
            log_path=Path(log_path) if log_path else None,
        )

    settings = read_settings(**parts["settings"])
    async with open_services(settings, engine_for=engine_for) as services:
        with hurried(**parts["hurry"]):
            if role == "control":
                await control(services)
            else:
                await runner(services, parts["model"])


def act(role: str, parts: dict[str, Any]) -> int:
    """One such process from here to its end; its exit status."""
    return run_as(role, _serve(role, parts))


def run_as(role: str, work: Coroutine[Any, Any, None]) -> int:
    """Do a process's work, with its log on standard error; the exit status."""
    logging.basicConfig(
        level=logging.INFO,
        stream=sys.stderr,
        format=f"%(asctime)s {os.getpid()} {role} %(levelname)s %(name)s %(message)s",
    )
    try:
        asyncio.run(work)
    except Exception:
        logger.exception("the %s died", role)
        return 1
    return 0


def serve_nursery(act: Callable[[str, dict[str, Any]], int] = act) -> None:
    """Fork children as told, until standard input ends; then kill those that are left."""
    woken, wake = socket.socketpair()
    woken.setblocking(False)
    wake.setblocking(False)
    signal.set_wakeup_fd(wake.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    orders = sys.stdin.buffer
    os.set_blocking(orders.fileno(), False)
    selector = selectors.DefaultSelector()
    selector.register(orders, selectors.EVENT_READ)
    selector.register(woken, selectors.EVENT_READ)
    children: set[int] = set()
    buffered = b""
    while True:
        ready = {key.fileobj for key, _ in selector.select()}
        if woken in ready:
            woken.recv(4096)
        _reap(children)
        if orders not in ready:
            continue
        data = os.read(orders.fileno(), 1 << 16)
        if not data:
            break
        *whole, buffered = (buffered + data).split(b"\n")
        for order in whole:
            role, _, parts = order.decode().partition(" ")
            if role == "signal":
                pid, number = map(int, parts.split())
                if pid in children:
                    os.kill(pid, number)
                continue
            child = os.fork()
            if child == 0:
                selector.close()
                _be(act, role, json.loads(parts))
            children.add(child)
            _say(f"started {child}")
    for child in children:
        os.kill(child, signal.SIGKILL)


def _be(act: Callable[[str, dict[str, Any]], int], role: str, parts: dict[str, Any]) -> None:
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        nothing = os.open(os.devnull, os.O_RDWR)
        log = os.open(parts["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.dup2(nothing, 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        status = act(role, parts)
    finally:
        os._exit(status)


def _reap(children: set[int]) -> None:
    for child in list(children):
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            children.discard(child)
            _say(f"ended {child} {os.waitstatus_to_exitcode(status)}")


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    if sys.argv[1] == "nursery":
        serve_nursery()
    else:
        sys.exit(act(sys.argv[1], json.loads(sys.argv[2])))
