"""``batchyard serve``: only the HTTP API."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
import socket
from typing import TYPE_CHECKING, Annotated, Final

import typer
import uvicorn
from uvicorn.importer import import_from_string
from uvicorn.supervisors import Multiprocess

from batchyard.cli.operate.connection_deadlines import DeadlineProtocol
from batchyard.cli.tenants.local_key import local_key_file
from batchyard.cli.terminal.offline import services_with_tables
from batchyard.cli.terminal.options import DEFAULT_PORT, PORT_VARIABLE
from batchyard.cli.terminal.stoppable import stop_signals
from batchyard.errors import SettingsError
from batchyard.logs.setup import logging_config
from batchyard.processes.orphan import end_with_parent
from batchyard.services.machine.connections import connections
from batchyard.settings import read_settings

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from fastapi import FastAPI

    from batchyard.settings_parts import LogSettings

HOST_VARIABLE: Final = "BATCHYARD_API_HOST"

_APPLICATION = "batchyard.server:create_app"
_ONE_OF_SEVERAL = "batchyard.cli.operate.serve:one_of_several"
_BACKLOG = 2048
_GRACE_SECONDS = 15
"""How long uploads and downloads have to finish after a stop."""
_KEEP_ALIVE_SECONDS = 75
"""Longer than clients keep an idle connection, or they would send into one that just closed."""


def serve(
    host: Annotated[
        str,
        typer.Option(
            envvar=HOST_VARIABLE, help="The address to listen on; 0.0.0.0 for all interfaces."
        ),
    ] = "127.0.0.1",
    port: Annotated[
        int,
        typer.Option(min=0, max=65535, envvar=PORT_VARIABLE, help="The port; 0 for any free one."),
    ] = DEFAULT_PORT,
    workers: Annotated[
        int, typer.Option(min=1, help="Number of processes that share the port.")
    ] = 1,
) -> None:
    """Serve the API for OpenAI's SDKs until Ctrl-C, or until its terminal is closed.

    New batches start a runner through Prefect, at PREFECT_API_URL.
    """
    with listening(host, port) as listener:
        # Once, before the processes that share the port start.
        key_file = asyncio.run(_prepare())
        typer.echo(f"API:  http://{_authority(host, listener)}/v1")
        typer.echo(f"Key:  {f'in {key_file}' if key_file else 'batchyard keys create NAME'}")
        settings = read_settings()
        for name, what in connections(settings).items():
            typer.echo(f"{name}: {what}")
        _serve(listener, workers, settings.log)


@contextlib.contextmanager
def listening(host: str, port: int) -> Iterator[socket.socket]:
    """A socket that accepts connections. Raises SettingsError if the address cannot be used."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        number = error.errno or 0
        if number < 0:  # those of name resolution
            raise SettingsError(
                f"{host} is not an address of this machine: choose another with --host or "
                f"{HOST_VARIABLE}."
            ) from error
        raise SettingsError(
            f"The API cannot listen on {host}, port {port} ({os.strerror(number)}): "
            f"choose another with --port or {PORT_VARIABLE}."
        ) from error
    with listener:
        # What it accepts inherits this. asyncio sets it for sockets whose protocol is given as
        # TCP, and this one's is 0: the body of each answer would wait for the client's delayed
        # acknowledgement of the head, 40 ms.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield listener


def one_of_several() -> FastAPI:
    """The application in one of the processes that share a port; the first process ends them all.

    A closed terminal sends SIGHUP to all of them, which would cut off what this one is sending.
    If the first one is killed, the others would serve for ever, and keep the port from the next.
    """
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is None or parent.pid is None or not end_with_parent(parent.pid):
        raise SystemExit
    application: FastAPI = import_from_string(_APPLICATION)()
    return application


class _Processes(Multiprocess):
    """Uvicorn's own begin anew at SIGHUP: they would outlive their terminal, and keep the port."""

    def __init__(self, config: uvicorn.Config, sockets: list[socket.socket]) -> None:
        ends_with_terminal = signal.SIGHUP in stop_signals()
        super().__init__(config, sockets)
        if not ends_with_terminal:
            signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def handle_hup(self) -> None:
        """End all of them in good order."""
        self.should_exit.set()


def _serve(listener: socket.socket, workers: int, log: LogSettings) -> None:
    config = uvicorn.Config(
        _APPLICATION if workers == 1 else _ONE_OF_SEVERAL,
        factory=True,
        http=DeadlineProtocol,
        workers=workers,
        lifespan="on",
        access_log=False,
        log_config=logging_config(log.format, log.level),
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=_GRACE_SECONDS,
    )
    if workers > 1:
        _Processes(config, sockets=[listener]).run()
        return
    server = uvicorn.Server(config)
    if signal.SIGHUP in stop_signals():
        signal.signal(signal.SIGHUP, server.handle_exit)
    with contextlib.suppress(KeyboardInterrupt):  # raised again when everything is closed
        server.run(sockets=[listener])


async def _prepare() -> Path | None:
    async with services_with_tables() as services:
        return await local_key_file(services)


def _authority(host: str, listener: socket.socket) -> str:
    port = listener.getsockname()[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
