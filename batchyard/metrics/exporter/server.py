"""The exporter's HTTP server, until its parent ends."""

from __future__ import annotations

import asyncio
import shutil
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
from aiohttp import web

from batchyard.metrics.exporter.page import make_page
from batchyard.processes.beside import beside
from batchyard.processes.orphan import end_with_parent

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

BIND_AGAIN_SECONDS: Final = 10.0
_CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


class ExporterOptions(msgspec.Struct, frozen=True):
    """What the command says to its exporter, as JSON in its only argument."""

    parent: int
    folder: str
    host: str
    port: int
    slots: list[str]
    """The engine slots of the worker; empty for one that has none."""
    worker: dict[str, str]
    """Labels that describe the worker."""
    pause_seconds: float = 0.0
    """How long to wait at first: the exporter before this one ended by itself."""


def run_exporter(options: ExporterOptions) -> None:
    """Serve until the parent ends, and remove the folder then."""
    asyncio.run(_serve_until_told(options))
    shutil.rmtree(options.folder, ignore_errors=True)


async def _serve_until_told(options: ExporterOptions) -> None:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    if not end_with_parent(options.parent):
        return
    async with beside(stopped.wait()) as told, beside(_serve(options)) as serving:
        await asyncio.wait([serving, told], return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            serving.result()


async def _serve(options: ExporterOptions) -> None:
    await asyncio.sleep(options.pause_seconds)

    async def page() -> str:
        return await make_page(Path(options.folder), options.slots, options.worker)

    runner = web.AppRunner(application(page), access_log=None, shutdown_timeout=0.5)
    await runner.setup()
    try:
        await _bind(runner, options)
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()


async def _bind(runner: web.AppRunner, options: ExporterOptions) -> None:
    """Listen; try again for as long as the address cannot be had."""
    is_said = False
    while True:
        site = web.TCPSite(runner, options.host, options.port)
        try:
            await site.start()
        except OSError as error:
            if not is_said:
                is_said = True
                _say(
                    f"/metrics cannot be served on {options.host}, port {options.port}: "
                    f"{error.strerror}. Flow runs are not affected. It is tried again every "
                    f"{BIND_AGAIN_SECONDS:.0f} s."
                )
            await site.stop()
            await asyncio.sleep(BIND_AGAIN_SECONDS)
        else:
            host = f"[{options.host}]" if ":" in options.host else options.host
            _say(f"/metrics: http://{host}:{options.port}/metrics")
            return


def application(make: Callable[[], Awaitable[str]]) -> web.Application:
    """Serves what ``make`` returns at /metrics; requests at the same time share one page."""
    making: asyncio.Task[str] | None = None

    async def metrics(_: web.Request) -> web.Response:
        nonlocal making
        if making is None or making.done():
            making = asyncio.ensure_future(make())
        # Who closes the connection must not end what others wait for.
        text = await asyncio.shield(making)
        response = web.Response(body=text.encode(), headers={"Content-Type": _CONTENT_TYPE})
        response.enable_compression()
        return response

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    return app


def _say(text: str) -> None:
    sys.stderr.write(f"batchyard: {text}\n")
    sys.stderr.flush()
