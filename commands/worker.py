"""``batchyard worker``: Prefect's worker on a pool, for this process's settings.

It is `prefect worker start`, with what that cannot do: it says which database, object store and
Prefect it uses, waits until the database is migrated and the work pool is there, gives its file of
settings to its flow runs, and lets them end in order at SIGTERM.
"""

from __future__ import annotations

import asyncio
import os
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from batchyard.cli.terminal.offline import services_with_tables
from batchyard.cli.terminal.say import say
from batchyard.dispatch import PrefectApi, checked_api_url, start_reconciler
from batchyard.errors import DispatchFailed, SettingsError
from batchyard.logs.setup import prefect_variables
from batchyard.runner.slot import slots_of
from batchyard.services.machine.connections import connections
from batchyard.settings import read_settings
from batchyard.settings_sources import CONFIG_VARIABLE, config_file
from batchyard.web.proxies import check_proxies
from commands.exporter_process import HOST_VARIABLE, PORT_VARIABLE, Exporter
from commands.prefect.pools import CONTROL_POOL
from commands.prefect_worker import PREFECT_WORKER
from commands.worker_process import run_worker

if TYPE_CHECKING:
    from batchyard.settings import Settings

_METRICS_HOST = "127.0.0.1"
_MetricsHost = Annotated[
    str, typer.Option(envvar=HOST_VARIABLE, help="The address to serve metrics on.")
]
_MetricsPort = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=65535,
        envvar=PORT_VARIABLE,
        help="Serve metrics of the flow runs and of vLLM at /metrics on this port.",
    ),
]
_PORT_VARIABLE = "PREFECT_WORKER_WEBSERVER_PORT"
_LOOK_SECONDS = 1.0
_QUERY_VARIABLE = "PREFECT_WORKER_QUERY_SECONDS"
_FLOW_RUN_VARIABLE = "PREFECT__FLOW_RUN_ID"
_QUERY_SECONDS = "1"
"""Prefect's own 10 would be added to the time of each batch whose runner is not there yet."""


def register(app: typer.Typer) -> None:
    """Add the command; an entry point of the group ``batchyard.commands``."""
    app.command("worker")(worker)
    app.command("execute")(execute)


def worker(
    pool: Annotated[
        str, typer.Argument(help="The work pool: control, gpu, or another pool for engines.")
    ],
    limit: Annotated[
        int | None,
        typer.Option(min=1, help="How many flow runs at once; on a GPU pool, how many engines."),
    ] = None,
    health_port: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=65535,
            help="Answer GET /health on this port while the worker can ask Prefect for work.",
        ),
    ] = None,
    metrics_port: _MetricsPort = None,
    metrics_host: _MetricsHost = _METRICS_HOST,
) -> None:
    """Run flows of a Prefect work pool on this machine until Ctrl-C or SIGTERM."""
    checked_api_url(os.environ.get("PREFECT_API_URL"))
    check_proxies(os.environ)
    settings = read_settings()
    for name, what in connections(settings).items():
        say(f"{name}: {what}")
    asyncio.run(_until_it_can_work(pool))
    environment = (
        {_QUERY_VARIABLE: _QUERY_SECONDS} | prefect_variables(settings.log.format) | os.environ
    )
    # Flow runs have working folders of their own.
    environment["BATCHYARD_HOME"] = str(settings.home_folder)
    if (path := config_file()) is not None:
        environment[CONFIG_VARIABLE] = str(path)
    words = [*PREFECT_WORKER, "--pool", pool]
    words += [] if limit is None else ["--limit", str(limit)]
    if health_port is not None:
        words += ["--with-healthcheck"]
        environment[_PORT_VARIABLE] = str(health_port)
    sys.stdout.flush()
    exporter = None
    if metrics_port is not None:
        exporter = _exporter(settings, pool, metrics_host, metrics_port)
        environment |= exporter.variables
    try:
        status = run_worker(words, environment, settings.drain_seconds, exporter)
    finally:
        if exporter is not None:
            exporter.close()
    raise typer.Exit(status)


def _exporter(settings: Settings, pool: str, host: str, port: int) -> Exporter:
    has_engines = pool != CONTROL_POOL
    slots = [slot.label for slot in slots_of(settings)] if has_engines else []
    return Exporter(settings.home_folder, host, port, pool=pool, slots=slots)


def execute(metrics_port: _MetricsPort = None, metrics_host: _MetricsHost = _METRICS_HOST) -> None:
    """Run one flow run in this process, as the command of a Prefect work pool's container.

    Its id is in PREFECT__FLOW_RUN_ID, which a worker of the type kubernetes, docker or ecs sets.
    """
    if not os.environ.get(_FLOW_RUN_VARIABLE):
        raise SettingsError(
            f"{_FLOW_RUN_VARIABLE} is not set: this command is for containers that a Prefect "
            "worker starts."
        )
    check_proxies(os.environ)
    settings = read_settings()
    os.environ |= prefect_variables(settings.log.format) | os.environ
    if metrics_port is not None:
        # It ends with this process, which becomes another program and cannot watch it.
        os.environ |= _exporter(settings, settings.pool, metrics_host, metrics_port).variables
    sys.stdout.flush()
    # Signals reach the flow itself; Prefect's own command ignores them as process 1 of a container.
    words = [sys.executable, "-m", "prefect.engine"]
    os.execv(sys.executable, words)  # noqa: S606 - see above


async def _until_it_can_work(pool: str) -> None:
    """Return once the database is migrated, and `batchyard deploy` has made the pool."""
    async with services_with_tables():
        pass
    async with PrefectApi.from_environment() as api:
        said = ""
        while reason := await _why_not(api, pool):
            if reason != said:
                said = reason
                say(f"batchyard: {reason} Waiting for it.", err=True)
            await asyncio.sleep(_LOOK_SECONDS)
        if pool == CONTROL_POOL:
            await start_reconciler(api)


async def _why_not(api: PrefectApi, pool: str) -> str | None:
    """Why flow runs of the pool cannot be had yet. Raises SettingsError for a wrong login."""
    try:
        if await api.has_pool(pool):
            return None
    except DispatchFailed as error:
        return str(error)
    return f"Prefect has no work pool {pool}: run `batchyard deploy`."
